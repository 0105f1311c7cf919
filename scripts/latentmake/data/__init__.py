"""Data: listings of datasets, their items, and the contents of files."""
