"""Models with the real names and shapes of their tensors, in files of a few kilobytes.

A header says the shapes; all tensors share two bytes. Names are those that diffusers, transformers
and the original releases have.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from pickle import dumps

import yaml

Shapes = dict[str, tuple[int, ...]]
_ALL = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


def shapes(name: str, width: str = "") -> Shapes:
    """Return shapes of the table, with a width in place of `w`."""
    found: Shapes = {}
    for pattern, shape in _ALL["shapes"][name].items():
        if isinstance(shape, str):
            inner = shapes(*shape.split())
            found |= {pattern + each: sizes for each, sizes in inner.items()}
            continue
        parts = [part.split() or [""] for part in re.split("[<>]", pattern)]
        sizes = tuple(int(width) if size == "w" else size for size in shape)
        found |= {"".join(each): sizes for each in itertools.product(*parts)}
    return found


def write(path: Path, shapes: Shapes, dtype: str = "BF16") -> Path:
    """Write a safetensors file whose tensors share two bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 2]}
        for name, shape in shapes.items()
    }
    head = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + bytes(2))
    return path


def write_torch(path: Path, names: Iterable[str]) -> Path:
    """Write a torch file, as far as the names in its pickle."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", dumps(dict.fromkeys(names)))
    return path


def write_model(name: str, folder: Path, tokenizer: Path) -> Path:
    """Write a model, with copies of a tokenizer; return its place."""
    files = dict(_ALL["models"][name])
    place = folder / files.pop("place", "")
    for file, content in files.items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        match content:
            case None:
                shutil.copytree(tokenizer, path)
            case dict():
                path.write_text(json.dumps(content))
            case list():
                write_torch(path, content)
            case str():
                parts = content.split()
                write(path, shapes(*parts[:2]), *parts[2:])
    return place


MODELS: dict[str, Callable[[Path, Path], Path]] = {
    name: functools.partial(write_model, name) for name in _ALL["models"]
}
"""Name -> function that writes the model and returns its place; it gets a tokenizer's folder."""
