"""Session: configuration, plan and inputs of rules, for one reading of the Snakefile.

The process that the user started plans. Processes that Snakemake starts read the plan file.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from latentmake import backends
from latentmake.config.root import Config, parse
from latentmake.entry import exit_on_mistake
from latentmake.errors import LatentmakeError
from latentmake.files.workspace import check_folder, check_run_folder, claim
from latentmake.graph import Graph
from latentmake.index.memo import MEMO
from latentmake.layouts.layout import layout_of
from latentmake.plan import receipts
from latentmake.plan.orders import Order
from latentmake.plan.planner import make_plan, many_objects
from latentmake.reports.plan_report import report
from latentmake.request import FOLLOWING, PlanFile, Request, followed, plan_extras

if TYPE_CHECKING:
    from latentmake.plan.build import Build

Inputs = dict[str, list[str] | str]

_STAND_IN = str(MEMO)  # for orders, which a command that only asks does not write; as new as these


class Session:
    """One reading of the Snakefile.

    Attributes:
        plan: of the runs asked for; only its jobs in a process that does not plan.
        memo: knows past jobs; None in a process that does not plan.

    Args:
        values: the configuration file as read.
        targets: of the command line; empty stands for everything.
        main: whether this process plans.
        force: what is made anew although it is fresh, in the words of Snakemake; see `Request`.
        asks: whether the command starts no job. Then the plan takes no lock and writes no orders.
        configfiles: files of the configuration, where the user names them.
        home: folder of the Snakefile.
        deployed: whether Snakemake makes environments for jobs.
        allowed: in a process that Snakemake starts, the rules that it may run.
        side_by_side: how many jobs encode at a time on this machine; None on a cluster.
    """

    def __init__(
        self,
        values: Mapping[str, object],
        *,
        targets: Sequence[str],
        main: bool,
        force: Collection[str] = (),
        asks: bool = False,
        configfiles: Sequence[str | Path] = (),
        home: Path = Path(),
        deployed: bool = False,
        allowed: Collection[str] = (),
        side_by_side: int | None = 1,
    ) -> None:
        self._main = main
        self.memo: object = None
        self._build: Build | None = None
        self._graph: Graph | None = None
        self._asks = asks
        with exit_on_mistake(), contextlib.ExitStack() as finally_:
            if main:
                check_folder(home, dry=asks)
            if main and not asks:
                from latentmake.plan.build import Build

                self._build = Build(cluster=side_by_side is None)
            own = {name: value for name, value in values.items() if main or name != "prompt"}
            self.config: Config = parse(own)
            if not main:
                self._file = PlanFile.read()
                self.plan = self._file.plan(allowed)
                return
            self._request = Request(targets, self.config, force)
            self._facts = backends.facts_of(
                self.config,
                runs_jobs=not deployed,
                local=side_by_side is not None,
                encoders=self._request.encodes,
                asks=asks,
            )
            self.config, self.memo = self._facts.config, self._facts.memo
            self._facts.forced = self._request.forced
            for file in configfiles:
                self._facts.options += ("-c", os.path.relpath(file))
            finally_.callback(self._facts.memo.save)
            orders = self._plan_runs(side_by_side=side_by_side)
            if asks:
                orders = {name: dict.fromkeys(found, _STAND_IN) for name, found in orders.items()}
            made = self._request.orders(self.plan)
            words = self._graph.words if self._graph else ""
            self._table = report(
                self._facts, self.plan, self._request.trained, made, dry=asks, more=words
            )
            jobs = {job.rule: [each.name for each in job.orders] for job in self.plan.jobs}
            self._file = PlanFile(jobs=jobs, runs=orders)
            if not asks:
                self._file.write(time.time_ns())
            elif self.plan.jobs or {*chain(*orders.values())} - {"trainer"}:
                MEMO.touch()

    def _plan_runs(self, *, side_by_side: int | None) -> dict[str, dict[str, str]]:
        """Plan what targets need; return run -> kind of an order -> its path."""
        request, facts = self._request, self._facts
        following: list[str] = []
        if request.extras:
            following = [*followed(facts, request)]
        with many_objects():
            self.plan = make_plan(
                facts,
                request.runs,
                generated=following,
                side_by_side=side_by_side,
                files=request.files,
            )
            self._graph = Graph(facts, self.plan, following)
            for name, plan in self.plan.runs.items():
                trains = name in request.trained
                if trains or "publish" in request.words[name]:
                    backends.plan_training(facts, plan, train=trains)
                listed = plan.manifest_order and request.kinds[name]
                if listed or (plan.training_order and trains):
                    check_run_folder(Path("runs", name))
        # All orders lie there before Snakemake looks: it remembers what a folder holds.
        orders = {name: plan.order_paths for name, plan in self.plan.runs.items()}
        if request.extras:
            self.plan.needs += plan_extras(facts, self.plan, request, orders)
        return orders

    # -- the build ----------------------------------------------------------------------------

    def check_targets(self, rules: Collection[str], is_made: Callable[[str], bool]) -> None:
        """Exit with one line at the first unknown target."""
        if self._main:
            with exit_on_mistake():
                self._request.check(rules, is_made)

    def begin(self) -> None:
        """Tell others of the build: after Snakemake locked, before any job."""
        if self._build is None:
            return
        orders = self._request.orders(self.plan)
        built = [run for name, run in self.plan.runs.items() if self._request.kinds[name]]
        claim({part.dataset for run in built for part in run.parts})
        with exit_on_mistake():
            self._build.begin(orders, self._request.trained, self._request.targets)

    def end(self, *, succeeded: bool, configfiles: Sequence[Path] = ()) -> None:
        """Clean up, before Snakemake unlocks; a build that succeeded says what it made.

        `configfiles` are those of the command line, for the commands that it names.
        """
        if self._build is None:
            return
        if self._graph and self._graph.nodes:
            receipts.restore_times(self._build.orders)
        self._build.end(self.config.store.keep if succeeded else None)
        if not succeeded:
            return
        trained = [self.plan.runs[name] for name in self._request.trained]
        if self._build.orders or any(run.reasons for run in trained):
            from latentmake.reports.plan_report import report_built

            names = [run.name for run in trained if run.reasons]
            report_built(self._build.orders, names, configfiles)

    # -- inputs and resources of rules --------------------------------------------------------

    def run_order(self, run: str, kind: str) -> str | None:
        """Return a run's order of a kind, if the plan has one."""
        return self._file.runs.get(run, {}).get(kind)

    def receipts(self, run: str, *kinds: str) -> list[str]:
        """Return the receipts of a run's batches of some kinds, or of all."""
        plan = self.plan.runs.get(run)
        orders = [] if plan is None else plan.orders
        return [str(order.receipt) for order in orders if order.kind in (kinds or (order.kind,))]

    def ending(self, kind: str) -> str:
        """Return the pattern of the ends of the names of all models' caches of a kind."""
        names = {model.layout_name for model in self.config.models.values()}
        return "|".join(layout_of(name).ending(kind) for name in sorted(names))

    def order_paths(self, orders: Iterable[Order]) -> list[str]:
        """Return the files of orders; one that stands for all where the command only asks."""
        return [_STAND_IN] if self._asks else [str(order.path) for order in orders]

    def cache_files(self, run: str, *kinds: str, fresh: bool = False) -> list[str]:
        """Return a run's cache files, if the graph is whole; see `Graph.files`."""
        return self._graph.files(run, *kinds, fresh=fresh) if self._graph else []

    def final(self, run: str) -> str:
        """Return the file that stands for all of a run: its training's receipt, or its lock."""
        is_trained = run not in self.config.runs or self.config.runs[run].trainer is not None
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
            node = self._graph.nodes.get(place) if self._graph else None
            sources, receipt = node or ({}, None)
            return {"receipt": receipt} if receipt else {}, {**sources}
        run, order, lock = place, self.run_order(place, word), f"runs/{place}/dataset.lock"
        if word in ("publish", "export", "clips"):
            return self._exchange_inputs(word, run, order), {}
        if self._main and run not in self.plan.runs:
            raise LatentmakeError(f"the run {run} was not planned")
        # Receipts of all encoding jobs: a manifest, which has those of the captions, knows no
        # prompts of sample pictures, and has no job where it is fresh.
        asked: Inputs = {"order": order, "receipts": self.receipts(run)} if order else {}
        if word == "manifest":
            return asked, {"caches": self.cache_files(run, "latents", "text")}
        if word == "train":
            # A new prompt of sample pictures trains nothing: it waits for the next training.
            prompts = self.cache_files(run, "prompts", fresh=order is None)
            if order is None:
                return {}, {"lock": lock, "prompts": prompts}
            return {**asked, "lock": lock}, {"prompts": prompts}
        if order is None:
            if self._main and not Path(FOLLOWING[word].format(run=run)).exists():
                raise LatentmakeError(f"name the target {word}_{run} on the command line, too")
            return {}, {}
        # Of a training that will run, one that does not count would keep Snakemake from this job.
        trained: Inputs = {"trained": self.final(run)}
        return ({**asked, **trained}, {}) if self.run_order(run, "train") else (asked, trained)

    def _exchange_inputs(self, word: str, run: str, order: str | None) -> Inputs:
        """Return the inputs of what other programs read of a run."""
        lock = f"runs/{run}/dataset.lock"
        if word == "publish" and order is None and self.config.publish.caches:
            order = self.run_order(run, "trainer")
            if order is None:
                raise LatentmakeError(f"the run {run} was not planned")
            return {"lock": lock, "order": order}
        asked: Inputs = {"order": order} if order else {}
        return {**asked, "lock": lock} if word == "export" else asked

    def results(self, run: str, word: str, *, present: bool = False) -> dict[str, str]:
        """Return the files that `{word}_{run}` makes; if it is done or `present`, has made."""
        if run not in self.plan.runs or run not in self._request.trained:
            return {}
        finished = present or self.run_order(run, word) is None
        return backends.outputs(self.config, self.plan.runs[run], word, finished=finished)

    def described(self) -> dict[str, str]:
        """Return the plan's table and the provenance of the runs' weights."""
        from latentmake.reports.following import provenance

        return {"plan": self._table, "provenance": "\n\n".join(map(provenance, self.plan.runs))}

    def runs_of_ours(self) -> list[str]:
        """Return the runs whose trainer is none of another program."""
        runs = self.config.runs.items()
        return [name for name, run in runs if run.trainer is not None and run.trainer.ours]

    def published_runs(self) -> list[str]:
        """Return the runs that can be published."""
        found = ((name, backends.of_run(self.config, name)) for name in self.config.runs)
        return [name for name, backend in found if backend is not None and backend.publishes]
