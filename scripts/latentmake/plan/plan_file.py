"""Plan file: the rules and orders of one plan, for the processes that Snakemake starts.

On a cluster each job reads the Snakefile again, while other jobs finish and other builds plan. The
planning process writes this file; the others find its path in an environment variable.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from latentmake.errors import LatentmakeError
from latentmake.files import atomic
from latentmake.plan.orders import FOLDER, RUNS, EncodingJob, Order
from latentmake.plan.run_plan import Plan

VARIABLE = "LATENTMAKE_PLAN"
"""Environment variable with the path of the plan file."""


class PlanFile(BaseModel):
    """Orders of a plan.

    Attributes:
        jobs: name of an encoding job's rule -> names of its work orders.
        singles: cache file asked for by its name -> name of its work order.
        runs: run -> kind of an order (`manifest`, `train`, `adopt`, ...) -> path.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    jobs: dict[str, list[str]] = {}
    singles: dict[str, str] = {}
    runs: dict[str, dict[str, str]] = {}

    @classmethod
    def of(
        cls,
        plan: Plan,
        singles: Mapping[str, tuple[Order, bool]],
        asked: Mapping[str, Mapping[str, str]],
    ) -> PlanFile:
        """Return that of a plan.

        Args:
            plan: of the runs asked for.
            singles: cache file asked for by its name -> its work order, and whether it is stale.
            asked: run -> kind of a request -> path of its order.
        """
        runs = {name: dict(kinds) for name, kinds in asked.items()}
        for name, own in plan.runs.items():
            orders = {
                "manifest": own.manifest_order,
                "train": own.training_order,
                "trainer": own.trainer_order,
            }
            runs[name] |= {kind: str(path) for kind, path in orders.items() if path is not None}
        return cls(
            jobs={job.rule: [each.name for each in job.orders] for job in plan.jobs},
            singles={path: order.name for path, (order, _) in singles.items()},
            runs=runs,
        )

    def write(self, planned: int) -> None:
        """Write it for a plan of some time (ns), and set the environment variable."""
        path = RUNS / f"plan.{planned}.json"
        atomic.write(path, self.model_dump_json().encode())
        os.environ[VARIABLE] = str(path)

    @classmethod
    def read(cls) -> PlanFile:
        """Read the file that the environment variable names; an empty plan where it is not set."""
        path = os.environ.get(VARIABLE)
        if not path:
            return cls()
        try:
            return cls.model_validate_json(Path(path).read_bytes())
        except (OSError, ValueError) as error:
            raise LatentmakeError(f"{path} is not a plan: {error}") from None

    def encoding_jobs(self, allowed: Collection[str] = ()) -> list[EncodingJob]:
        """Read the encoding jobs, or those of the rules in `allowed` if there are any."""
        return [
            EncodingJob(tuple(map(_read, names)))
            for rule, names in self.jobs.items()
            if not allowed or rule in allowed
        ]

    def single(self, path: str) -> Order | None:
        """Read the work order of a cache file that was asked for by its name."""
        return _read(self.singles[path]) if path in self.singles else None


def _read(name: str) -> Order:
    path = FOLDER / f"{name}.json"
    try:
        return Order.read(path)
    except (OSError, ValueError, TypeError) as error:
        raise LatentmakeError(f"{path} is not a work order: {error}") from None
