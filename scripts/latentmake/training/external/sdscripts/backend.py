"""sd-scripts as a backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from latentmake.config import Config, SdScriptsTrainer
from latentmake.index.remembered import Memory
from latentmake.training.backend import Say
from latentmake.training.checks import Finding, refuse_failed
from latentmake.training.external.backend import External
from latentmake.training.external.order import fields_of
from latentmake.training.external.sdscripts.checkpoint import checkpoint_digest
from latentmake.training.external.sdscripts.order import SdScriptsOrder
from latentmake.training.external.sdscripts.preflight import preflight

__all__ = ["SdScripts"]


class SdScripts(External[SdScriptsOrder]):
    """The trainer `sdscripts`."""

    order_type = SdScriptsOrder

    def order(self, config: Config, run: str) -> SdScriptsOrder:
        """Return the order of a run."""
        trainer = config.runs[run].trainer
        assert isinstance(trainer, SdScriptsTrainer) and config.sd_scripts is not None
        return SdScriptsOrder(
            **fields_of(config, run), trainer=trainer, sd_scripts=config.sd_scripts
        )

    def weights_digest(self, order: SdScriptsOrder, file_digest: Callable[[Path], str]) -> str:
        """Return the digest of the network that is trained."""
        return checkpoint_digest(order, file_digest)

    def refuse(self, order: SdScriptsOrder, memory: Memory) -> None:
        """Refuse a training that lacks something."""
        refuse_failed(preflight(order, memory))

    def check(self, order: Path, *, current: bool) -> Iterable[Finding]:
        """Check what a run needs besides its caches."""
        from latentmake.training.external.sdscripts.check import check

        found = self.read(order)
        return check(found) if current else preflight(found)

    def train(
        self, order: Path, *, log: Path, receipt: Path, processes: int = 1, threads: int = 2
    ) -> None:
        """Bring the trained weights of an order up to date, and write the receipt."""
        from latentmake.training.external.sdscripts.launch import train

        train(order, log=log, receipt=receipt, processes=processes, threads=threads)

    def publication_findings(self, order: SdScriptsOrder, memory: Memory) -> Iterable[Finding]:
        """Check what would be published."""
        from latentmake.training.external.sdscripts.publish import findings

        return findings(order, memory)

    def publish(self, order: Path, say: Say) -> None:
        """Bring the published folder of an order up to date."""
        from latentmake.training.external.sdscripts.publish import publish

        publish(self.read(order), say)
