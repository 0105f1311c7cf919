"""Session: configuration, plan and inputs of rules, for one reading of the Snakefile.

The process that the user started plans. Processes that Snakemake starts read the plan file.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from latentmake import backends
from latentmake.config import Config, Run, parse
from latentmake.entry import exit_on_mistake
from latentmake.errors import LatentmakeError
from latentmake.exchange.ai_training.plan import plan_export
from latentmake.exchange.clip_files.order import ClipsOrder, plan_clips
from latentmake.files.disk import Need
from latentmake.files.workspace import check_folder, check_run_folder, claim
from latentmake.index.memo import MEMO, Memo
from latentmake.plan.build import Build
from latentmake.plan.estimates import Resources, resources_of
from latentmake.plan.facts import Facts
from latentmake.plan.lock import run_folder
from latentmake.plan.orders import EncodingJob, Order, write_order
from latentmake.plan.plan_file import PlanFile
from latentmake.plan.planner import make_plan, many_objects, single
from latentmake.plan.run_plan import Plan, RunPlan
from latentmake.plan.targets import (
    built_orders,
    check_known,
    is_evaluation_asked,
    is_generation_asked,
    is_training_asked,
    kinds_built,
    needs_encoders,
    runs_asked_for,
)
from latentmake.reports.evaluation import plan_evaluated, refuse_evaluation
from latentmake.reports.generated import plan_generated, refuse_clips
from latentmake.reports.plan_report import report, report_built
from latentmake.training.external.publication import is_uncached, write_items

Inputs = dict[str, list[str] | str]
_REQUESTS: dict[str, Callable[[Facts, RunPlan, Run], object]] = {
    "export": plan_export,
    "clips": plan_clips,
}
"""Word of a target `{word}_{run}` that is done on request alone -> makes its order, for JSON."""
_FOLLOWING = {
    "generate": (is_generation_asked, refuse_clips, plan_generated),
    "evaluate": (is_evaluation_asked, refuse_evaluation, plan_evaluated),
}
"""Word of a target after a training -> whether it is asked for, what refuses it, its plan."""


class Session:
    """One reading of the Snakefile.

    Attributes:
        plan: of the runs asked for; only its `orders` in a process that does not plan.

    Args:
        values: the configuration file as read.
        targets: of the command line; empty stands for everything.
        main: whether this process plans.
        force: whether the user forces jobs that have nothing to do.
        dry: whether this is a dry run, which starts no process that would need the plan.
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
        force: bool = False,
        dry: bool = False,
        home: Path = Path(),
        deployed: bool = False,
        allowed: Collection[str] = (),
        side_by_side: int | None = 1,
    ) -> None:
        self._main = main
        self._targets = targets
        self._side_by_side = side_by_side
        self._build: Build | None = None
        self._singles: dict[str, tuple[Order, bool]] = {}
        with exit_on_mistake(), contextlib.ExitStack() as finally_:
            if main:
                check_folder(home, dry=dry)
                if not dry:
                    self._build = Build(cluster=side_by_side is None)
            own = {name: value for name, value in values.items() if main or name != "prompt"}
            self.config: Config = parse(own)
            if not main:
                self._file = PlanFile.read()
                self.plan = Plan({}, self._file.encoding_jobs(allowed))
                return
            self._facts = Facts(
                self.config,
                Memo(MEMO),
                runs_jobs=not deployed,
                program_digest=backends.program_digest,
                encoders=needs_encoders(targets, self.runs, caches=self.config.publish.caches),
            )
            self.config = self._facts.config
            finally_.callback(self._facts.memo.save)
            self._plan_runs(targets, force=force, dry=dry)
            # All orders lie there before Snakemake looks: it remembers what a folder holds.
            for path in targets:
                if path.startswith("cache/"):
                    self._singles[path] = single(self._facts, path)
            self._asked: dict[str, dict[str, str]] = {name: {} for name in self.plan.runs}
            needs = [*self._plan_requests(targets)]
            self._plan_publications(targets)
            self._plan_following(targets, force=force)
            report(self._facts, self.plan, targets, needs, dry=dry)
            self._file = PlanFile.of(self.plan, self._singles, self._asked)
            if not dry:
                self._file.write(time.time_ns())

    # -- planning -----------------------------------------------------------------------------

    def _plan_runs(self, targets: Sequence[str], *, force: bool, dry: bool) -> None:
        """Plan the runs that targets need."""
        cached = [target for target in targets if not is_uncached(target, self.config)]
        names = runs_asked_for(cached, self.runs) if cached or not targets else []
        trained = [name for name in names if is_training_asked(name, targets)]
        with many_objects():
            following = [*self._runs_followed(names, targets)]
            self.plan = make_plan(
                self._facts,
                names,
                force=force,
                generated=following,
                side_by_side=self._side_by_side,
                dry=dry,
            )
            for name, plan in self.plan.runs.items():
                backends.plan_training(self._facts, plan, train=name in trained)
                listed = plan.manifest_order and kinds_built(name, targets)
                if listed or (plan.training_order and name in trained):
                    check_run_folder(run_folder(name))

    def _plan_requests(self, targets: Sequence[str]) -> Iterator[Need]:
        """Write the orders of what is done on request alone; yield the room that it needs."""
        for name, plan in self.plan.runs.items():
            for kind, make in _REQUESTS.items():
                if f"{kind}_{name}" in targets:
                    made = make(self._facts, plan, self.runs[name])
                    self._asked[name][kind] = write_order(name, kind, made)
                    if isinstance(made, ClipsOrder):
                        yield made.need

    def _plan_publications(self, targets: Sequence[str]) -> None:
        """Refuse publications that a trainer would refuse; write orders of those without caches."""
        for name in self.runs:
            target = f"publish_{name}"
            backend = backends.of_run(self.config, name) if target in targets else None
            if backend is None or not backend.publishes:
                continue
            backend.check_publication(self._facts, name)
            if is_uncached(target, self.config):
                items = write_items(self._facts, name)
                order = backend.order_publication(self._facts, name, items)
                self._asked.setdefault(name, {})["publish"] = str(order)

    def _runs_followed(self, names: Sequence[str], targets: Sequence[str]) -> Iterator[str]:
        """Yield the runs with more than a training asked for; refuse what cannot be done."""
        for name in names:
            for is_asked, refuse, _ in _FOLLOWING.values():
                if is_asked(name, targets):
                    refuse(self.config, name)
                    yield name

    def _plan_following(self, targets: Sequence[str], *, force: bool) -> None:
        """Write the orders of clips and evaluations asked for, where there is anything to do."""
        for name, plan in self.plan.runs.items():
            backend = backends.of_run(self.config, name)
            for word, (is_asked, _, make) in _FOLLOWING.items():
                if backend is not None and is_asked(name, targets):
                    order, reasons = make(self._facts, plan, backend)
                    self._asked[name] |= {word: str(order)} if reasons or force else {}

    # -- the build ----------------------------------------------------------------------------

    def check_targets(
        self, targets: Sequence[str], rules: Collection[str], is_made: Callable[[str], bool]
    ) -> None:
        """Exit with one line at the first unknown target."""
        if self._main:
            with exit_on_mistake():
                check_known(targets, self.runs, rules=rules, is_made=is_made)

    def begin(self) -> None:
        """Tell others of the build: after Snakemake locked, before any job."""
        if self._build is None:
            return
        orders = built_orders(self.plan, self._targets)
        orders += [order for order, stale in self._singles.values() if stale]
        plans = self.plan.runs.values()
        built = [plan.parts for plan in plans if kinds_built(plan.name, self._targets)]
        claim({part.dataset for parts in built for part in parts})
        with exit_on_mistake():
            self._build.begin(orders, self.plan.runs, self._targets)

    def end(self, *, succeeded: bool) -> None:
        """Clean up, before Snakemake unlocks."""
        if self._build is None:
            return
        self._build.end(self.config.store.keep if succeeded else None)
        if succeeded and self._build.orders:
            report_built(self._build.orders)

    # -- inputs and resources of rules --------------------------------------------------------

    @property
    def runs(self) -> dict[str, Run]:
        """The runs of the configuration."""
        return self.config.runs

    def run_order(self, run: str, kind: str) -> str | None:
        """Return a run's order of a kind, if the plan has one."""
        return self._file.runs.get(run, {}).get(kind)

    def receipts(self, run: str, *kinds: str) -> list[str]:
        """Return the receipts of a run's batches of some kinds."""
        plan = self.plan.runs.get(run)
        return [] if plan is None else plan.receipts(*kinds)

    def named(self, job: EncodingJob) -> list[str]:
        """Return the targets of an encoding job that the command asks for by their names.

        Its rule declares them, so that no job of their own makes them beside it. Braces would be a
        pattern to Snakemake.
        """
        asked = [path for path in self._singles if not set("{}") & set(path)]
        made = (path for order in job.orders for path in order.paths) if asked else ()
        return sorted({*asked}.intersection(made))

    def single(self, path: str) -> tuple[Inputs, bool]:
        """Return the inputs of the job of one cache file, and whether the file is stale."""
        if not self._main:
            order = self._file.single(path)
            return ({"orders": [str(order.path)]}, True) if order else ({}, False)
        if path not in self._singles:
            with exit_on_mistake():
                self._singles[path] = single(self._facts, path)
            self._facts.memo.save()
        order, stale = self._singles[path]
        return {"orders": [str(order.path)]}, stale

    def manifest_inputs(self, run: str) -> Inputs:
        """Return the inputs of the manifest job; none where manifest and lock are fresh."""
        order = self._planned_order(run, "manifest")
        if order is None:
            return {}
        return {"order": order, "receipts": self.receipts(run, "latents", "text")}

    def training_inputs(self, run: str) -> Inputs:
        """Return the inputs of a training besides the lock; none where the run is trained.

        Among them are the receipts of all encoding jobs: the manifest, which has those of the
        captions, knows no prompts of sample pictures, and has no job where it is fresh.
        """
        order = self._planned_order(run, "train")
        if order is None:
            return {}
        return {"order": order, "receipts": self.receipts(run, "latents", "text")}

    def following_inputs(self, run: str, word: str) -> Inputs:
        """Return the inputs of what follows a run's training; none where it is up to date."""
        order = self.run_order(run, word)
        return {} if order is None else {"order": order, "receipts": self.receipts(run, "text")}

    def publication_inputs(self, run: str) -> Inputs:
        """Return the inputs of a publication; none where it was not asked for."""
        asked = self.run_order(run, "publish")
        if asked is not None:
            return {"order": asked}
        if not self.config.publish.caches:
            return {}
        order = self._planned_order(run, "trainer")
        if order is None:
            raise LatentmakeError(f"the run {run} has no order")
        return {"lock": f"runs/{run}/dataset.lock", "order": order}

    def _planned_order(self, run: str, kind: str) -> str | None:
        if self._main and run not in self.plan.runs:
            raise LatentmakeError(f"the run {run} was not planned")
        return self.run_order(run, kind)

    def is_publishable(self, run: str) -> bool:
        """Whether a run has a target `publish_{run}`."""
        backend = backends.of_run(self.config, run)
        return backend is not None and backend.publishes

    def runs_that(self, verb: str) -> list[str]:
        """Return the runs whose trainer `generates` or `evaluates`."""
        return [run for run, each in self.runs.items() if getattr(each.trainer, verb, False)]

    def resources(self, kind: str, orders: Sequence[Order] = ()) -> Resources:
        """Return the cluster resources of a job of a kind (`encode`, `train`) with some orders."""
        memo = self._facts.memo if self._main else None
        return resources_of(self.config.cluster, kind, orders, memo)
