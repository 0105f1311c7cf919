"""Base: tools that every layer uses, such as errors, digests, atomic writes and signals."""
