"""Data of the trainer `sd`: from cache files to batches."""
