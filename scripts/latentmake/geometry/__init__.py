"""Geometry: sizes, buckets and clips in whole numbers."""
