"""Formats: bytes of cache files, images and videos, and checks of them."""
