"""Encode: jobs that make stale cache files."""
