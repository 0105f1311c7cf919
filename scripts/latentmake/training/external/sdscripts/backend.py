"""The trainer `sdscripts`: publication, and checks of what sd-scripts would refuse."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic_core import from_json

from latentmake.config import weights
from latentmake.config.root import Config
from latentmake.errors import UserError
from latentmake.models.checks import ModelFile
from latentmake.models.files import only_variant
from latentmake.models.headers import lack
from latentmake.plan.manifest import rows_of
from latentmake.training.backend import (
    Finding,
    image_findings,
    of_faults,
    parameterization_findings,
)
from latentmake.training.external.backend import Launched
from latentmake.training.external.order import Resume
from latentmake.training.external.publish import Call, Files, Kind, Names, Publication
from latentmake.training.external.sdscripts import deploy
from latentmake.training.external.sdscripts.order import (
    SdScriptsOrder,
    encoder_places,
    training_arguments,
)


class SdScriptsPublication(Publication[SdScriptsOrder]):
    """The published folder of a run; it looks like that of a training here."""

    attentions = ("sdpa", "xformers", "mem_eff_attn")

    def models(self) -> Iterator[ModelFile]:
        return model_files(self.order, makes=not self.order.publish.caches)

    def members(self) -> Files:
        files = deploy.deployed(self.order, caches=self.order.publish.caches)
        for each in self.names:
            files |= deploy.listings(self.order, files, each.below, each.system)
        return files

    def dataset(self, names: Names) -> str:
        return deploy.dataset_toml(self.order, names.below, names.system)

    def calls(self, names: Names) -> list[Call]:
        training = training_arguments(self.order, names.places, self.attention, Resume())
        return [(f"{self.order.script}.py", training)]

    def settings(self, dataset: str, size: tuple[int, int]) -> dict[Kind, Any]:
        del size  # which sd-scripts finds in the names of its caches
        order, model = self.order, self.order.model
        shapes = [deploy.buckets_of(order, dataset), order.datasets[dataset].alpha_mask]
        vae = model.vae.path or [model.vae.hub, model.vae.revision]
        found: dict[Kind, Any] = {"latents": [vae, model.vae_dtype or model.dtype, shapes]}
        if order.cached_text:
            places = [model.checkpoint, encoder_places(order)]
            further = [model.max_token_length, model.apply_lg_attn_mask, model.apply_t5_attn_mask]
            found["text"] = [places, further, model.text[-1].max_length]
        return found

    def edited(
        self, base: str, old: Path, new: Path | bytes | None
    ) -> Iterator[tuple[str, Sequence[Kind]]]:
        if base != deploy.METADATA:
            yield str(PurePosixPath(base).with_suffix("")), ["latents"]
            return
        before, after = _captions(old), _captions(new)
        for image in before | after:
            if before.get(image) != after.get(image):
                yield str(PurePosixPath(image).with_suffix("")), ["text"]


def _captions(metadata: Path | bytes | None) -> dict[str, str]:
    """Return image -> caption; of a file that is missing or damaged, none."""
    try:
        data = metadata.read_bytes() if isinstance(metadata, Path) else metadata or b""
        return {image: entry["caption"] for image, entry in from_json(data).items()}
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return {}


class SdScripts(Launched[SdScriptsOrder]):
    """The trainer `sdscripts`."""

    order_type = SdScriptsOrder
    publication = SdScriptsPublication
    arguments = staticmethod(training_arguments)
    deploy = staticmethod(deploy.deploy)

    def models(self, order: SdScriptsOrder, *, quick: bool) -> list[ModelFile]:
        """Return the checkpoint, inspected, and encoders that cannot be read."""
        return [*model_files(order)]

    def check_network(self, config: Config, run: str) -> str:
        """Return what a network predicts, where it is not epsilon."""
        found = self.order_type.of_run(config, run).parameterization(keys=False)
        return str(found) if found and found.told else ""

    def check(self, order: SdScriptsOrder, *, current: bool) -> Iterator[Finding]:
        """Check what a training needs, and tell what the network predicts."""
        yield from super().check(order, current=current)
        if order.model.spec.encodes:
            asked = partial(order.parameterization, "trainer")
            yield from parameterization_findings(order.model, lambda keys: asked(keys=keys))

    def data_findings(self, order: SdScriptsOrder) -> Iterator[Finding]:
        what = "images and caches"
        try:
            images = [row.source for row in rows_of(Path(order.manifest))]
            files = deploy.deployed(order)
        except UserError as error:
            yield Finding(what, "failed", str(error))
            return
        sound = f"{len(images)} items, {len(files)} files"
        yield of_faults(what, [] if images else ["no item is left to train on"], sound)
        yield from image_findings(images)


_PARTS = ("unet", "vae", "text_encoder", "text_encoder_2")  # of a pipeline that it reads


def model_files(order: SdScriptsOrder, *, makes: bool = False) -> Iterator[ModelFile]:
    """Yield the checkpoint, inspected, and the encoders that a script cannot be given.

    `makes`: of a script that makes the caches, too; also its VAE.
    """
    yield ModelFile("checkpoint", order.model.checkpoint or "", fault=_checkpoint_fault(order))
    keys = {file.flag: file.key for file in order.strategies.files}
    if makes and "vae" not in keys.values():
        yield ModelFile("vae", order.model.vae.path or "")
    needed = makes or order.strategies.insists or order.trainer.samples.prompts
    for flag, path in encoder_places(order).items() if needed else ():
        place = Path(path)
        if not (place.is_file() or (flag in order.strategies.folders and place.is_dir())):
            fault = f"is no file: name one, or add [{flag}, FILE] to the trainer's `arguments`"
            yield ModelFile(keys[flag], path, fault=fault)


def _checkpoint_fault(order: SdScriptsOrder) -> str:
    place, title = Path(order.model.checkpoint or ""), order.architecture
    if not place.exists():
        return weights.absence(place)
    if place.is_dir() and order.model.spec.single_file:
        hint = "name the .safetensors file of the original release"
        return f"is a folder, and sd-scripts reads {title} from one file: {hint}"
    if place.is_dir():
        found = {*filter(None, (only_variant(place / part) for part in _PARTS))}
        if order.trainer.mixed_precision == order.strategies.variant:
            found.discard(str(order.strategies.variant))
        what = f"holds only the variant {min(found, default='')} of its weights, which sd-scripts "
        return f"{what}does not read: rename the files without it" if found else ""
    if place.suffix != ".safetensors":
        return ""
    return lack(place, order.strategies.marks, f"network of {title}")
