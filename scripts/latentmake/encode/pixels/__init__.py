"""Pixels of images and frames, as the encoders expect them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Array = NDArray[np.uint8]

# Pillow keeps its blocks of memory for the next images. Otherwise the system would clear fresh
# memory for each image, which takes a third of the time of decoding.
Image.core.set_block_size(1 << 27)  # type: ignore[attr-defined]  # bytes: 32 megapixels
Image.core.set_blocks_max(4)  # type: ignore[attr-defined]
