"""Expected origin of each cache file of a dataset and model: source, recipe and key."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from latentmake import digest
from latentmake.errors import CacheError
from latentmake.files.cachefile import read_header, target_key
from latentmake.layouts import kind_of
from latentmake.plan.facts import Facts
from latentmake.plan.keys import UNKNOWN, Keys
from latentmake.plan.parts import PROMPTS
from latentmake.sources import s3
from latentmake.sources.item import Item


class Expected(NamedTuple):
    """Origin that a cache file should have.

    Attributes:
        source: path of the image or caption; its text where it has no file.
        content: digest of the source; "" where it cannot be read.
        recipe: digest of the recipe; "" where the model is not here.
        key: "" where it is unknown, as the size of an image that nobody read.
    """

    path: str
    part: str
    stem: str
    source: str
    content: str
    recipe: str
    key: str


def sources_of(
    facts: Facts, dataset: str, model: str, parts: Sequence[str]
) -> dict[str, list[Item]]:
    """Return part -> sources of the items of a dataset that jobs do not skip."""
    controlled = facts.layout(model).controlled_text
    without = {fault["stem"] for fault in facts.skipped(dataset)}
    items = [item for item in facts.items(dataset, model)[0] if item.stem not in without]
    return {
        part: [item.inputs(part, controlled_text=controlled) for item in items] for part in parts
    }


def expected_files(
    facts: Facts, dataset: str, model: str, sources: Mapping[str, Sequence[Item]]
) -> Iterator[Expected]:
    """Yield what each cache file of some sources (part -> source) should be made of.

    Digests of sources come from the memo where their stat is known. No cache file is believed.

    Args:
        facts: of the configuration.
        dataset: its name, or that of the prompts.
        model: its name.
        sources: see `sources_of`; of prompts, those of their texts.
    """
    layout, settings = facts.layout(model), facts.config.datasets.get(dataset)
    cached = facts.memo.targets.below(f"cache/{dataset}/{model}")
    recipes = {part: _recipe(facts, dataset, model, part) for part in sources}
    keys = Keys(facts.memo, layout, settings, recipes, _known(facts, dataset))
    for part, wanted in sources.items():
        folder = layout.folder(dataset, model, part)
        keys.fetch(
            (path, stat) for item in wanted for _, path, stat in item.read if s3.is_remote(path)
        )
        contents = [keys.content(source) or "" for source in wanted]
        if kind_of(part) == "latents":
            keys.prepare_sizes(filter(None, contents))
        for source, content in zip(wanted, contents, strict=True):
            place = source.source if source.source is not None else (source.text or "")
            for path, clip in layout.named(
                folder, part, source.stem, source.media, settings, source.span
            ):
                variant = keys.variant(part, source, content, clip)
                if variant is None:  # the header of a sound file tells the size of the image
                    with contextlib.suppress(CacheError, OSError):
                        variant = keys.variant(part, source, content, clip, read_header(path))
                known = content and recipes[part] != UNKNOWN and variant is not None
                key = target_key(content, recipes[part], variant or "") if known else ""
                source_digest = content
                if known and kind_of(part) == "text" and cached.get(path, ("", ""))[1] != key:
                    with contextlib.suppress(CacheError, OSError):
                        source_digest = keys.with_line_ends(
                            source, content, read_header(path).source
                        )
                    key = target_key(source_digest, recipes[part], variant or "")
                yield Expected(path, part, source.stem, place, source_digest, recipes[part], key)


def _recipe(facts: Facts, dataset: str, model: str, part: str) -> str:
    recipe = facts.recipe(dataset, model, kind_of(part))
    return digest.of_value(recipe) if recipe else UNKNOWN


def _known(facts: Facts, dataset: str) -> dict[str, tuple]:  # type: ignore[type-arg]
    if dataset == PROMPTS:
        return {}
    control = facts.config.datasets[dataset].control_directory
    folders = [*facts.scan(dataset).roots, *([s3.normalized(control)] if control else [])]
    return {path: fact for each in folders for path, fact in facts.memo.sources.below(each).items()}
