"""Backend of an external trainer: a launched program with an environment of its own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from latentmake.config.root import Config
from latentmake.errors import ModelError, TrainingError
from latentmake.index.memo import Memo
from latentmake.models.checks import ModelFile
from latentmake.plan.facts import Facts
from latentmake.plan.run_plan import RunPlan
from latentmake.training.backend import (
    Backend,
    Finding,
    Say,
    accelerate_config,
    failed,
    model_finding,
    refuse_failed,
)
from latentmake.training.external.installation import Installation, environment, proven_commit
from latentmake.training.external.order import ExternalOrder, Resume, paths, reasons
from latentmake.training.external.publish import Publication
from latentmake.training.order import RunFiles, read_order

Order = TypeVar("Order", bound=ExternalOrder)


class Launched(Backend, Generic[Order]):
    """Backend of one external trainer; a subclass answers the questions that come first.

    Attributes:
        name: of the program.
        memory_hint: what to try when GPU memory runs out.
        beginning: of the names of a LoRA's tensors; "" where results have others.
    """

    name: ClassVar[str]
    order_type: type[Order]
    memory_hint: ClassVar[str]
    beginning: ClassVar[str] = ""
    publishes = True

    @abstractmethod
    def order(self, config: Config, run: str) -> Order:
        """Return the order of a run."""

    @abstractmethod
    def weights_digest(self, order: Order, file_digest: Callable[[Path], str]) -> str:
        """Return the digest of the networks that are trained; raises ModelError."""

    @abstractmethod
    def find(self, order: Order, memory: Memo | None = None) -> Installation:
        """Find the program; raises TrainingError."""

    @abstractmethod
    def models(self, order: Order, *, quick: bool) -> Sequence[ModelFile]:
        """Return the model's files, inspected; see `program_findings`."""

    @abstractmethod
    def data_findings(self, order: Order) -> Iterable[Finding]:
        """Check the items and caches of an up-to-date manifest."""

    @abstractmethod
    def program_findings(
        self,
        order: Order,
        program: Installation,
        models: Sequence[ModelFile],
        *,
        quick: bool,
    ) -> Iterable[Finding]:
        """Check settings against the program's sources.

        With `quick`, while planning, neither GPU nor disk space is looked for.
        """

    def packages(self, order: Order, program: Installation) -> set[str]:
        """Return the packages that the settings need besides those that its script imports."""
        eight_bit = order.trainer.optimizer_type.lower().endswith("8bit")
        return {"bitsandbytes"} if eight_bit and program.sources.mentions("bitsandbytes") else set()

    @abstractmethod
    def deploy(self, order: Order, files: RunFiles, say: Say) -> None:
        """Write what the program reads besides the caches."""

    @abstractmethod
    def epochs(self, order: Order) -> int | None:
        """Return the epochs of a training; None where steps end it."""

    @abstractmethod
    def can_resume(self, order: Order, resume: Resume) -> bool:
        """Whether a training resumed from a state takes just the steps that are left."""

    @abstractmethod
    def command(self, order: Order, program: Installation, resume: Resume) -> list[str]:
        """Return the training script and its arguments; all paths are absolute."""

    def result(self, order: Order) -> str:
        """Return what is trained, in a word."""
        del order
        return "LoRA"

    @abstractmethod
    def publication(self, order: Order) -> Publication[Order]:
        """Return the published folder of a run; a ConfigError says that a key is missing."""

    def plan(self, facts: Facts, plan: RunPlan, *, train: bool) -> None:
        """Write the order of a run, and decide whether it is to be trained."""
        order = self.order(facts.config, plan.name)
        plan.trainer, plan.trainer_order = order, order.path
        if not facts.asks:
            order.write()

        def weights() -> str:
            return self.weights_digest(order, facts.memo.digest_of_file)

        if order.trained:
            found = [] if plan.lock else plan.outdated
            plan.reasons = [*found, *reasons(order, plan.lock, weights)]
        if plan.reasons:
            plan.note = order.described()
            if train:
                self.refuse(order, facts.memo)

    def refuse(self, order: Order, memory: Memo) -> None:
        """Refuse a training that lacks something, before its caches are made; raises UserError."""
        models = self.models(order, quick=True)
        for file in models:
            if file.fault:
                where = f"models.{order.model_name}.{file.key}"
                fault = f"{file.place} {file.fault}".strip()
                raise ModelError(fault, where=where, hint="name the right file")
        refuse_failed(self.preflight(order, memory, models=models, quick=True))

    def preflight(
        self,
        order: Order,
        memory: Memo | None = None,
        *,
        models: Sequence[ModelFile] | None = None,
        quick: bool = False,
    ) -> Iterator[Finding]:
        """Check all that a training needs besides its data.

        Args:
            order: the run.
            memory: keeps what is found out about the program; None asks anew.
            models: the model's files, where they have been looked at already.
            quick: see `program_findings`; the program's commit is not looked at either.
        """
        if models is None:
            models = self.models(order, quick=quick)
        yield from map(model_finding, models)
        try:
            program = self.find(order, memory)
            note = program.note or str(program.script(program.program.script))
            yield Finding(self.name, "warning" if program.note else "ok", note)
            if not quick:
                yield proven_commit(program.program.section, program.folder)
            yield environment(program, self.packages(order, program))
        except TrainingError as error:
            yield Finding(self.name, "failed", str(error))
            return
        yield from self.program_findings(order, program, models, quick=quick)
        yield from paths(order.trainer.arguments, program.folder)
        yield from accelerate_config(order.trainer.accelerate_config)

    def job_findings(self, order: Order) -> Iterator[Finding]:
        """Check all that a training needs, in its job."""
        yield from self.data_findings(order)
        yield from self.preflight(order)

    def check(self, order: Order, *, current: bool) -> Iterator[Finding]:
        """Check what a run needs besides its caches."""
        if current:
            yield from self.data_findings(order)
        if not order.trained:
            return
        found = [*self.preflight(order)]
        if failed(found) and not order.publish.caches:  # its models may lie on the other machine
            found = [*self.publication(order).findings()]
        yield from found

    def train(self, order: Path, **options: Any) -> None:
        """Bring the trained weights of an order up to date; see `Backend.train`."""
        from latentmake.training.external.launch import train

        train(self, order, **options)

    def check_publication(self, facts: Facts, run: str) -> None:
        """Refuse a publication whose files the trainer would refuse."""
        publication = self.publication(self.order(facts.config, run))
        refuse_failed(publication.findings(facts.memo))

    def publish(self, order: Path, say: Say) -> None:
        """Bring the published folder of an order up to date."""
        self.publication(read_order(order, self.order_type)).publish(say)

    def order_publication(self, facts: Facts, run: str, manifest: Path) -> Path:
        """Write the order of a publication of the items of another manifest than the run's."""
        order = self.order(facts.config, run)
        return order.model_copy(update={"manifest": str(manifest)}).write()
