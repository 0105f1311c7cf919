"""Tiny stand-ins for what the trainers' scripts load: one module `tiny_NAME` for each family.

They run in the trainers' Python, and import nothing of the trainers before a function is called.
Each may define:

- `SCRIPTS`: a script's file name, or `strategies` -> function that shrinks constants, called before
  it runs;
- `REPOS`: id of a repository on the hub -> function that writes its files into a folder;
- `WEIGHTS`: name -> function that writes small random weights into a folder;
- `TRANSFORMERS`, `DIFFUSERS`: names of these libraries that its scripts take.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path

SCRIPTS: dict[str, Callable[[], None]] = {}
REPOS: dict[str, Callable[[Path], None]] = {}
WEIGHTS: dict[str, Callable[[Path], None]] = {}
TRANSFORMERS: list[str] = []
DIFFUSERS: list[str] = []

for _each in pkgutil.iter_modules(__path__):
    if _each.name.startswith("tiny_"):
        _module = importlib.import_module(f"tiny.{_each.name}")
        SCRIPTS |= getattr(_module, "SCRIPTS", {})
        REPOS |= getattr(_module, "REPOS", {})
        WEIGHTS |= getattr(_module, "WEIGHTS", {})
        TRANSFORMERS += getattr(_module, "TRANSFORMERS", ())
        DIFFUSERS += getattr(_module, "DIFFUSERS", ())


def prepare(script: str) -> None:
    """Shrink constants of the networks that a script makes."""
    if shrink := SCRIPTS.get(Path(script).name):
        shrink()


def write_hub(home: Path) -> None:
    """Write the repositories into Hugging Face's cache of a home folder."""
    for name, write in REPOS.items():
        place = home / "hub" / f"models--{name.replace('/', '--')}"
        snapshot = place / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        (place / "refs").mkdir()
        (place / "refs/main").write_text("0" * 40)
        write(snapshot)
