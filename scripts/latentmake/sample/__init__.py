"""Makes what a fresh clone can be tried with: a drawn dataset and a tiny model, both offline.

The heavy half (``bundle``) imports torch; the drawing half does not, so import the modules
themselves.
"""

__all__: list[str] = []
