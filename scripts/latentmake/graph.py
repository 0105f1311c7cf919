"""The graph that Snakemake sees, whole or in batches.

In the whole graph every cache file of what is asked for is an output of a rule, made from its image
or its caption. Fresh files are in it as well. The files of a job get their names one by one, and
only then does the rule of each file count it as made: the rule has the receipt of the job as input
and no action of its own. So Snakemake never removes what a failed job has finished.

Snakemake needs 0.4 ms for each file that it knows, even if there is nothing to do. Above
`MOST` files the graph has the receipts of jobs alone, and cache files that a command names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from latentmake import backends
from latentmake.config.root import Config
from latentmake.data.item import CAPTION, TAGS, Item
from latentmake.errors import LatentmakeError
from latentmake.files.workspace import is_remote
from latentmake.index.memo import MEMO
from latentmake.layouts.layout import layout_of, parsed
from latentmake.plan.facts import Facts
from latentmake.plan.orders import (
    PROMPTS,
    Order,
    Part,
    parts_of,
    prompt_items,
    prompts_of,
    targets_of,
)
from latentmake.plan.run_plan import Plan
from latentmake.request import FOLLOWING

Inputs = dict[str, list[str] | str]

_STAND_IN = str(MEMO)  # for orders, which a command that only asks does not write; as new as these


def touch_stand_in() -> None:
    """Make the file that stands for orders, where a command that only asks has any."""
    MEMO.touch()


MOST = 1_000
"""Cache files of a whole graph, where the configuration does not say otherwise."""


class Node(NamedTuple):
    """A cache file in the graph: the files that it is made from, and the receipt of its job."""

    sources: Mapping[str, list[str]]  # role -> paths on a disk
    receipt: str | None = None  # None where it is fresh


class Graph:
    """What Snakemake knows of a plan.

    Attributes:
        nodes: path -> node, of the cache files that rules declare.
        words: why the graph is not whole, as a line of the plan; "" where it is.

    Args:
        config: the configuration.
        plan: the plan; only its jobs in a process that does not plan.
        orders: run -> kind of an order -> its path.
        trained: runs whose training is asked for; None in a process that does not plan.
    """

    def __init__(
        self,
        config: Config,
        plan: Plan,
        orders: Mapping[str, Mapping[str, str]],
        *,
        trained: Collection[str] | None = None,
    ) -> None:
        self.nodes: dict[str, Node] = {}
        self.words = ""
        self._config, self._plan, self._orders = config, plan, orders
        self._plans, self._trained = trained is not None, trained or ()
        self._asks = False
        self._files: dict[tuple[str, str], list[str]] = {}

    def declare(self, facts: Facts, generated: Collection[str] = ()) -> None:
        """Declare the cache files of a plan, whose runs draw clips if they are `generated`."""
        plan, self._asks = self._plan, facts.asks
        parts = {part: state for run in plan.runs.values() for part, state in run.parts.items()}
        count = sum(state.fresh + len(state.stale) for state in parts.values())
        asked = facts.config.graph
        is_whole = asked == "whole" or (asked == "auto" and count <= MOST)
        self.words = "" if is_whole else f"graph: batches, for {count:,} cache files"
        if self.words and asked == "auto":
            self.words += f" are more than {MOST:,} (`graph: whole` declares each of them)"
        made = {path: order for order in plan.orders for path in order.paths}
        for name in plan.runs if is_whole else ():
            run = facts.config.runs[name]
            texts = prompts_of(facts.config, run, generated=name in generated)
            for part in parts_of(facts.config, run, generated=name in generated):
                is_prompts = part.dataset == PROMPTS
                items = prompt_items(texts) if is_prompts else facts.wanted_items(*part[:2])
                found = dict(_cache_files(facts, part, items))
                for path in [path for path in found if (x := made.get(path)) and x.skips]:
                    del found[path]  # a faulty one will not be there
                for path in [x for x in found if is_prompts and x not in made]:
                    if not Path(path).exists():
                        del found[path]  # it waits for the next training
                kind = "prompts" if is_prompts else parsed(part.name).kind
                paths = self._files.setdefault((name, kind), [])
                paths.extend(path for path in found if "{" not in path)  # to Snakemake a pattern
                self._add(found, made)
        for part, named in plan.named.items():
            every = _cache_files(facts, part, facts.wanted_items(*part[:2]))
            self._add({path: sources for path, sources in every if path in named}, made)

    def _add(self, files: Mapping[str, Mapping[str, list[str]]], made: Mapping[str, Order]) -> None:
        for path, sources in files.items():
            order = made.get(path)
            self.nodes[path] = Node(sources, str(order.receipt) if order else None)

    # -- what rules ask for -------------------------------------------------------------------

    def run_order(self, run: str, kind: str) -> str | None:
        """Return a run's order of a kind, if the plan has one."""
        path = self._orders.get(run, {}).get(kind)
        return _STAND_IN if path and self._asks else path

    def order_paths(self, orders: Iterable[Order]) -> list[str]:
        """Return the files of orders; one that stands for all where the command only asks."""
        return [_STAND_IN] if self._asks else [str(order.path) for order in orders]

    def receipts(self, run: str, *kinds: str) -> list[str]:
        """Return the receipts of a run's batches of some kinds, or of all."""
        plan = self._plan.runs.get(run)
        orders = [] if plan is None else plan.orders
        return [str(order.receipt) for order in orders if order.kind in (kinds or (order.kind,))]

    def ending(self, kind: str) -> str:
        """Return the pattern of the ends of the names of all models' caches of a kind."""
        names = {model.layout_name for model in self._config.models.values()}
        return "|".join(layout_of(name).ending(kind) for name in sorted(names))

    def files(self, run: str, *kinds: str, fresh: bool = False) -> list[str]:
        """Return the declared files of a run, of the kinds `latents`, `text` and `prompts`.

        With `fresh`, those are left out that are to be made.
        """
        found = (path for kind in kinds for path in self._files.get((run, kind), ()))
        return [path for path in found if not fresh or self.nodes[path].receipt is None]

    def final(self, run: str) -> str:
        """Return the file that stands for all of a run: its training's receipt, or its lock."""
        is_trained = run not in self._config.runs or self._config.runs[run].trainer is not None
        return f"runs/{run}/trained.json" if is_trained else f"runs/{run}/dataset.lock"

    def inputs(self, word: str, place: str) -> tuple[Inputs, Inputs]:
        """Return the inputs that make a job run, and those whose times never count.

        Args:
            word: `cache`, or what is made of a run: `manifest`, `train`, `generate`, ...
            place: path of the cache file, or name of the run.

        Raises:
            LatentmakeError: what is needed was not planned.
        """
        if word == "cache":
            node = self.nodes.get(place)
            sources, receipt = node or ({}, None)
            return {"receipt": receipt} if receipt else {}, {**sources}
        run, order, lock = place, self.run_order(place, word), f"runs/{place}/dataset.lock"
        if word in ("publish", "export", "clips"):
            return self._exchange_inputs(word, run, order), {}
        if self._plans and run not in self._plan.runs:
            raise LatentmakeError(f"the run {run} was not planned")
        # Receipts of all encoding jobs: a manifest, which has those of the captions, knows no
        # prompts of sample pictures, and has no job where it is fresh.
        asked: Inputs = {"order": order, "receipts": self.receipts(run)} if order else {}
        if word == "manifest":
            return asked, {"caches": self.files(run, "latents", "text")}
        if word == "train":
            # A new prompt of sample pictures trains nothing: it waits for the next training.
            prompts = self.files(run, "prompts", fresh=order is None)
            if order is None:
                return {}, {"lock": lock, "prompts": prompts}
            return {**asked, "lock": lock}, {"prompts": prompts}
        if order is None:
            if self._plans and not Path(FOLLOWING[word].format(run=run)).exists():
                raise LatentmakeError(f"name the target {word}_{run} on the command line, too")
            return {}, {}
        # Of a training that will run, one that does not count would keep Snakemake from this job.
        trained: Inputs = {"trained": self.final(run)}
        return ({**asked, **trained}, {}) if self.run_order(run, "train") else (asked, trained)

    def _exchange_inputs(self, word: str, run: str, order: str | None) -> Inputs:
        """Return the inputs of what other programs read of a run."""
        lock = f"runs/{run}/dataset.lock"
        if word == "publish" and order is None and self._config.publish.caches:
            order = self.run_order(run, "trainer")
            if order is None:
                raise LatentmakeError(f"the run {run} was not planned")
            return {"lock": lock, "order": order}
        asked: Inputs = {"order": order} if order else {}
        return {**asked, "lock": lock} if word == "export" else asked

    def results(self, run: str, word: str, *, present: bool = False) -> dict[str, str]:
        """Return the files that `{word}_{run}` makes; if it is done or `present`, has made."""
        if run not in self._plan.runs or run not in self._trained:
            return {}
        finished = present or self.run_order(run, word) is None
        return backends.outputs(self._config, self._plan.runs[run], word, finished=finished)


def _cache_files(
    facts: Facts, part: Part, items: Sequence[Item]
) -> Iterator[tuple[str, dict[str, list[str]]]]:
    """Yield the path and the sources of each cache file of a part."""
    layout, settings = facts.layout(part.model), facts.config.datasets.get(part.dataset)
    inputs = (item.inputs(part.name, layout) for item in items)
    listed = settings and (settings.path if settings.is_list else settings.metadata_file)
    for item, (made_of, targets) in zip(
        items, targets_of(layout, settings, part, inputs), strict=True
    ):
        files = made_of.files
        if parsed(part.name).kind == "text":  # its text may stand in place of these
            files += tuple(each for each in item.files if each.role in (CAPTION, TAGS))
        sources: dict[str, list[str]] = {}
        for role, path, _ in dict.fromkeys(files):
            if not is_remote(path) and "{" not in path:
                sources.setdefault(role, []).append(path)
        if not sources and item.files and listed and not is_remote(str(listed)):
            sources = {"list": [str(listed)]}
        for target in targets:
            yield target.path, sources
