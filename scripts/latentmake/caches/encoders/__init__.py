"""Encoders of pixels and captions. They import torch."""
