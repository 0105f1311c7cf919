"""Checks, before a start, that sd-scripts can read the files that it is given.

Sources: sd-scripts' library/train_util.py, sdxl_train_util.py and model_util.py, which read a
checkpoint, and the options of its scripts that name encoders.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from latentmake.base.errors import UserError
from latentmake.config import weights
from latentmake.models.checks import ModelFile
from latentmake.models.files import only_variant
from latentmake.models.headers import lack
from latentmake.training.external.sdscripts import deploy
from latentmake.training.external.sdscripts.order import SdScriptsOrder, encoder_places
from latentmake.training.findings import Finding, image_findings, of_faults
from latentmake.training.rows import rows_of

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
    place, title = Path(order.model.checkpoint or ""), order.architecture
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


def data_findings(order: SdScriptsOrder) -> Iterator[Finding]:
    """Check that the images and caches of a training exist and can be read."""
    what = "images and caches"
    try:
        rows = [*rows_of(Path(order.manifest))]
        files = deploy.deployed(order)
    except UserError as error:
        yield Finding(what, "failed", str(error))
        return
    sound = f"{len(rows)} items, {len(files)} files"
    yield of_faults(what, [] if rows else ["no item is left to train on"], sound)
    masked = {row.source for row in rows if order.datasets[row.dataset].alpha_mask}
    yield from image_findings((row.source for row in rows), masked)
