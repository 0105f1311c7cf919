"""Pixels: from the bytes of images and videos to the input of each VAE."""
