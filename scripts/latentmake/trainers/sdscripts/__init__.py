"""sd-scripts: its command lines, checks, folders and publications."""
