"""Caches: jobs that encode stale targets."""
