"""Configuration: typed sections that refuse unknown keys, with one line for each error."""
