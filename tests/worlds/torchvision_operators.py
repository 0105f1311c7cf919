"""Operators of torchvision, where its own were built for another torch than the one that is there.

Without them `import torchvision` fails. No test calls one of them.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import torch

_KEPT: list[torch.library.Library] = []


def declare() -> None:
    """Declare the operators of torchvision if its library cannot be loaded."""
    spec = importlib.util.find_spec("torchvision")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent
    try:
        torch.ops.load_library(str(next(folder.glob("_C*.so"))))
    except (OSError, StopIteration):
        text = (folder / "_meta_registrations.py").read_text()
        _KEPT.append(torch.library.Library("torchvision", "DEF"))
        for name in re.findall(r'register_fake\("torchvision::(\w+)"\)', text):
            _KEPT[0].define(f"{name}(Tensor boxes) -> Tensor")
