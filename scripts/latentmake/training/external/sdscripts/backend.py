"""The trainer `sdscripts`: its folder, its command, and checks of what sd-scripts would refuse."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from latentmake.config import weights
from latentmake.errors import UserError
from latentmake.models.checks import ModelFile
from latentmake.models.headers import lack
from latentmake.plan.manifest import rows_of
from latentmake.training.backend import Finding, image_findings
from latentmake.training.external.backend import Launched
from latentmake.training.external.sdscripts import deploy
from latentmake.training.external.sdscripts.order import (
    SdScriptsOrder,
    encoder_places,
    training_arguments,
)


class SdScripts(Launched[SdScriptsOrder]):
    """The trainer `sdscripts`."""

    order_type = SdScriptsOrder
    publication = deploy.SdScriptsPublication
    arguments = staticmethod(training_arguments)

    def models(self, order: SdScriptsOrder, *, quick: bool) -> list[ModelFile]:
        """Return the checkpoint, inspected, and encoders that cannot be read."""
        return [*model_files(order)]

    def data_findings(self, order: SdScriptsOrder) -> Iterator[Finding]:
        what = "images and caches"
        try:
            images = [row.source for row in rows_of(Path(order.manifest))]
            files = deploy.deployed(order)
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

    def deploy(self, order: SdScriptsOrder) -> None:
        deploy.deploy(order)


def model_files(order: SdScriptsOrder) -> Iterator[ModelFile]:
    """Yield the checkpoint, inspected, and the encoders that a script cannot be given."""
    yield ModelFile("checkpoint", order.model.checkpoint or "", fault=_checkpoint_fault(order))
    keys = {file.flag: file.key for file in order.strategies.files}
    needed = order.strategies.insists or order.trainer.samples.prompts
    for flag, path in encoder_places(order).items() if needed else ():
        place = Path(path)
        if not (place.is_file() or (flag in order.strategies.folders and place.is_dir())):
            fault = f"is no file: name one, or add [{flag}, FILE] to the trainer's `arguments`"
            yield ModelFile(keys[flag], path, fault=fault)


def _checkpoint_fault(order: SdScriptsOrder) -> str:
    place, title = Path(order.model.checkpoint or ""), order.architecture
    if not place.exists():
        return weights.absence(place)
    if not (place.is_file() or place.is_dir()):
        return "is no regular file"
    if place.is_dir() and order.model.spec.single_file:
        hint = "name the .safetensors file of the original release"
        return f"is a folder, and sd-scripts reads {title} from one file: {hint}"
    if place.suffix != ".safetensors":
        return ""
    return lack(place, order.strategies.marks, f"network of {title}")
