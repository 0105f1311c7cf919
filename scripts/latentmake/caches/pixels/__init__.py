"""Pixels of images and frames as encoders take them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Array = NDArray[np.uint8]

# Pillow's blocks of memory are kept for the next images: a third of the time of decoding is that of
# the system, which clears fresh memory.
Image.core.set_block_size(1 << 27)  # type: ignore[attr-defined]  # bytes: 32 megapixels
Image.core.set_blocks_max(4)  # type: ignore[attr-defined]
