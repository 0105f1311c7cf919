"""Layouts: names of cache files, and whatever else differs between the caches of trainers."""
