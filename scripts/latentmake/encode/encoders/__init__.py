"""Encoders of pixels and captions. All modules but this import torch."""
