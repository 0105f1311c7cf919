"""Backend of the trainer `sdscripts`, with checks of its files, and publication of its runs.

Sources of the checks: sd-scripts' library/train_util.py, sdxl_train_util.py and model_util.py,
which read a checkpoint, and the options of its scripts that name encoders.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic_core import from_json

from latentmake.config import weights
from latentmake.config.root import Config
from latentmake.models.files import only_variant
from latentmake.models.headers import lack
from latentmake.models.inspection import ModelFile
from latentmake.runs.findings import Finding, parameterization_findings
from latentmake.trainers.launched.backend import Launched
from latentmake.trainers.launched.order import Resume
from latentmake.trainers.launched.publish import Call, Files, Kind, Names, Publication
from latentmake.trainers.sdscripts import deploy
from latentmake.trainers.sdscripts.order import (
    SdScriptsOrder,
    encoder_places,
    training_arguments,
)

_PARTS = ("unet", "vae", "text_encoder", "text_encoder_2")  # folders it reads from a pipeline


def model_files(order: SdScriptsOrder, *, makes_caches: bool = False) -> Iterator[ModelFile]:
    """Yield the inspected checkpoint, and the encoders that a script cannot read.

    With `makes_caches` the script makes the caches, too: then the VAE is yielded, and all encoders
    are needed.
    """
    yield ModelFile("checkpoint", order.model.checkpoint or "", fault=_checkpoint_fault(order))
    keys = {file.flag: file.key for file in order.strategies.files}
    if makes_caches and "vae" not in keys.values():
        yield ModelFile("vae", order.model.vae.path or "")
    needed = makes_caches or order.strategies.insists or order.trainer.samples.prompts
    for flag, path in encoder_places(order).items() if needed else ():
        place = Path(path)
        if not (place.is_file() or (flag in order.strategies.folders and place.is_dir())):
            fault = f"is no file: name one, or add [{flag}, FILE] to the trainer's `arguments`"
            yield ModelFile(keys[flag], path, fault=fault)


def _checkpoint_fault(order: SdScriptsOrder) -> str:
    place, title = Path(order.model.checkpoint or ""), order.strategies.name
    if not place.exists():
        return weights.absence(place)
    if place.is_dir() and order.model.spec.single_file:
        hint = "name the .safetensors file of the original release"
        return f"is a folder, and sd-scripts reads {title} from one file: {hint}"
    if place.is_dir():
        variants = {*filter(None, (only_variant(place / part) for part in _PARTS))}
        if order.trainer.mixed_precision == order.strategies.variant:
            variants.discard(str(order.strategies.variant))
        if not variants:
            return ""
        what = f"holds only the variant {min(variants)} of its weights, which sd-scripts "
        return f"{what}does not read: rename the files without it"
    if place.suffix != ".safetensors":
        return ""
    return lack(place, order.strategies.marks, f"network of {title}")


class SdScriptsPublication(Publication[SdScriptsOrder]):
    """Published folder of a run, with the same layout as the folder of a training here."""

    attentions = ("sdpa", "xformers", "mem_eff_attn")

    def models(self) -> Iterator[ModelFile]:
        return model_files(self.order, makes_caches=not self.order.publish.caches)

    def members(self) -> Files:
        caches = self.order.publish.caches
        listings: dict[str, deploy.Directory] = {names.system: names.below for names in self.names}
        return deploy.deployed(self.order, caches=caches, named=self.block, listings=listings)

    def dataset(self, names: Names) -> str:
        return deploy.dataset_toml(self.order, names.below, names.system, self.block)

    def calls(self, names: Names) -> list[Call]:
        training = training_arguments(self.order, names.places, self.attention, Resume())
        return [(f"{self.order.script}.py", training)]

    def settings(self, dataset: str, size: tuple[int, int]) -> dict[Kind, Any]:
        order, model = self.order, self.order.model
        shapes = [deploy.buckets_of(order, dataset), order.datasets[dataset].alpha_mask]
        vae = model.vae.path or [model.vae.hub, model.vae.revision]
        settings: dict[Kind, Any] = {"latents": [vae, model.vae_dtype or model.dtype, shapes]}
        if model.spec.caches_text:
            places = [model.checkpoint, encoder_places(order)]
            further = [model.max_token_length, model.apply_lg_attn_mask, model.apply_t5_attn_mask]
            settings["text"] = [places, further, model.text[-1].max_length]
        return settings

    def edited(
        self, base: str, old: Path, new: Path | bytes | None
    ) -> Iterator[tuple[str, Sequence[Kind]]]:
        if base.endswith(deploy.CAPTION):  # only held-out items have a caption file
            yield base.removesuffix(deploy.CAPTION), ["text"]
            return
        if base != deploy.METADATA:
            yield str(PurePosixPath(base).with_suffix("")), ["latents"]
            return
        before, after = _captions(old), _captions(new)
        for image in before | after:
            if before.get(image) != after.get(image):
                yield str(PurePosixPath(image).with_suffix("")), ["text"]


def _captions(metadata: Path | bytes | None) -> dict[str, str]:
    """Return image -> caption; an empty dict if the file is missing or damaged."""
    try:
        data = metadata.read_bytes() if isinstance(metadata, Path) else metadata or b""
        return {image: entry["caption"] for image, entry in from_json(data).items()}
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return {}


class SdScripts(Launched[SdScriptsOrder]):
    """Backend of the trainer `sdscripts`."""

    order_type = SdScriptsOrder
    publication = SdScriptsPublication
    arguments = staticmethod(training_arguments)
    data_findings = staticmethod(deploy.data_findings)
    deploy = staticmethod(deploy.deploy)

    def models(self, order: SdScriptsOrder, *, quick: bool) -> list[ModelFile]:
        """Return the inspected checkpoint, and encoders that a script cannot read."""
        return [*model_files(order)]

    def check_network(self, config: Config, run: str) -> str:
        """Return the prediction type of a network; "" if it needs no key of the trainer."""
        prediction = self.order_type.of_run(config, run).parameterization(keys=False)
        return str(prediction) if prediction and prediction.told else ""

    def check(self, order: SdScriptsOrder, *, current: bool) -> Iterator[Finding]:
        """Check everything that a training needs, and report what the network predicts."""
        yield from super().check(order, current=current)
        if order.model.spec.encodes:
            prediction = partial(order.parameterization, "trainer")
            yield from parameterization_findings(order.model, lambda keys: prediction(keys=keys))
