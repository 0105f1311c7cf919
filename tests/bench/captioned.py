"""Ratio of planning made captions to planning written ones, for a dataset of N pictures.

    python tests/bench/captioned.py [--items 10000]

Both projects are built by encoders of a line, then planned in this process: with nothing to do,
after a picture was replaced, and without a memo. Each figure is the least
of five, in seconds of processor time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [
    str(Path(__file__).parents[1] / "worlds"),
    str(Path(__file__).parents[2] / "scripts"),
]

from captioned_world import CaptionedWorld  # noqa: E402 -- needs the paths above
from latentmake.data.memo import MEMO  # noqa: E402


def built(items: int, *, written: bool) -> CaptionedWorld:
    """Build a project in the working directory."""
    stems = [f"{number:06d}" for number in range(items)]
    world = CaptionedWorld(*stems)
    if written:
        del world.values["datasets"]["cats"]["captioner"]
        for stem in stems:
            world.write(stem, f"a picture called {stem}")
    world.answer = lambda prompt, sample: f"a picture called {sample.item.stem}"  # type: ignore[method-assign]
    world.build()
    world.plan()
    return world


def least(act: Callable[[], object], before: Callable[[], object] = bool) -> float:
    """Return the least seconds of processor time of five calls."""
    times = []
    for _ in range(5):
        before()
        began = time.process_time()
        act()
        times.append(time.process_time() - began)
    return min(times)


def seconds(items: int, *, written: bool) -> dict[str, float]:
    """Return what is planned -> seconds."""
    world, number = built(items, written=written), iter(range(10_000))

    def edit() -> None:
        world.image("000003", 10**6 + next(number))

    figures = {"nothing to do": least(world.plan), "a picture": least(world.plan, edit)}
    world.build()
    figures["without a memo"] = least(world.plan, lambda: MEMO.unlink(missing_ok=True))
    return figures


def main() -> None:
    """Print the figures and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=10_000)
    items, figures = parser.parse_args().items, []
    for written in (True, False):
        folder = tempfile.mkdtemp()
        os.chdir(folder)
        figures.append(seconds(items, written=written))
        shutil.rmtree(folder)
    for name in figures[0]:
        by_person, made = (several[name] for several in figures)
        print(f"{name:16} written {by_person:.3f} s, made {made:.3f} s: {made / by_person:.2f}")


if __name__ == "__main__":
    main()
