"""Model files: their parts, checks of their headers, and recipes of their caches."""
