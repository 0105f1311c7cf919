"""Encoders: what turns pixels and captions into what a trainer reads. They import torch."""
