"""Exchange: caches from and for other programs and machines."""
