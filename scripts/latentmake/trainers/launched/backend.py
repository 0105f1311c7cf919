"""Backend of a launched trainer, a program with its own environment."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from latentmake.base.errors import ModelError, TrainingError
from latentmake.data.memo import Memo
from latentmake.models.inspection import ModelFile
from latentmake.plan.facts import Facts
from latentmake.plan.run_plan import RunPlan
from latentmake.runs.backend import Backend
from latentmake.runs.findings import (
    Finding,
    Say,
    accelerate_config,
    failed,
    gpu_findings,
    model_finding,
    passed,
    refuse_failed,
)
from latentmake.runs.order import RunFiles, read_order, taken_back
from latentmake.trainers.launched.installation import (
    Installation,
    environment_finding,
    flags,
    network_finding,
    proven_commit,
)
from latentmake.trainers.launched.order import ExternalOrder, Places, Resume
from latentmake.trainers.launched.publish import Publication, differing, publish

Order = TypeVar("Order", bound=ExternalOrder)


class Launched(Backend, Generic[Order]):
    """Backend of a launched trainer; each program has a subclass.

    Attributes:
        order_type: class of the program's orders.
        publication: class of the program's published folders.
        arguments: function that returns the arguments of the training script.
        deploy: function that writes the files that the program reads besides the caches.
    """

    order_type: type[Order]
    publication: type[Publication[Order]]
    arguments: Callable[[Order, Places, str, Resume], list[str]]
    deploy: Callable[[Order], object]
    publishes = True

    @abstractmethod
    def models(self, order: Order, *, quick: bool) -> Sequence[ModelFile]:
        """Return the inspected files of the model; with `quick` only the networks to train."""

    @abstractmethod
    def data_findings(self, order: Order) -> Iterable[Finding]:
        """Check the items and caches of an up-to-date manifest."""

    def pass_checks(self, order: Order, say: Say) -> None:
        """Check everything that a training needs, and say the findings; raises TrainingError."""
        passed([*self.data_findings(order), *self.preflight(order)], say)

    def program_findings(
        self, order: Order, program: Installation, models: Sequence[ModelFile]
    ) -> Iterable[Finding]:
        """Check settings against the program, and the program's needs against this machine."""
        return ()

    def attention(self, order: Order, program: Installation) -> str:
        """Return the attention to use on this machine."""
        return order.trainer.attention

    def command(self, order: Order, program: Installation, resume: Resume) -> list[str]:
        """Return the training script and its arguments, with absolute paths."""
        attention = self.attention(order, program)
        return [str(program.training), *self.arguments(order, order.places, attention, resume)]

    def plan(self, facts: Facts, plan: RunPlan, *, train: bool) -> None:
        order, unread = self.order_type.of_run(facts.config, plan.name), ""
        order, forced = order.force(facts.forced)
        if order.trained and (train or RunFiles(order).finished.record.is_file()):
            try:
                order = order.with_weights(facts.memo.digest_of_file)
            except ModelError as error:
                unread = str(error)  # a reason of the plan; the checklist reports it, too
        plan.trainer, plan.trainer_order = order, order.path
        if not facts.read_only:
            self.write(order)
        if order.trained:
            outdated = [] if plan.lock else plan.outdated
            plan.reasons = [*forced, *outdated, *order.reasons(plan.lock, unread)]
        if plan.reasons:
            plan.note = order.described()
            if plan.lock and order.weights and not forced:
                files = RunFiles(order)
                if files.holder(order.wanted(plan.lock)) not in (None, files):
                    plan.note = taken_back(plan.name)
            if train:
                refuse_failed(self.preflight(order, facts.memo, quick=True))

    def preflight(
        self, order: Order, memory: Memo | None = None, *, quick: bool = False
    ) -> Iterator[Finding]:
        """Check everything that a training needs besides its data.

        Args:
            order: order of the run.
            memory: memo of facts about the program; None keeps them in memory only.
            quick: whether to skip the encoders and the program's commit, as planning does.
        """
        models = self.models(order, quick=quick)
        yield from map(model_finding, models)
        try:
            program = order.find(memory)
            note = program.note or str(program.training)
            yield Finding(order.name, "warning" if program.note else "ok", note)
            if not quick:
                yield proven_commit(order.section, program.folder)
            yield environment_finding(program, order.packages)
            if order.trainer.network_module is not None:
                yield network_finding(program, order.trainer.network_module)
        except TrainingError as error:
            yield Finding(order.name, "failed", str(error))
            return
        yield from self.program_findings(order, program, models)
        saves = order.trainer.save_every_n_epochs is not None
        resume = Resume(Path("state") if saves else None)
        yield flags(program, self.command(order, program, resume))
        if saves and not order.counts and not order.can_resume(resume):
            note = (
                "a killed training begins anew, unless its states say how far it came: its end or "
                "its learning rate depends on the number of steps; set `max_train_epochs` and a "
                "constant LR scheduler"
            )
            yield Finding("resume", "warning", note)
        yield from accelerate_config(order.trainer.accelerate_config)

    def check(self, order: Order, *, current: bool) -> Iterator[Finding]:
        if current:
            yield from self.data_findings(order)
        if not order.trained:
            return
        findings = [*self.preflight(order)]
        # Without published caches the models may exist only on the machine that trains: then the
        # checks of a publication apply.
        if failed(findings) and not order.publish.caches:
            findings = [*self.publication(order).findings()]
        yield from findings
        yield from gpu_findings(here=False)

    def train(self, order: Path, **options: Any) -> None:
        # Imported here, because planning needs nothing of it.
        from latentmake.trainers.launched.launch import train

        train(self, order, **options)

    def check_publication(self, facts: Facts, run: str) -> None:
        publication = self.publication(self.order_type.of_run(facts.config, run))
        refuse_failed(publication.findings(facts.memo))

    def publish(self, order: Path, say: Say) -> None:
        publish(self.publication(read_order(order, self.order_type)), say)

    def unpublished(self, facts: Facts, run: str, manifest: Path) -> Iterable[tuple[str, str]]:
        order = self.order_type.of_run(facts.config, run)
        order = order.model_copy(update={"manifest": str(manifest)})
        return differing(self.publication(order))

    def order_publication(self, facts: Facts, run: str, manifest: Path) -> Path:
        order = self.order_type.of_run(facts.config, run)
        order = order.model_copy(update={"manifest": str(manifest)})
        return order.path if facts.read_only else order.write()
