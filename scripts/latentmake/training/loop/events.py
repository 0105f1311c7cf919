"""Sample pictures as events of TensorBoard."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch.utils.tensorboard import SummaryWriter

from latentmake.errors import storage_error

Pictures = Mapping[int, Sequence[Image.Image | None]]


def write_events(folder: Path, pictures: Pictures) -> None:
    """Write sample pictures for TensorBoard, tagged `samples/00` and so on by their prompts.

    Args:
        folder: of these event files alone; its content is replaced.
        pictures: step -> a picture for each prompt.
    """
    try:
        shutil.rmtree(folder, ignore_errors=True)
        if not pictures:
            return
        writer: Any = SummaryWriter(str(folder))
        for step, row in pictures.items():
            for number, picture in enumerate(row):
                if picture is not None:
                    tag, pixels = f"samples/{number:02d}", np.asarray(picture)
                    writer.add_image(tag, pixels, step, dataformats="HWC")
        writer.close()
    except Exception as error:
        raise storage_error(error, folder) or error from None
