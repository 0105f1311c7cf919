"""Sources: from datasets to items."""
