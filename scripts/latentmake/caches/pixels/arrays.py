"""Pictures as arrays: taken from Pillow's images, and scaled by Lanczos."""

from __future__ import annotations

import warnings

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from latentmake.geometry.buckets import Size

Array = NDArray[np.uint8]

# Of torch, about the array of an image, which `lanczos` only reads.
warnings.filterwarnings("ignore", "The given NumPy array is not writable")

# Pillow's blocks of memory are kept for the next images: a third of the time of decoding is that of
# the system, which clears fresh memory.
Image.core.set_block_size(1 << 27)  # type: ignore[attr-defined]  # bytes: 32 megapixels
Image.core.set_blocks_max(4)  # type: ignore[attr-defined]


def lanczos(pixels: Array, size: Size) -> Array:
    """Scale a picture by Lanczos over its full extent: first rows, then columns.

    By torch's kernel of 8 bits, in a tenth of Pillow's time. For any picture whose sides both grow
    or both shrink it differs from Pillow's by at most 2 levels of 255, by 45 dB PSNR at least.
    By Pillow where torch is too old to have this kernel.

    Args:
        pixels: [height, width, channels].
        size: of the result.

    Returns:
        [height, width, channels], not contiguous.
    """
    import torch  # only here: a job that finds everything fresh scales nothing

    if not hasattr(torch.ops.aten, "_upsample_lanczos2d_aa"):
        return by_pillow(pixels, size)
    planes = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    threads = torch.get_num_threads()  # of this thread, which is one of several that read
    torch.set_num_threads(1)
    try:
        scaled = torch.nn.functional.interpolate(
            planes, (size.height, size.width), mode="lanczos", antialias=True
        )
    finally:
        torch.set_num_threads(threads)
    found: Array = scaled[0].permute(1, 2, 0).numpy()
    return found


def by_pillow(pixels: Array, size: Size) -> Array:
    """Do the same by Pillow alone, whose own order of rows and columns depends on the shape."""
    rows = Image.fromarray(pixels).resize((size.width, pixels.shape[0]), Image.Resampling.LANCZOS)
    return np.array(rows.resize(size, Image.Resampling.LANCZOS))
