"""Adoption of the caches that musubi-tuner and sd-scripts made, in folders of their own."""
