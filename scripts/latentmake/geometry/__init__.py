"""Geometry: sizes, buckets and clips, computed as the trainers do."""
