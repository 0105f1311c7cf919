"""Reports for people: plan tables, checklists, pages."""
