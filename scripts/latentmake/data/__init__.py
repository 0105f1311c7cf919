"""Data: from datasets to items."""
