"""Plan: stale targets, and the orders that make them."""
