"""The small models of the samples, `data/tiny-sd` and `data/tiny-wan`: how they were trained."""
