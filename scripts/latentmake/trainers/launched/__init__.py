"""External trainers: launched in their own environments."""
