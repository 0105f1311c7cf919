"""The graph that Snakemake sees, whole or in batches.

In the whole graph every cache file of what is asked for is an output of a rule, made from its image
or its caption. Fresh files are in it as well. The files of a job get their names one by one, and
only then does the rule of each file count it as made: the rule has the receipt of the job as input
and no action of its own. So Snakemake never removes what a failed job has finished.

Snakemake needs a millisecond for each file that it knows, even if there is nothing to do. Above
`MOST` files the graph has the receipts of jobs alone, and cache files that a command names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from latentmake.data.item import CAPTION, CONTROL, IMAGE, LAYER, TAGS, Item
from latentmake.files.workspace import is_remote
from latentmake.layouts.layout import Layout, parsed
from latentmake.plan.facts import Facts
from latentmake.plan.orders import (
    PROMPTS,
    Part,
    parts_of,
    prompt_items,
    prompts_of,
    targets_of,
)
from latentmake.plan.run_plan import Plan

MOST = 1_000
"""Cache files of a whole graph, where the configuration does not say otherwise."""

_ROLES = {"latents": {IMAGE, CONTROL, LAYER}, "text": {CAPTION, TAGS}}


class Node(NamedTuple):
    """A cache file in the graph: the files that it is made from, and the receipt of its job."""

    sources: Mapping[str, list[str]]  # role -> paths on a disk
    receipt: str | None = None  # None where it is fresh


class Graph:
    """The cache files that Snakemake knows of a plan, whose runs draw clips if they `generated`.

    Attributes:
        nodes: path -> node.
        words: why the graph is not whole, as a line of the plan; "" where it is.
    """

    def __init__(self, facts: Facts, plan: Plan, generated: Collection[str] = ()) -> None:
        parts = {part: state for run in plan.runs.values() for part, state in run.parts.items()}
        count = sum(state.fresh + len(state.stale) for state in parts.values())
        asked = facts.config.graph
        is_whole = asked == "whole" or (asked == "auto" and count <= MOST)
        self.words = "" if is_whole else f"graph: batches, for {count:,} cache files"
        if self.words and asked == "auto":
            self.words += f" are more than {MOST:,} (`graph: whole` declares each of them)"
        self.nodes: dict[str, Node] = {}
        self._files: dict[tuple[str, str], list[str]] = {}
        self._made = {path: order for order in plan.orders for path in order.paths}
        for name in plan.runs if is_whole else ():
            run = facts.config.runs[name]
            texts = prompts_of(facts.config, run, generated=name in generated)
            for part in parts_of(facts.config, run, generated=name in generated):
                is_prompts = part.dataset == PROMPTS
                items = prompt_items(texts) if is_prompts else facts.wanted_items(*part[:2])
                found = dict(_cache_files(facts, part, items))
                for path in [path for path in found if (x := self._made.get(path)) and x.skips]:
                    del found[path]  # a faulty one will not be there
                kind = "prompts" if is_prompts else parsed(part.name).kind
                paths = self._files.setdefault((name, kind), [])
                paths.extend(path for path in found if "{" not in path)  # to Snakemake a pattern
                self._declare(found)
        for part, named in plan.named.items():
            every = _cache_files(facts, part, facts.wanted_items(*part[:2]))
            self._declare({path: sources for path, sources in every if path in named})

    def _declare(self, files: Mapping[str, Mapping[str, list[str]]]) -> None:
        for path, sources in files.items():
            order = self._made.get(path)
            self.nodes[path] = Node(sources, str(order.receipt) if order else None)

    def files(self, run: str, *kinds: str, fresh: bool = False) -> list[str]:
        """Return the declared files of a run, of the kinds `latents`, `text` and `prompts`.

        With `fresh`, those are left out that are to be made.
        """
        found = (path for kind in kinds for path in self._files.get((run, kind), ()))
        return [path for path in found if not fresh or self.nodes[path].receipt is None]


def _cache_files(
    facts: Facts, part: Part, items: Sequence[Item]
) -> Iterator[tuple[str, dict[str, list[str]]]]:
    """Yield the path and the sources of each cache file of a part."""
    layout, settings = facts.layout(part.model), facts.config.datasets.get(part.dataset)
    inputs = (item.inputs(part.name, layout) for item in items)
    listed = settings and (settings.path if settings.is_list else settings.metadata_file)
    for item, (_, targets) in zip(items, targets_of(layout, settings, part, inputs), strict=True):
        sources = _sources(item, part, layout)
        if not sources and item.files and listed and not is_remote(str(listed)):
            sources = {"list": [str(listed)]}
        for target in targets:
            yield target.path, sources


def _sources(item: Item, part: Part, layout: Layout) -> dict[str, list[str]]:
    """Return role -> paths of the files on a disk that an item's targets of a part are made of."""
    kind, found = parsed(part.name).kind, dict[str, list[str]]()
    roles = _ROLES[kind] | (
        _ROLES["latents"] if layout.controlled_text and item.controls else set()
    )
    for role, path, _ in item.files:
        if role in roles and not is_remote(path) and "{" not in path:
            found.setdefault(role, []).append(path)
    return found
