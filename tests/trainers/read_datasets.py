"""Reads image datasets by musubi-tuner's own classes; run by the trainers' forked Python.

Its argument is a JSON list of the arguments of `ImageDataset`. Prints of each dataset the name of
every item with the sizes and colours (red) of its pictures, or an error.
"""

import json
import sys
from pathlib import Path

from musubi_tuner.dataset.image_video_dataset import ImageDataset


def described(picture):
    return [picture.shape[1], picture.shape[0], int(picture[0, 0, 0])]


def read(arguments):
    try:
        dataset = ImageDataset(batch_size=1, num_repeats=1, cache_directory=".", **arguments)
        found = {}
        for _, (item,) in dataset.retrieve_latent_cache_batches(4):
            pictures = item.content if isinstance(item.content, list) else [item.content]
            found[Path(item.item_key).stem] = {
                "pictures": [described(each) for each in pictures],
                "controls": [described(each) for each in item.control_content or []],
            }
        return found
    except (ValueError, ZeroDivisionError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


print(json.dumps([read(each) for each in json.loads(Path(sys.argv[1]).read_text())]))
