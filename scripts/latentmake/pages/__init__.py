"""Pages: plan tables, checklists and HTML pages for people."""
