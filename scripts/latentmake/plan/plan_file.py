"""What a plan hands to the processes that carry it out: which rules it has, and their orders.

On a cluster each job starts Snakemake again, which reads the Snakefile again while others finish
beside it and somebody else may be planning. So the process that plans writes down what it planned,
and the others are told by an environment variable which of these files is theirs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from latentmake.errors import LatentmakeError
from latentmake.files import atomic
from latentmake.plan.orders import FOLDER, RUNS, WorkOrder

__all__ = ["VARIABLE", "Handover"]

VARIABLE = "LATENTMAKE_PLAN"
"""The environment variable that holds the path of a handover."""


@dataclass(frozen=True)
class Handover:
    """The orders of one plan.

    Attributes:
        rules: name of a batch rule -> name of its order.
        singles: cache file asked for by its name -> name of its order.
        runs: run -> kind of its order (`manifest`, `train`, `wan`) -> path.
    """

    rules: dict[str, str] = field(default_factory=dict)
    singles: dict[str, str] = field(default_factory=dict)
    runs: dict[str, dict[str, str]] = field(default_factory=dict)

    def write(self, planned: int) -> Path:
        """Write it for a plan made at some time (ns), and name it to the processes started later.

        Raises:
            StorageError: the disk is full or cannot be written.
        """
        path = RUNS / f"plan.{planned}.json"
        atomic.write(path, json.dumps(vars(self)).encode())
        os.environ[VARIABLE] = str(path)
        return path

    @classmethod
    def given(cls) -> Handover | None:
        """Return what this process was handed; None where it was started in another way.

        Raises:
            LatentmakeError: the file it was told of is gone or damaged.
        """
        path = os.environ.get(VARIABLE)
        if not path:
            return None
        try:
            return cls(**json.loads(Path(path).read_bytes()))
        except (OSError, ValueError, TypeError) as error:
            raise LatentmakeError(f"{path} is no plan that was handed over: {error}") from None

    def orders(self, allowed: Collection[str] = ()) -> list[WorkOrder]:
        """Return the work orders of batch rules: of those allowed, or of all where none is named.

        Raises:
            LatentmakeError: one is gone or damaged.
        """
        names = [name for rule, name in self.rules.items() if not allowed or rule in allowed]
        return [_read(name) for name in names]

    def single(self, path: str) -> WorkOrder | None:
        """Return the order of a cache file that was asked for by its name.

        Raises:
            LatentmakeError: it is gone or damaged.
        """
        return _read(self.singles[path]) if path in self.singles else None


def _read(name: str) -> WorkOrder:
    path = FOLDER / f"{name}.json"
    try:
        return WorkOrder.read(path)
    except (OSError, ValueError, TypeError) as error:
        raise LatentmakeError(f"{path} is not a work order: {error}") from None
