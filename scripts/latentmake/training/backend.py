"""Interface of a trainer: planning, checklist of findings, training, publication."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentmake.training.order import RunFiles

if TYPE_CHECKING:
    from latentmake.config.root import Config
    from latentmake.plan.facts import Facts
    from latentmake.plan.run_plan import RunPlan
    from latentmake.plan.state import Difference
    from latentmake.training.findings import Finding, Say


class Backend(ABC):
    """A trainer; all but `plan` and `train` are optional.

    A subclass imports no torch outside its methods: planning loads no trainer.

    Attributes:
        publishes: whether its runs have a target `publish_{run}`.
    """

    publishes = False

    @abstractmethod
    def plan(self, facts: Facts, plan: RunPlan, *, train: bool) -> None:
        """Write the order of a run, and decide whether there is anything to train.

        Args:
            facts: what is known of files.
            plan: of the run; gets the orders. Its `lock` is the digest of its caches.
            train: whether its training is asked for, so that it is refused if something is missing.

        Raises:
            UserError: the training could not be carried out.
        """

    def check_network(self, config: Config, run: str) -> str:
        """Return what the files of a network tell, whose content is not read; "" for nothing.

        Raises:
            UserError: they tell less than the training needs; names the key to set.
        """
        return ""

    def check(self, order: Any, *, current: bool) -> Iterable[Finding]:
        """Check what a run needs besides its caches; files of a `current` manifest too.

        Args:
            order: the trainer's, as `plan` made it.
            current: whether manifest and caches are up to date.
        """
        return ()

    @abstractmethod
    def train(
        self, order: Path, *, log: Path, receipt: Path, processes: int = 1, threads: int = 2
    ) -> None:
        """Bring the trained weights of an order file up to date; raises UserError.

        Args:
            order: its path.
            log: gets all output.
            receipt: a JSON file that says where the result lies; written last.
            processes: how many devices train together.
            threads: CPU threads of the trainer.
        """

    def outputs(self, order: Any, word: str, *, finished: bool) -> dict[Path, str]:
        """Return the files that `train`, `generate` or `evaluate` surely makes of an order.

        If it is `finished`, return all that it has made. Files that a report shows have the name of
        their caption. `pages` are the files that a report shows besides these.
        """
        return RunFiles(order).outputs(word, finished=finished)

    def check_publication(self, facts: Facts, run: str) -> None:
        """Refuse a publication whose files the trainer would refuse; raises UserError."""
        del facts, run

    def order_publication(self, facts: Facts, run: str, manifest: Path) -> Path:
        """Write the order of a publication of items of another manifest than the run's."""
        raise NotImplementedError

    def plan_following(
        self, facts: Facts, plan: RunPlan, word: str
    ) -> tuple[Path, list[Difference]]:
        """Write the order of what follows a training; tell why its result is not there already.

        Asked after `plan`, with `generate` of a trainer whose settings say that it `generates`, and
        with `evaluate` of one that `evaluates`.

        Raises:
            UserError: it could not be carried out.
        """
        raise NotImplementedError

    def follow(self, order: Path, word: str, *, log: Path, threads: int = 2) -> Path:
        """Bring clips and their index, or the results of an evaluation, up to date.

        Returns:
            Their folder.
        """
        raise NotImplementedError

    def publish(self, order: Path, say: Say) -> None:
        """Bring the published folder of an order up to date."""
        raise NotImplementedError
