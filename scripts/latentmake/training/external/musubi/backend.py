"""musubi-tuner as a backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from latentmake import digest
from latentmake.config.external_trainers import MusubiTrainer
from latentmake.config.root import Config
from latentmake.errors import TrainingError
from latentmake.files import atomic
from latentmake.index.memo import Memo
from latentmake.models.checks import ModelFile
from latentmake.models.files import scripted_files
from latentmake.training.backend import Say
from latentmake.training.external.backend import Launched
from latentmake.training.external.installation import Installation
from latentmake.training.external.musubi import checks
from latentmake.training.external.musubi.checks import model_files, networks
from latentmake.training.external.musubi.command import local_arguments, pick_attention
from latentmake.training.external.musubi.deploy import deploy, training_toml
from latentmake.training.external.musubi.order import DEPLOYED, MusubiOrder, find
from latentmake.training.external.order import (
    Resume,
    depends_on_length,
    fields_of,
    files_digests,
    with_defaults,
)
from latentmake.training.external.publish import Publication
from latentmake.training.order import RunFiles


class Musubi(Launched[MusubiOrder]):
    """The trainer `musubi`."""

    name = "musubi-tuner"
    order_type = MusubiOrder
    data_findings = staticmethod(checks.data_findings)
    program_findings = staticmethod(checks.program_findings)
    beginning = "lora_unet_"  # in each of its modules networks/lora*.py
    memory_hint = "try fp8_base, a smaller resolution, or `arguments: [--blocks_to_swap, 20]`"

    def order(self, config: Config, run: str) -> MusubiOrder:
        """Return the order of a run; of one without `trainer` that of a publication alone."""
        trainer, fields = config.runs[run].trainer, fields_of(config, run)
        settings = trainer if isinstance(trainer, MusubiTrainer) else MusubiTrainer(kind="musubi")
        return MusubiOrder(
            **fields,
            **with_defaults(settings, fields["model"].spec.scripts.settings),
            trained=trainer is not None,
            musubi_tuner=config.musubi_tuner,
        )

    def weights_digest(self, order: MusubiOrder, file_digest: Callable[[Path], str]) -> str:
        found = []
        for key, place in (
            ("dit", order.model.dit),
            ("dit_high_noise", order.model.dit_high_noise),
        ):
            if place is not None:
                found.append(files_digests(key, place, _files(order, Path(place)), file_digest))
        return digest.of_value(found)

    def find(self, order: MusubiOrder, memory: Memo | None = None) -> Installation:
        if order.musubi_tuner is None:
            note = "the configuration does not say where it lies: set `musubi_tuner.path`"
            raise TrainingError(note)
        return find(order.musubi_tuner, order.scripts, memory)

    def models(self, order: MusubiOrder, *, quick: bool) -> Sequence[ModelFile]:
        """Return the model's files; while planning without the encoders, which recipes look at."""
        return [*(networks(order.model) if quick else model_files(order.model))]

    def deploy(self, order: MusubiOrder, files: RunFiles, say: Say) -> None:
        """Write the dataset TOML, and link the caches of items with several texts."""
        if (changes := deploy(order)) is not None:
            say(
                f"{order.run}: {files.output / DEPLOYED}: {changes.linked} files linked, "
                f"{changes.copied} written, {changes.unchanged} unchanged, "
                f"{changes.removed} removed"
            )
        atomic.write(files.output / "dataset.toml", training_toml(order).encode())

    def epochs(self, order: MusubiOrder) -> int:
        return order.trainer.max_train_epochs

    def can_resume(self, order: MusubiOrder, resume: Resume) -> bool:
        return resume.counted or not depends_on_length(order.trainer.arguments)

    def command(self, order: MusubiOrder, program: Installation, resume: Resume) -> list[str]:
        attention = pick_attention(order.trainer.attention, program, among=order.attentions)
        if resume.state is not None and not resume.counted:
            # Checked already: a copy only, with fewer epochs. With none, it writes its LoRA.
            left = max(0, order.trainer.max_train_epochs - resume.done)
            trainer = order.trainer.model_copy(update={"max_train_epochs": left})
            order = order.model_copy(update={"trainer": trainer})
        arguments = local_arguments(order, attention=attention, resume=resume.state)
        return [str(program.script(order.scripts.training.name)), *arguments]

    def publication(self, order: MusubiOrder) -> Publication[MusubiOrder]:
        from latentmake.training.external.musubi.publish import MusubiPublication

        return MusubiPublication(order)


def _files(order: MusubiOrder, path: Path) -> list[Path]:
    """Return the files of a network: those of a folder, or the shards that one file stands for."""
    if path.is_dir():
        return sorted(path.glob("*.safetensors"))
    if order.model.architecture is None:  # one file, as in all records of Wan
        return [path]
    return scripted_files(path)
