"""sd-scripts as a backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from latentmake import digest
from latentmake.config.external_trainers import SdScriptsTrainer
from latentmake.config.root import Config
from latentmake.errors import UserError
from latentmake.index.memo import Memo
from latentmake.models.checks import ModelFile
from latentmake.plan.manifest import rows_of
from latentmake.training.backend import Finding, Say, image_findings
from latentmake.training.external.backend import Launched
from latentmake.training.external.installation import Installation, flags
from latentmake.training.external.order import (
    Resume,
    depends_on_length,
    fields_of,
    files_digests,
    with_defaults,
)
from latentmake.training.external.publish import Publication
from latentmake.training.external.sdscripts.command import epochs_of, local_arguments, model_files
from latentmake.training.external.sdscripts.deploy import deploy, deployed
from latentmake.training.external.sdscripts.order import SdScriptsOrder, find
from latentmake.training.order import RunFiles

_WEIGHTS = (".safetensors", ".bin", ".ckpt")


class SdScripts(Launched[SdScriptsOrder]):
    """The trainer `sdscripts`."""

    name = "sd-scripts"
    order_type = SdScriptsOrder
    memory_hint = "try gradient_checkpointing, a smaller train_batch_size or a smaller resolution"

    def order(self, config: Config, run: str) -> SdScriptsOrder:
        trainer = config.runs[run].trainer
        assert isinstance(trainer, SdScriptsTrainer) and config.sd_scripts is not None
        fields = fields_of(config, run)
        row = fields["model"].spec.strategies
        return SdScriptsOrder(
            **fields,
            **with_defaults(trainer, row.recommended(trainer.script or row.scripts[0])),
            sd_scripts=config.sd_scripts,
        )

    def weights_digest(self, order: SdScriptsOrder, file_digest: Callable[[Path], str]) -> str:
        place = order.model.checkpoint or ""
        files = [path := Path(place)]
        if path.is_dir():
            files = sorted(each for each in path.rglob("*") if each.suffix in _WEIGHTS)
        return digest.of_value(files_digests("checkpoint", place, files, file_digest))

    def find(self, order: SdScriptsOrder, memory: Memo | None = None) -> Installation:
        return find(order.script, order.sd_scripts, memory)

    def models(self, order: SdScriptsOrder, *, quick: bool) -> list[ModelFile]:
        """Return the checkpoint, inspected, and encoders that cannot be read."""
        return [*model_files(order)]

    def data_findings(self, order: SdScriptsOrder) -> Iterator[Finding]:
        """Check images, captions and caches, and that no two share a name."""
        what = "images and caches"
        try:
            images = [row.source for row in rows_of(Path(order.manifest))]
            files = deployed(order)
        except UserError as error:
            yield Finding(what, "failed", str(error))
            return
        if not images:
            yield Finding(what, "failed", "no item is left to train on")
        else:
            yield Finding(what, "ok", f"{len(images)} items, {len(files)} files")
            yield from image_findings(images)

    def job_findings(self, order: SdScriptsOrder) -> Iterator[Finding]:
        """Check all that a training needs, in its job; deployment looks at the data."""
        yield from self.preflight(order)

    def program_findings(
        self,
        order: SdScriptsOrder,
        program: Installation,
        models: Sequence[ModelFile],
        *,
        quick: bool,
    ) -> Iterator[Finding]:
        if not program.sources.mentions('"image_size"'):
            note = f"{program.folder} may be too old to read sizes from metadata: update it"
            yield Finding("version", "warning", note)
        resume = Resume(Path("state")) if order.trainer.save_every_n_epochs else None
        yield flags(program, local_arguments(order, resume))
        counts = order.script.endswith("_network")  # notes in its states how far it came
        if resume and not counts and not self.can_resume(order, resume):
            note = (
                "the number of steps, or a learning rate that depends on it, cannot be kept: a "
                "killed training begins anew; set `max_train_epochs`, or `lr_scheduler: constant`"
            )
            yield Finding("resume", "warning", note)

    def packages(self, order: SdScriptsOrder, program: Installation) -> set[str]:
        needs = super().packages(order, program)
        needs |= {"xformers"} if order.trainer.attention == "xformers" else set()
        return needs | ({"deepspeed"} if order.trainer.deepspeed else set())

    def deploy(self, order: SdScriptsOrder, files: RunFiles, say: Say) -> None:
        """Link images and caches into the folder that sd-scripts reads."""
        folder = files.output / "sdscripts"
        changes = deploy(order, folder)
        say(
            f"{order.run}: {folder}: {changes.linked} files linked, {changes.copied} written, "
            f"{changes.unchanged} unchanged, {changes.removed} removed"
        )

    def epochs(self, order: SdScriptsOrder) -> int | None:
        return epochs_of(order)

    def can_resume(self, order: SdScriptsOrder, resume: Resume) -> bool:
        """Whether a training resumed from a state takes just the steps that are left.

        Scripts that train a LoRA note in a state how far it came, and count epochs on from the step
        that they are told; but the last epoch is then trained to its end, whatever the number of
        steps. Those that train a complete network count from one again, and cannot end at once.
        """
        trainer, epochs = order.trainer, epochs_of(order)
        if resume.counted:
            steps = trainer.max_train_steps or (epochs or 0) * resume.steps
            return 0 < resume.steps * resume.done < steps and steps % resume.steps == 0
        endless = not depends_on_length(trainer.arguments, trainer.lr_scheduler)
        return epochs is not None and resume.done < epochs and endless

    def command(self, order: SdScriptsOrder, program: Installation, resume: Resume) -> list[str]:
        script = program.script(program.program.script)
        return [str(script), *local_arguments(order, resume)]

    def result(self, order: SdScriptsOrder) -> str:
        return "network" if order.script in order.strategies.complete else "LoRA"

    def publication(self, order: SdScriptsOrder) -> Publication[SdScriptsOrder]:
        from latentmake.training.external.sdscripts.publish import SdScriptsPublication

        return SdScriptsPublication(order)
