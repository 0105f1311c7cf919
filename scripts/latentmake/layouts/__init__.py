"""Layouts: names of cache files, and other differences between the caches of trainers."""
