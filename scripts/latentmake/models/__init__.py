"""Models: from weights on a disk to recipes."""
