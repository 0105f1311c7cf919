"""A dataset whose captions a captioner writes, with made captions that a test writes itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import world
from latentmake import backends
from latentmake.base import digest
from latentmake.config.root import parse
from latentmake.formats.cachefile import caption_file, stamp, target_key
from latentmake.layouts.layout import CAPTIONS
from latentmake.models import captioner_recipe
from latentmake.plan.facts import Facts

DATA = Path("data/shapes")


def recipe_without_files(settings: Any, *_: object, **__: object) -> dict[str, object]:
    return {"kind": CAPTIONS, "model": str(settings.model), "prompt": settings.prompt}


def lay(micro: Path, patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Work in a folder with a model and six pictures, of which two have captions of a person."""
    patch.chdir(folder)
    patch.setattr(captioner_recipe, "make", recipe_without_files)
    Path("models").mkdir()
    Path("models/micro").symlink_to(micro)
    world.make_dataset(DATA)
    for stem in ("ant", "bee", "cat", "dog"):
        (DATA / f"{stem}.txt").unlink()


def config(*captioners: str, **dataset: Any) -> dict[str, Any]:
    """Return the configuration of a run whose dataset has captioners."""
    values = world.config()
    names = captioners or ("florence",)
    values["captioners"] = {name: {"model": f"models/{name}"} for name in names}
    values["datasets"]["shapes"] |= {"captioner": [*names], **dataset}
    return values


def facts_of(values: Mapping[str, Any]) -> Facts:
    return backends.facts_of(parse(values), read_only=True)


def write_made(facts: Facts, texts: Mapping[str, str], captioner: str = "florence") -> None:
    """Write the files of made captions, by the stems of their pictures."""
    recipe = facts.recipe("shapes", captioner, CAPTIONS)
    for stem, text in texts.items():
        source = digest.of_file(DATA / f"{stem}.png")
        key = target_key(source, digest.of_value(recipe), "")
        path = Path(f"cache/shapes/{CAPTIONS}/{captioner}/{stem}.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(caption_file(text, stamp(key=key, source=source, recipe=recipe)))


@contextmanager
def served(facts: Facts) -> Iterator[str]:
    """Serve the page of the run in a thread; yield its address."""
    from latentmake.commands.caption_server import prepared

    with prepared(facts, "tiny") as (address, serve, end):
        thread = Thread(target=serve)
        thread.start()
        try:
            yield address
        finally:
            end()
            thread.join()
