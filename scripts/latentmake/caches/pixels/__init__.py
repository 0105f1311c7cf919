"""Pixels of images and videos, 0 to 255, as the trainer of each layout would make them."""
