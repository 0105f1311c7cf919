"""`python -m demo MODEL FOLDER`: train a small model of the samples, offline."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from latentmake.base.atomic import replacing_folder

from demo.tiny_captioner import write_tiny_captioner
from demo.tiny_sd import write_tiny_sd
from demo.tiny_wan import write_tiny_wan

_WRITERS: dict[str, Callable[[Path], None]] = {
    "tiny-sd": write_tiny_sd,
    "tiny-wan": write_tiny_wan,
    "tiny-captioner": write_tiny_captioner,
}


def main() -> None:
    """Train the model that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("model", choices=_WRITERS)
    parser.add_argument("folder", type=Path, help="a new folder for the model")
    parser.add_argument("--threads", type=int, default=1, help="another number gives other bytes")
    arguments = parser.parse_args()
    if arguments.folder.exists():
        parser.error(f"{arguments.folder} exists; name a new folder")
    torch.set_num_threads(arguments.threads)
    with replacing_folder(arguments.folder) as folder:
        _WRITERS[arguments.model](folder)


if __name__ == "__main__":
    main()
