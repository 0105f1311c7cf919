"""Training of the small models of the samples, `data/tiny-sd` and `data/tiny-wan`."""
