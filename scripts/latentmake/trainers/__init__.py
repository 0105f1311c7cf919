"""Training: orders, processes and results."""
