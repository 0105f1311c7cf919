"""Trainer `sd`: train Stable Diffusion from caches."""
