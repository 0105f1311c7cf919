"""Session: configuration, plan and inputs of rules for one reading of the Snakefile.

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
from latentmake.base.machine import many_objects
from latentmake.base.workspace import check_folder, check_run_folder, claim
from latentmake.config.root import parse
from latentmake.entry import exit_on_mistake
from latentmake.graph import Graph, touch_stand_in
from latentmake.pages.plan_report import report
from latentmake.plan.planner import make_plan
from latentmake.request import FOLLOWING, PlanFile, Request, followed, plan_extras

if TYPE_CHECKING:
    from latentmake.plan.build_locks import Build


class Session:
    """One reading of the Snakefile.

    Attributes:
        plan: plan of the requested runs; in a process that does not plan, it only has jobs.
        graph: Snakemake's view of the plan.
        memo: memo with the sums over past jobs; None in a process that does not plan.
        began: whether the build has begun its jobs.
        interrupted: whether a user ended the build.
        idle: whether there is nothing to do, as far as the plan knows.
        has_jobs: whether the targets need jobs that encode or train.

    Args:
        values: the configuration file as read.
        targets: targets of the command line; an empty list stands for everything.
        main: whether this process makes the plan.
        force: Snakemake's options and names of forced targets, see `Request`.
        read_only: whether the command starts no job. Then the plan takes no lock and writes no
            orders.
        configfiles: configuration files that the user names on the command line.
        home: folder of the Snakefile.
        deployed: whether Snakemake makes environments for jobs.
        allowed: in a process that Snakemake starts, the rules that it may run.
        side_by_side: number of jobs that encode at a time on this machine; None on a cluster.
        add_places: adds files and lines to a mistake, see `Places.add_to`.
    """

    def __init__(
        self,
        values: Mapping[str, object],
        *,
        targets: Sequence[str],
        main: bool,
        force: Collection[str] = (),
        read_only: bool = False,
        configfiles: Sequence[str | Path] = (),
        home: Path = Path(),
        deployed: bool = False,
        allowed: Collection[str] = (),
        side_by_side: int | None = 1,
        add_places: Callable[[Exception], None] | None = None,
    ) -> None:
        self._main = main
        self.memo: object = None
        self._build: Build | None = None
        self._sizes: dict[str, int] = {}  # log of an earlier job -> its bytes before this build
        self.began = self.interrupted = self.idle = self.has_jobs = False
        with exit_on_mistake(add_places), contextlib.ExitStack() as finally_:
            if main:
                check_folder(home, dry=read_only)
            if main and not read_only:
                from latentmake.plan.build_locks import Build

                self._build = Build(cluster=side_by_side is None)
            self.config = parse({key: values[key] for key in values if main or key != "prompt"})
            if not main:
                given = PlanFile.read()
                self.plan = given.plan(allowed)
                self.graph = Graph(self.config, self.plan, given.runs)
                return
            self._request = Request(targets, self.config, force)
            self._facts = backends.facts_of(
                self.config,
                runs_jobs=not deployed,
                local=side_by_side is not None,
                encoders=self._request.encodes,
                read_only=read_only,
            )
            self._facts.forced = self._request.forced
            for file in configfiles:
                self._facts.options += ("-c", os.path.relpath(file))
            self.config, self.memo = self._facts.config, self._facts.memo
            finally_.callback(self._facts.memo.save)
            self._tell(self._plan_runs(side_by_side=side_by_side))

    def _tell(self, orders: dict[str, dict[str, str]]) -> None:
        """Print the plan, and write it for the processes that Snakemake starts."""
        request, read_only, more = self._request, self._facts.read_only, self.graph.words
        made, trained = request.orders(self.plan), request.trained
        self.idle = not made and not {*chain(*orders.values())} - {"trainer"}
        self.has_jobs = bool(made or [run for run in trained if "train" in orders.get(run, ())])
        self._table = report(
            self._facts, self.plan, trained, made, kinds=request.kinds, dry=read_only, more=more
        )
        if not read_only:
            jobs = {job.rule: [order.name for order in job.orders] for job in self.plan.jobs}
            PlanFile(jobs=jobs, runs=orders).write(time.time_ns())
        elif self.plan.jobs or not self.idle:
            touch_stand_in()

    def _plan_runs(self, *, side_by_side: int | None) -> dict[str, dict[str, str]]:
        """Plan the runs that targets need; return run -> kind of an order -> its path."""
        request, facts = self._request, self._facts
        following = [*followed(facts, request)] if request.extras else []
        with many_objects():
            self.plan = make_plan(
                facts,
                request.runs,
                generated=following,
                side_by_side=side_by_side,
                files=request.files,
            )
            for name, plan in self.plan.runs.items():
                trains = name in request.trained
                if trains or "publish" in request.words[name]:
                    backends.plan_training(facts, plan, train=trains)
                listed = plan.manifest_order and request.kinds[name]
                if listed or (plan.training_order and trains):
                    check_run_folder(Path("runs", name))
            others = [name for name in self.plan.runs if name not in request.trained]
            self.plan.leave_out_prompts([*following, *others])
        # Orders must exist before Snakemake looks for them, because it remembers a folder's files.
        orders = {name: plan.order_paths for name, plan in self.plan.runs.items()}
        if request.extras:
            self.plan.needs += plan_extras(facts, self.plan, request, orders)
        self.graph = Graph(self.config, self.plan, orders, trained=request.trained)
        self.graph.declare(facts, following)
        return orders

    # -- the build ----------------------------------------------------------------------------

    def check_targets(self, rules: Collection[str], is_made: Callable[[str], bool]) -> None:
        """Exit with one line at the first unknown target."""
        if self._main:
            with exit_on_mistake():
                self._request.check(rules, is_made)

    def begin(self) -> None:
        """Announce the build to other commands, after Snakemake locked and before any job."""
        self.began = True
        if self._build is None:
            return
        self._sizes = {str(log): log.stat().st_size for log in Path("logs").rglob("*.log")}
        orders = self._request.orders(self.plan)
        built = [run for name, run in self.plan.runs.items() if self._request.kinds[name]]
        claim({part.dataset for run in built for part in run.parts})
        trained, words = self._request.trained, ("train", *FOLLOWING)
        results = (self.graph.results(run, word) for run in trained for word in words)
        made, targets = chain.from_iterable(results), self._request.targets
        with exit_on_mistake():
            self._build.begin(orders, trained, targets, made, declares=bool(self.graph.nodes))

    def end(
        self,
        *,
        succeeded: bool,
        configfiles: Sequence[Path] = (),
        failed: Mapping[str, str] | None = None,
    ) -> None:
        """Clean up before Snakemake unlocks, and print what was made or what failed.

        Args:
            succeeded: whether all jobs succeeded.
            configfiles: configuration files of the command line, for commands in messages.
            failed: rule -> log of the jobs that failed; None if a user ended the build.
        """
        if self._build is None:
            return
        self._build.end(self.config.store.keep if succeeded else None)
        from latentmake.pages import outcome

        orders, self.interrupted = self._build.orders, not succeeded and failed is None
        if failed:
            outcome.tell(outcome.failed(failed, self._sizes, orders))
        elif not succeeded:
            outcome.tell(outcome.interrupted(orders))
        else:
            requested = [self.plan.runs[name] for name in self._request.trained]
            trained = self.weights(run.name for run in requested if run.reasons)
            outcome.tell(outcome.built(orders, trained, configfiles))

    def weights(self, runs: Iterable[str]) -> dict[str, str]:
        """Return run -> file of the weights that its training makes; "" without a training."""
        return {run: next(iter(self.graph.results(run, "train")), "") for run in runs}

    def tell_idle(self) -> None:
        """Print that all targets are up to date, and where the results are."""
        from latentmake.pages import outcome

        outcome.tell(outcome.up_to_date(self.weights(self._request.runs or self._request.targets)))

    def described(self) -> dict[str, str]:
        """Return the plan's table and the provenance of the runs' weights."""
        from latentmake.pages.following import provenance

        return {"plan": self._table, "provenance": "\n\n".join(map(provenance, self.plan.runs))}

    def runs_of_ours(self) -> list[str]:
        """Return the runs that Latentmake's own trainers train."""
        return [name for name, run in self.config.runs.items() if run.trainer and run.trainer.ours]

    def published_runs(self) -> list[str]:
        """Return the runs that can be published."""
        backend_of = ((name, backends.of_run(self.config, name)) for name in self.config.runs)
        return [name for name, backend in backend_of if backend is not None and backend.publishes]
