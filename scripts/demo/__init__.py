"""The sample: a drawn dataset and a tiny Stable Diffusion, both made offline.

Outside of the package: of that it imports errors and progress alone.
"""
