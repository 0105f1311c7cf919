"""Data of a training: from cache files to batches."""
