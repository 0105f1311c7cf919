"""Training of the small models of the samples: `data/tiny-sd`, `tiny-wan` and `tiny-captioner`."""
