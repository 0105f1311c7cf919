"""musubi-tuner: its command lines, checks, caches and publications."""
