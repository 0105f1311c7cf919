"""What the Snakefile holds on to: the configuration, the plan, and the inputs of its rules.

The process that the user started plans. Processes that Snakemake starts never do: they read the
orders that lie on disk.
"""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from latentmake import backends
from latentmake.config import Config, Run, TrainingJob, parse
from latentmake.errors import LatentmakeError, UserError, storage_error
from latentmake.exchange import archives
from latentmake.exchange.ai_training.plan import plan_adopt, plan_export, refuse_company
from latentmake.index.memo import Memo
from latentmake.plan import orders, workspace
from latentmake.plan.facts import Facts
from latentmake.plan.orders import WorkOrder, newest_run_order
from latentmake.plan.parts import Plan, RunPlan
from latentmake.plan.plan_file import Handover
from latentmake.plan.planner import make_plan
from latentmake.plan.single import single
from latentmake.plan.targets import ON_REQUEST, check_known, is_training_asked, runs_asked_for
from latentmake.reports.captions_order import plan_captions
from latentmake.reports.checklist import plan_check
from latentmake.reports.comparison_order import Page, is_page, plan_page
from latentmake.reports.plan_table import plan_table, status_lines
from latentmake.training.external.publication import is_uncached, write_items

__all__ = ["Session"]

MEMO = Path(".latentmake/memo.sqlite")
Result = TypeVar("Result")
Resources = dict[str, int | str | Callable[[object, int], int]]
_UNKNOWN_SECONDS = 2.0  # an item of a model that nobody has encoded with yet


