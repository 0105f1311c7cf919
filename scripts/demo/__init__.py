"""The samples: drawn datasets, a tiny Stable Diffusion and a tiny Wan, all made offline.

Outside of the package: of that it imports errors, progress and the writing of MP4 files alone.
"""
