"""Interface of a trainer: planning, checklist of findings, training, publication."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from latentmake.plan.manifest import run_folder
from latentmake.plan.product import Difference
from latentmake.runs.order import RunFiles, RunOrder

if TYPE_CHECKING:
    from latentmake.config.root import Config
    from latentmake.plan.facts import Facts
    from latentmake.plan.run_plan import RunPlan
    from latentmake.runs.findings import Finding, Say


class Backend(ABC):
    """A trainer. A subclass must define `plan` and `train`; its other methods are optional.

    A subclass imports torch inside its methods only, so that planning loads no trainer. If another
    package brings it, `settings` is the class of its section, a `config.trainers.Trainer`.

    Attributes:
        publishes: whether its runs have a target `publish_{run}`.
    """

    publishes = False

    @abstractmethod
    def plan(self, facts: Facts, plan: RunPlan, *, train: bool) -> None:
        """Write the order of a run, and decide whether there is anything to train.

        Args:
            facts: facts about the configuration, datasets and models.
            plan: plan of the run, which gets the orders. Its `lock` is the digest of its caches.
            train: whether the user wants this training; it is refused if something is missing.

        Raises:
            UserError: the training could not be carried out.
        """

    def check_network(self, config: Config, run: str) -> str:
        """Return what the network predicts, as its files say; "" if there is nothing to report.

        Only metadata and configuration files are read, not the weights.

        Raises:
            UserError: the files say less than the training needs; the error names the key to set.
        """
        return ""

    def check(self, order: Any, *, current: bool) -> Iterable[Finding]:
        """Check everything that a run needs besides its caches.

        Args:
            order: order of the trainer, as `plan` made it.
            current: whether manifest and caches are up to date. If so, the files that the manifest
                names are checked too.
        """
        return ()

    @abstractmethod
    def train(
        self, order: Path, *, log: Path, receipt: Path, processes: int = 1, threads: int = 2
    ) -> None:
        """Bring the trained weights of an order file up to date; raises UserError.

        Args:
            order: path of the order file.
            log: file that gets all output.
            receipt: JSON file that says where the result lies. It is written last.
            processes: how many devices train together.
            threads: CPU threads of the trainer.
        """

    def write(self, order: RunOrder) -> None:
        """Write the order of a training; results of earlier releases get a history before."""
        files = RunFiles(order)
        if files.record.is_file() and not files.history.exists():
            from latentmake.runs.history import keep_earlier  # once, after an update

            keep_earlier(order.run)
        order.write()

    def trial(self, order: Any, folder: Path, steps: int) -> RunOrder | None:
        """Return the order of a training of a few steps in a folder, to measure its time.

        It draws no samples. Manifest and lock lie in the folder, too. The result is None if the
        trainer makes no trials.
        """
        return None

    def steps_done(self, order: Any, data: str) -> int:
        """Return the step from which a training resumes; `data` is the digest of its caches."""
        return 0

    def check_publication(self, facts: Facts, run: str) -> None:
        """Raise a UserError if the trainer would refuse the files of a publication."""
        del facts, run

    def plan_publication(self, facts: Facts, run: str) -> Path:
        """Write the order of a publication without caches, and the manifest of its items."""
        from latentmake.runs.rows import write_items  # few builds publish

        return self.order_publication(facts, run, write_items(facts, run))

    def order_publication(self, facts: Facts, run: str, manifest: Path) -> Path:
        """Write the order of a publication, whose items may be from another manifest."""
        raise NotImplementedError

    def publication_reasons(self, facts: Facts, run: str) -> list[Difference]:
        """Return which files a publication would write or remove, and why; raises UserError.

        A publication with caches needs those of an up-to-date manifest.
        """
        from latentmake.runs.rows import items_of

        with TemporaryDirectory() as folder:
            items = Path(folder, "items.jsonl")
            if facts.config.publish.caches:
                items = run_folder(run) / "manifest.jsonl"
            else:
                items.write_bytes(items_of(facts, run))
            files = self.unpublished(facts, run, items)
            return [Difference(f"{name} {what}") for name, what in files]

    def unpublished(self, facts: Facts, run: str, manifest: Path) -> Iterable[tuple[str, str]]:
        """Yield each file that differs from a manifest's publication, and what is wrong with it."""
        raise NotImplementedError

    def plan_following(
        self, facts: Facts, plan: RunPlan, word: str
    ) -> tuple[Path, list[Difference]]:
        """Write the order of the clips or the evaluation of a run.

        It is called after `plan`: with `generate` if the trainer's settings say that it
        `generates`, and with `evaluate` if they say that it `evaluates`.

        Returns:
            Path of the order, and the reasons why its result is missing or outdated.

        Raises:
            UserError: the order could not be carried out.
        """
        raise NotImplementedError

    def follow(self, order: Path, word: str, *, log: Path, threads: int = 2) -> Path:
        """Bring clips and their index, or the results of an evaluation, up to date.

        Returns:
            Folder of the result.
        """
        raise NotImplementedError

    def publish(self, order: Path, say: Say) -> None:
        """Bring the published folder of an order up to date."""
        raise NotImplementedError
