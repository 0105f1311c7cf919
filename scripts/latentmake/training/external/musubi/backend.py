"""musubi-tuner as a backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from latentmake.config import Config, MusubiTrainer
from latentmake.errors import ModelError
from latentmake.index.remembered import Memory
from latentmake.models.wan_files import networks
from latentmake.training.backend import Say
from latentmake.training.checks import Finding, refuse_failed
from latentmake.training.external.backend import External
from latentmake.training.external.musubi.networks import networks_digest
from latentmake.training.external.musubi.order import MusubiOrder
from latentmake.training.external.musubi.preflight import preflight
from latentmake.training.external.order import fields_of

__all__ = ["Musubi"]


class Musubi(External[MusubiOrder]):
    """The trainer `musubi`."""

    order_type = MusubiOrder

    def order(self, config: Config, run: str) -> MusubiOrder:
        """Return the order of a run; of one without `trainer` that of a publication alone."""
        trainer = config.runs[run].trainer
        return MusubiOrder(
            **fields_of(config, run),
            trained=trainer is not None,
            trainer=trainer if isinstance(trainer, MusubiTrainer) else MusubiTrainer(kind="musubi"),
            musubi_tuner=config.musubi_tuner,
        )

    def is_asked(self, order: MusubiOrder) -> bool:
        """Whether the run has a trainer; without one it can be published alone."""
        return order.trained

    def weights_digest(self, order: MusubiOrder, file_digest: Callable[[Path], str]) -> str:
        """Return the digest of the networks that are trained."""
        return networks_digest(order.model, file_digest)

    def refuse(self, order: MusubiOrder, memory: Memory) -> None:
        """Refuse a training that lacks something; the recipes have looked at the encoders."""
        models = list(networks(order.model))
        for file in models:
            if file.fault:
                where = f"models.{order.model_name}.{file.key}"
                fault = f"{file.place} {file.fault}" if file.place else file.fault
                raise ModelError(fault, where=where, mend="name the right file")
        refuse_failed(preflight(order, memory, quick=True, models=models))

    def check(self, order: Path, *, current: bool) -> Iterable[Finding]:
        """Check what a run needs besides its caches."""
        from latentmake.training.external.musubi import check

        found = self.read(order)
        if found.trained:
            return check.check(found) if current else preflight(found)
        return check.data_findings(found) if current else ()

    def train(
        self, order: Path, *, log: Path, receipt: Path, processes: int = 1, threads: int = 2
    ) -> None:
        """Bring the trained weights of an order up to date, and write the receipt."""
        from latentmake.training.external.musubi.launch import train

        train(order, log=log, receipt=receipt, processes=processes, threads=threads)

    def publication_findings(self, order: MusubiOrder, memory: Memory) -> Iterable[Finding]:
        """Check what would be published."""
        from latentmake.training.external.musubi.publish import findings

        return findings(order, memory)

    def publish(self, order: Path, say: Say) -> None:
        """Bring the published folder of an order up to date."""
        from latentmake.training.external.musubi.publish import publish

        publish(self.read(order), say)
