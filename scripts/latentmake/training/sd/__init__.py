"""The trainer `sd`: Stable Diffusion from caches."""