class Session:
    """One reading of the Snakefile.

    Args:
        values: the configuration file as read.
        targets: what the user asked for; empty stands for everything.
        main: whether this process plans.
        force: whether the user forces jobs that have nothing to do.
        dry: whether this is a dry run, which starts no process that would need the plan.
        home: folder of the Snakefile.
        buildable: folders that a rule makes.
        deployed: whether Snakemake makes environments for jobs.
        allowed: in a process that Snakemake starts, the rules that it shall know.
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
        buildable: Mapping[str, str] | None = None,
        deployed: bool = False,
        allowed: Collection[str] = (),
    ) -> None:
        self.main = main
        self._buildable = dict(buildable or {})
        self._deployed = deployed
        self._facts: Facts | None = None
        self._singles: dict[str, tuple[WorkOrder, bool]] = {}
        self._asked: dict[str, dict[str, str]] = {}
        if main:
            _or_exit(lambda: workspace.check(home, dry=dry))
        self.config: Config = _or_exit(lambda: parse(values))
        _or_exit(lambda: archives.check_plugin(self.config))
        self.plan = Plan({}, [])
        self.pages: list[Page] = []
        if main:
            names = _or_exit(lambda: self._planned_runs(targets))
            trained = [name for name in names if is_training_asked(name, targets)]
            self.plan = _or_exit(lambda: self._planned(names, trained, force))
            # All orders lie there before Snakemake looks: it remembers what a folder holds.
            files = [target for target in targets if target.startswith("cache/")]
            self._singles = {path: self._single(path) for path in files}
            self.pages = _or_exit(lambda: self._plan_pages(targets, trained))
            self._asked = _or_exit(lambda: self._plan_asked(targets))
            self._report([name for name in names if f"status_{name}" in targets])
            self._handover = _or_exit(lambda: self._hand_over(dry))
        else:
            given = Handover.given()
            self._handover = given or Handover()
            self.plan = Plan({}, given.orders(allowed) if given else orders.on_disk())

    def _planned_runs(self, targets: Sequence[str]) -> list[str]:
        """Return the runs to plan; a publication without caches needs no plan of its run."""
        runs_asked_for(targets, self.config.runs)  # each of which there must be
        cached = [target for target in targets if not is_uncached(target, self.config)]
        return runs_asked_for(cached, self.config.runs) if cached or not targets else []

    def _planned(self, names: Iterable[str], trained: Collection[str], force: bool) -> Plan:
        facts = self._facts = Facts(
            self.config,
            Memo(MEMO),
            buildable=self._buildable,
            runs_jobs=not self._deployed,
            program_digest=backends.program_digest,
        )
        # Plan and graph are millions of small objects that live to the end: looking through them
        # for garbage again and again would cost more than making them.
        gc.disable()
        try:
            plan = make_plan(facts, names, force=force)
            for name, each in plan.runs.items():
                backends.plan_training(facts, each, train=name in trained)
            facts.memo.save()
            return plan
        finally:
            gc.freeze()
            gc.set_threshold(200_000, 20, 100)
            gc.enable()

    def _hand_over(self, dry: bool) -> Handover:
        runs = {
            name: {
                kind: str(path)
                for kind, path in (
                    ("manifest", plan.manifest_order),
                    ("train", plan.training_order),
                    ("trainer", plan.trainer_order),
                )
                if path is not None
            }
            | self._asked.get(name, {})
            for name, plan in self.plan.runs.items()
        }
        runs |= {name: kinds for name, kinds in self._asked.items() if name not in runs}
        singles = {path: order.name for path, (order, _) in self._singles.items()}
        handover = Handover({o.rule: o.name for o in self.plan.orders}, singles, runs)
        if not dry:
            handover.write(time.time_ns())
        return handover

    def _plan_asked(self, targets: Sequence[str]) -> dict[str, dict[str, str]]:
        """Write the orders of what is done on request alone; run -> kind -> path."""
        facts, config = self._facts, self.config
        assert facts is not None
        refuse_company(targets, self.runs)
        makers: dict[str, Callable[[RunPlan, Run], Path]] = {
            "store": lambda plan, run: archives.plan_store(config, plan, run, time.time_ns()),
            "fetch": lambda plan, run: archives.plan_fetch(config, plan, time.time_ns()),
            "adopt": lambda plan, run: plan_adopt(facts, plan, run),
            "export": lambda plan, run: plan_export(facts, plan, run),
            "captions": lambda plan, run: plan_captions(facts, plan, run),
            "check": lambda plan, run: plan_check(facts, plan, run),
        }
        asked = {
            name: {
                kind: str(makers[kind](plan, self.runs[name]))
                for kind in ON_REQUEST
                if f"{kind}_{name}" in targets
            }
            for name, plan in self.plan.runs.items()
        }
        for target in targets:
            name = target.removeprefix("publish_")
            if name == target or name not in self.runs:
                continue
            backend = backends.of_run(config, name)
            if backend is None or not backend.publishes:
                continue
            backend.check_publication(facts, name)
            if is_uncached(target, config):
                order = backend.order_publication(facts, name, write_items(facts, name))
                asked.setdefault(name, {})["publish"] = str(order)
        return asked

    def _plan_pages(self, targets: Sequence[str], trained: Collection[str]) -> list[Page]:
        """Write the orders of the comparisons asked for, each once."""
        assert self._facts is not None
        pages: dict[str, Page] = {}
        trained = [run for run in trained if self.plan.runs[run].training_order is not None]
        for target in filter(is_page, targets):
            page = plan_page(
                target,
                self.config,
                digest_of=self._facts.memo.digest_of_file,
                trained=trained,
                planned=time.time_ns(),
            )
            pages[page.name] = page
        if pages:
            self._facts.memo.save()
        return list(pages.values())

    def _run_order(self, run: str, kind: str) -> str | None:
        if self.main:
            self._run(run)
        if run in self._handover.runs:
            return self._handover.runs[run].get(kind)
        path = newest_run_order(run, "train" if kind == "trainer" else kind)
        return None if path is None else str(path)

    def _report(self, names: Iterable[str]) -> None:
        if self.plan.runs:
            sys.stderr.write(plan_table(self.plan) + "\n")
        for name in names:
            text = "\n".join(status_lines(self.plan.runs[name], self.config.store.keep))
            _or_exit(partial(_write, self.status_path(name), text))

    def begin(self) -> None:
        """Tidy up and keep what jobs will replace: when Snakemake has its lock, before any job."""
        singles = [order for order, stale in filter(None, self._singles.values()) if stale]
        self._building = orders.begin([*self.plan.orders, *singles])

    def check_targets(
        self, targets: Sequence[str], rules: Collection[str], is_made: Callable[[str], bool]
    ) -> None:
        """Exit with one line at the first unknown target."""
        if self.main:
            _or_exit(lambda: check_known(targets, self.runs, rules=rules, is_made=is_made))

    def end(self) -> None:
        """Tidy up after a build that ended well, before Snakemake gives its lock back."""
        orders.end(self._building, self.plan.orders, self.config.store.keep)

    # -- what rules ask -----------------------------------------------------------------------

    @property
    def orders(self) -> list[WorkOrder]:
        """The batch jobs."""
        return self.plan.orders

    @property
    def runs(self) -> dict[str, Run]:
        """The runs of the configuration."""
        return self.config.runs

    def marker(self, *paths: str | None) -> list[str]:
        """Return the files that a rule makes, for those of some paths that it has yet to make."""
        return sorted(
            {
                marker
                for folder, marker in self._buildable.items()
                for path in paths
                if path and Path(path).is_relative_to(folder) and not Path(path).exists()
            }
        )

    def order_inputs(self, order: WorkOrder) -> dict[str, list[str] | str]:
        """Return what a batch job needs: its order, and the model where a rule has to make it."""
        model = self.config.models.get(order.model)
        places = [] if model is None else [model.vae.path, *(text.path for text in model.text)]
        return {"order": str(order.path), "model": self.marker(*places) if order.pending else []}

    def resources(self, kind: str, items: int = 1, minutes: float | None = None) -> Resources:
        """Return what a job asks of a cluster, each value a function of wildcards and attempt.

        Args:
            kind: `encode` or `train`.
            items: of an encoding job.
            minutes: how long it took in the past, if that is known.
        """
        cluster = self.config.cluster
        asked = cluster.encode if kind == "encode" else cluster.train
        expected = minutes if minutes is not None else items * _UNKNOWN_SECONDS / 60
        limit = asked.runtime + (2 * expected if kind == "encode" else 0)
        found: Resources = {
            "mem_mb": lambda wildcards, attempt: int(asked.mem_mb * (1 + (attempt - 1) / 2)),
            "runtime": lambda wildcards, attempt: math.ceil(limit * attempt),
        }
        if isinstance(asked, TrainingJob) and asked.nodes > 1:
            found["nodes"] = asked.nodes
        if partition := asked.partition or cluster.partition:
            found["slurm_partition"] = partition
        if cluster.account:
            found["slurm_account"] = cluster.account
        return found

    def order_resources(self, order: WorkOrder) -> Resources:
        """Return what a batch job asks of a cluster."""
        return self.resources("encode", len(order.items), self.plan.minutes.get(order.name))

    def receipts(self, run: str, *kinds: str) -> list[str]:
        """Return the receipts of a run's batch jobs of some kinds."""
        plan = self.plan.runs.get(run)
        return [] if plan is None else plan.receipts(*kinds)

    def manifest_inputs(self, run: str) -> dict[str, list[str] | str]:
        """Return what the manifest job needs; nothing where manifest and lock are fresh."""
        order = self._run_order(run, "manifest")
        if order is None:
            return {}
        return {"order": order, "receipts": self.receipts(run, "latents", "text")}

    def training_inputs(self, run: str) -> dict[str, list[str] | str]:
        """Return the inputs of a training besides the lock; nothing where the run is trained.

        Among them are the receipts of all encoding jobs: the manifest, which has those of the
        captions, knows no prompts of sample pictures, and has no job where it is fresh.
        """
        order = self._run_order(run, "train")
        if order is None:
            return {}
        model = self.config.models[self.config.runs[run].model]
        places = [model.vae.path, *([model.unet.path] if model.unet else [])]
        receipts = self.receipts(run, "latents", "text")
        return {"order": order, "model": self.marker(*places), "receipts": receipts}

    def text_models(self, run: str) -> list[str]:
        """Return the models yet to be made whose tokenizers a run needs."""
        return self.marker(*(text.path for text in self.config.models[self.runs[run].model].text))

    def is_publishable(self, run: str) -> bool:
        """Whether a run has a target `publish_{run}`."""
        backend = backends.of_run(self.config, run)
        return backend is not None and backend.publishes

    def publication_inputs(self, run: str) -> dict[str, str]:
        """Return the inputs of a publication: its order, and the lock where caches are published.

        Empty where it was not asked for.
        """
        asked = self.asked_order(run, "publish")
        if asked is not None:
            return {"order": asked}
        if not self.config.publish.caches:
            return {}
        order = self._run_order(run, "trainer")
        if order is None:
            raise LatentmakeError(f"the run {run} has no order")
        return {"lock": f"runs/{run}/dataset.lock", "order": order}

    def asked_order(self, run: str, kind: str) -> str | None:
        """Return the order of what is done with a run on request alone, if it was asked for."""
        return self._handover.runs.get(run, {}).get(kind)

    def _run(self, run: str) -> RunPlan:
        if run not in self.plan.runs:
            raise LatentmakeError(f"the run {run} was not planned")
        return self.plan.runs[run]

    @staticmethod
    def status_path(run: str) -> Path:
        """Return where a run's status lies, for the job that prints it."""
        return Path(f".latentmake/runs/{run}.status.txt")

    def single(self, path: str) -> tuple[dict[str, list[str] | str], bool]:
        """Plan one cache file asked for by its name.

        Returns:
            The inputs of its job, and whether it is stale.
        """
        if self._facts is None:
            order = self._handover.single(path)
            return (self.order_inputs(order), True) if order else ({}, False)
        found = self._singles[path] if path in self._singles else self._single(path)
        single, stale = found
        return self.order_inputs(single), stale

    def _single(self, path: str) -> tuple[WorkOrder, bool]:
        facts = self._facts
        assert facts is not None
        return _or_exit(lambda: single(facts, path))


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise storage_error(error, path) or error from None


def _or_exit(work: Callable[[], Result]) -> Result:
    """Return what some work gives; a user's mistake ends the program with its one line."""
    try:
        return work()
    except UserError as error:
        sys.exit(f"error: {error}")
