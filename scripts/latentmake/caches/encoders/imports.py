"""Import of diffusers and transformers by a process that does nothing but encode.

Both import what is installed, whether they use it or not, and parts of torch for training on many
machines and for its compiler: most of the time until a job encodes. Such a process leaves it out.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

_COMPILER = "torch._dynamo"
_UNUSED = ("jinja2", "trio")  # of chat templates, and of another way to wait for the hub


@contextmanager
def encoding_only(*unused: str) -> Iterator[None]:
    """Leave out imports that only other work than encoding needs, and `unused` modules."""
    with ExitStack() as left_out:
        left_out.enter_context(without(*_UNUSED, *unused))
        if _COMPILER not in sys.modules:
            left_out.enter_context(_without_compiler())
        left_out.enter_context(_replaced(torch.distributed, "is_available", lambda: False))
        if "transformers" in unused:
            # diffusers reads the list of files of each installed package, to find three of them
            # under other names.
            left_out.enter_context(_replaced(importlib.metadata, "packages_distributions", dict))
        yield


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Hide modules that are not imported yet, as if they were not installed.

    diffusers imports transformers, peft and accelerate wherever they are. A VAE needs none of them.
    It must never need them: modules imported meanwhile may remember their absence.
    """
    hidden = [name for name in names if name not in sys.modules]
    modules: dict[str, object] = sys.modules  # type: ignore[assignment]
    modules.update(dict.fromkeys(hidden))  # None there: an import fails, a search finds nothing
    try:
        yield
    finally:
        for name in hidden:
            del modules[name]


class _Undecorated(ModuleType):
    """Stand-in for torch's compiler, whose decorators return what they are given.

    Modules below it are found; any other attribute imports the compiler itself.
    """

    def __init__(self) -> None:
        super().__init__(_COMPILER)
        self.__path__ = [f"{torch.__path__[0]}/_dynamo"]
        self.allow_in_graph = self.assume_constant_result = self.disable = _unchanged

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(_COMPILER) is self:
            del sys.modules[_COMPILER]
        return getattr(import_module(_COMPILER), name)


def _unchanged(function: Any = None, *_: object, **__: object) -> Any:
    return _unchanged if function is None else function


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Let modules decorate for torch.compile in vain; a later import finds the compiler itself."""
    placed = sys.modules[_COMPILER] = _Undecorated()
    try:
        yield
    finally:
        if sys.modules.get(_COMPILER) is placed:
            del sys.modules[_COMPILER]


@contextmanager
def _replaced(place: ModuleType, name: str, value: Callable[[], object]) -> Iterator[None]:
    before = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, before)
