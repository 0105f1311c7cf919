"""The graph that Snakemake sees: of all cache files, or of batches.

In the complete graph, every requested cache file is the output of a rule whose input is its image
or its caption. Fresh files are in it as well. A file's rule has no action of its own. If a job must
make the file, the job's receipt is an input of the rule, so Snakemake counts the file as made only
after the job. Therefore Snakemake never removes the files that a failed job has finished.

Snakemake needs 0.4 ms for each file in the graph, even if there is nothing to do. Above `MOST`
files, the graph only has the receipts of jobs, and the cache files that a command names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from latentmake.base.errors import LatentmakeError
from latentmake.base.paths import is_remote
from latentmake.config.root import Config
from latentmake.data.item import CAPTION, MADE, TAGS, Item
from latentmake.data.memo import MEMO
from latentmake.layouts.layout import kind_of, layout_of
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
from latentmake.runs.order import RunFiles, RunOrder

Inputs = dict[str, list[str] | str]

_UNFIT = re.compile(r"\{|<[a-z][a-z0-9_]*>|(.{1,12}?)\1{19}")
"""Parts of a path that Snakemake does not take as they are: a pattern, the name of a path variable,
or a repetition. It would leave out a file with a repetition, and the jobs that need it, without an
error if these jobs have results."""

# Replaces the orders in the graph of a read-only command, which writes none; it is as new as they.
_STAND_IN = str(MEMO)


def touch_stand_in() -> None:
    """Touch the file that replaces orders in the graph of a read-only command."""
    MEMO.touch()


MOST = 1_000
"""Most cache files of a complete graph, unless the configuration sets `graph`."""


class Graph:
    """Snakemake's view of a plan: declared files, and inputs of rules.

    Attributes:
        nodes: path of each cache file that rules declare -> its source files (role -> paths on this
            disk), and the receipt of its job; None if the file is fresh.
        words: line of the plan that says why the graph has batches; "" if it is complete.

    Args:
        config: the configuration.
        plan: the plan; in a process that does not plan, it only has jobs.
        orders: run -> kind of an order -> its path.
        trained: runs whose training is requested; None in a process that does not plan.
    """

    def __init__(
        self,
        config: Config,
        plan: Plan,
        orders: Mapping[str, Mapping[str, str]],
        *,
        trained: Collection[str] | None = None,
    ) -> None:
        self.nodes: dict[str, tuple[Mapping[str, list[str]], str | None]] = {}
        self.words = ""
        self._config, self._plan, self._orders = config, plan, orders
        self._plans, self._trained = trained is not None, trained or ()
        self._read_only = False
        self._files: dict[tuple[str, str], list[str]] = {}

    def declare(self, facts: Facts, generated: Collection[str] = ()) -> None:
        """Declare the cache files of a plan; the runs in `generated` generate clips."""
        plan, setting, self._read_only = self._plan, facts.config.graph, facts.read_only
        parts = {part: state for run in plan.runs.values() for part, state in run.parts.items()}
        count = sum(state.fresh + state.reasons.total() for state in parts.values())
        is_whole = setting == "whole" or (setting == "auto" and count <= MOST)
        self.words = "" if is_whole else f"graph: batches, for {count:,} cache files"
        if self.words and setting == "auto":
            self.words += f" are more than {MOST:,} (`graph: whole` declares each of them)"
        orders = plan.orders if is_whole or plan.named else []  # no other file is declared
        made = {path: order for order in orders for path in order.paths}
        declared: dict[str, dict[str, list[str]]] = {}  # path -> role -> source files
        for name in plan.runs if is_whole else ():
            run = facts.config.runs[name]
            texts = prompts_of(facts.config, run, generated=name in generated)
            for part in parts_of(facts.config, run, generated=name in generated):
                is_prompts = part.dataset == PROMPTS
                items = prompt_items(texts) if is_prompts else facts.wanted_items(*part[:2])
                files = dict(_cache_files(facts, part, items))
                for path in [*files]:
                    order = made.get(path)
                    if order is not None and order.skips:
                        del files[path]  # if its item is faulty, the job will not make it
                    elif order is None and is_prompts and not Path(path).exists():
                        del files[path]  # it waits for the next training
                kind = "prompts" if is_prompts else kind_of(part.name)
                paths = self._files.setdefault((name, kind), [])
                paths += (path for path in files if not _UNFIT.search(path))
                declared |= files
        for part, named in plan.named.items():
            of_part = _cache_files(facts, part, facts.wanted_items(*part[:2]))
            declared |= {path: sources for path, sources in of_part if path in named}
        for path, sources in declared.items():
            self.nodes[path] = sources, str(made[path].receipt) if path in made else None
        self._leave_out_missing_captions()

    def _leave_out_missing_captions(self) -> None:
        """Drop made captions from the sources of texts if no rule makes them and none exists.

        A captioner that skips faulty items may not make its caption.
        """
        for path, (sources, receipt) in self.nodes.items():
            if MADE in sources:
                there = [
                    file for file in sources[MADE] if file in self.nodes or Path(file).exists()
                ]
                self.nodes[path] = {**sources, MADE: there}, receipt

    # -- inputs of rules ----------------------------------------------------------------------

    def run_order(self, run: str, kind: str) -> str | None:
        """Return a run's order of a kind, if the plan has one."""
        path = self._orders.get(run, {}).get(kind)
        return _STAND_IN if path and self._read_only else path

    def order_paths(self, orders: Iterable[Order]) -> list[str]:
        """Return the files of orders; for a read-only command, the file that replaces them."""
        return [_STAND_IN] if self._read_only else [str(order.path) for order in orders]

    def receipts(self, run: str, *kinds: str) -> list[str]:
        """Return the receipts of a run's batches of some kinds, or of all."""
        plan = self._plan.runs.get(run)
        orders = [] if plan is None else plan.orders
        return [str(order.receipt) for order in orders if order.kind in (kinds or (order.kind,))]

    def ending(self, kind: str) -> str:
        """Return a pattern for the endings of all models' cache files of a kind."""
        names = {model.layout_name for model in self._config.models.values()}
        return "|".join(layout_of(name).ending(kind) for name in sorted(names))

    def files(self, run: str, *kinds: str, fresh: bool = False) -> list[str]:
        """Return the declared files of a run, of the kinds `latents`, `text` and `prompts`.

        With `fresh`, return only the files that no job has to make.
        """
        paths = (path for kind in kinds for path in self._files.get((run, kind), ()))
        return [path for path in paths if not fresh or self.nodes[path][1] is None]

    def final(self, run: str) -> str:
        """Return the file that represents a run: its training's receipt, or its lock."""
        is_trained = run not in self._config.runs or self._config.runs[run].trainer is not None
        return f"runs/{run}/trained.json" if is_trained else f"runs/{run}/dataset.lock"

    def inputs(self, word: str, place: str) -> tuple[Inputs, Inputs]:
        """Return the inputs that make a job run, and the inputs whose mtimes never count.

        Args:
            word: `cache`, or the word of a run's job: `manifest`, `train`, `generate`, ...
            place: path of the cache file, or name of the run.

        Raises:
            LatentmakeError: the job needs a run or file that was not planned.
        """
        if word == "cache":
            sources, receipt = self.nodes.get(place, ({}, None))
            return {"receipt": receipt} if receipt else {}, {**sources}
        run, order, lock = place, self.run_order(place, word), f"runs/{place}/dataset.lock"
        if word == "publish" and order is None and self._config.publish.caches:
            if (order := self.run_order(run, "trainer")) is None:
                raise LatentmakeError(f"the run {run} was not planned")
            return {"lock": lock, "order": order}, {}
        if word in ("publish", "export", "clips"):
            inputs: Inputs = {"order": order} if order else {}
            return {**inputs, "lock": lock} if word == "export" else inputs, {}
        if self._plans and run not in self._plan.runs:
            raise LatentmakeError(f"the run {run} was not planned")
        # All receipts of the run's encoding jobs. The manifest does not replace them: it has no
        # prompts of sample pictures, and no job if it is fresh.
        needed: Inputs = {"order": order, "receipts": self.receipts(run)} if order else {}
        if word == "manifest":
            return needed, {"caches": self.files(run, "captions", "latents", "text")}
        if word == "train":
            # A new prompt of sample pictures starts no training: it waits for the next one.
            prompts = self.files(run, "prompts", fresh=order is None)
            if order is None:
                return {}, {"lock": lock, "prompts": prompts}
            return {**needed, "lock": lock}, {"prompts": prompts}
        if order is None:
            if self._plans and not Path(FOLLOWING[word].format(run=run)).exists():
                raise LatentmakeError(f"name the target {word}_{run} on the command line, too")
            return {}, {}
        # If the training will run, its time has to count: otherwise Snakemake skips this job.
        trained: Inputs = {"trained": self.final(run)}
        return ({**needed, **trained}, {}) if self.run_order(run, "train") else (needed, trained)

    def results(self, run: str, word: str, *, present: bool = False) -> dict[str, str]:
        """Return the files that `{word}_{run}` makes, or has made if it is done or `present`.

        Each has its caption, see `RunFiles.outputs`.
        """
        if run not in self._plan.runs or run not in self._trained:
            return {}
        order = self._plan.runs[run].trainer
        if self._config.runs[run].trainer is None or not isinstance(order, RunOrder):
            return {}
        finished = present or self.run_order(run, word) is None
        files = RunFiles(order).outputs(word, finished=finished).items()
        # Snakemake would take braces for a pattern.
        return {str(path): caption for path, caption in files if not set("{}") & set(str(path))}


def _cache_files(
    facts: Facts, part: Part, items: Sequence[Item]
) -> Iterator[tuple[str, dict[str, list[str]]]]:
    """Yield the path and the sources of each cache file of a part."""
    layout, settings = facts.layout(part.model), facts.config.datasets.get(part.dataset)
    inputs = (item.inputs(part.name, layout) for item in items)
    listed = settings and (settings.path if settings.is_list else settings.metadata_file)
    results = targets_of(layout, settings, part, inputs)
    for item, (made_of, targets) in zip(items, results, strict=True):
        files = made_of.files
        if kind_of(part.name) == "text":  # its text may come from a list instead of these files
            files += tuple(file for file in item.files if file.role in (CAPTION, TAGS, MADE))
        sources: dict[str, list[str]] = {}
        for role, path, _ in dict.fromkeys(files):
            if not (is_remote(path) or _UNFIT.search(path)):
                sources.setdefault(role, []).append(path)
        if not sources and item.files and listed and not is_remote(str(listed)):
            sources = {"list": [str(listed)]}
        for target in targets:
            yield target.path, sources
