"""Checklist of a training: what its settings, networks and images lack.

A finding is `failed` where the training would surely end or learn from the wrong files, `warning`
where that depends. Nothing here imports torch or reads tensors: planning runs these checks too.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Container, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Literal, NamedTuple

from latentmake.caches.gpu import emulates_bfloat16, visible
from latentmake.config.architectures import ARCHITECTURES
from latentmake.config.models import Model
from latentmake.config.trainers import LoopTrainer
from latentmake.errors import ModelError, SourceError, TrainingError
from latentmake.files.media import opened, opened_image
from latentmake.files.metadata import orientation
from latentmake.models.checks import ModelFile
from latentmake.models.parameterization import Parameterization, scale_of

Say = Callable[[str], None]
Verdict = Literal["ok", "warning", "failed"]

_SHOWN = 3  # faults or images of one check that are named


class Finding(NamedTuple):
    """One line of the checklist: subject, verdict, reason."""

    what: str
    verdict: Verdict
    note: str


def checklist(findings: Iterable[Finding], shown: Callable[[str], str] = str) -> str:
    """Return the checklist as a table, a verdict each, as it is to be `shown`."""
    from tabulate import tabulate  # which the environment of encoding lacks

    return tabulate(
        [[each.what, shown(each.verdict), each.note] for each in findings],
        headers=["checked", "verdict", "note"],
        disable_numparse=True,
        colalign=["left"] * 3,
    )


def model_finding(file: ModelFile) -> Finding:
    """Return the finding of one of a model's files."""
    verdict: Verdict = "failed" if file.fault else "warning" if file.doubt else "ok"
    note = ": ".join(filter(None, (file.place, file.fault or file.doubt or file.description)))
    return Finding(f"model: {file.key}", verdict, note)


def parameterization_findings(
    model: Model, asked: Callable[[bool], Parameterization | None]
) -> Iterator[Finding]:
    """Tell what a network predicts, by which schedule, and at which scale its latents lie.

    `asked` returns the first two, by the user's keys or by the model's files alone.
    """
    try:
        found, own = asked(True), None
        with contextlib.suppress(ModelError):  # files that need the keys
            own = asked(False)
        if found is not None and own is not None and found.schedule == own.schedule:
            found = own
        if found is not None:
            yield Finding("prediction", "warning" if found.against else "ok", str(found))
        if model.vae.hub is None:
            scale = scale_of(model)
            others = {row.scaling_factor for row in ARCHITECTURES.values()}
            foreign = model.spec.scaling_factor not in (None, scale.scaling_factor)
            note = f"factor {scale.scaling_factor:g}, shift {scale.shift_factor:g} ({scale.source})"
            if foreign and scale.scaling_factor in others:
                note += f", but those of {model.title} have the factor {model.spec.scaling_factor}"
            yield Finding("latents", "warning" if " but " in note else "ok", note)
    except ModelError as error:
        yield Finding("prediction", "failed", str(error))


def failed(findings: Iterable[Finding]) -> bool:
    """Whether any finding has failed."""
    return any(finding.verdict == "failed" for finding in findings)


def refuse_failed(findings: Iterable[Finding]) -> None:
    """Refuse if a finding has failed; the TrainingError names all that have."""
    lines = [f"{each.what}: {each.note}" for each in findings if each.verdict == "failed"]
    if lines:
        raise TrainingError(f"{len(lines)} failed in the checklist: {' | '.join(lines)}")


def of_faults(what: str, faults: Iterable[str], sound: str) -> Finding:
    """Return a finding that has failed if there are faults; the first ones are named."""
    found = list(faults)
    if not found:
        return Finding(what, "ok", sound)
    rest = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return Finding(what, "failed", "; ".join(found[:_SHOWN]) + rest)


def accelerate_config(path: str | None) -> Iterator[Finding]:
    """Check that accelerate's configuration file exists, where one is set."""
    if path is not None and not Path(path).is_file():
        yield Finding(
            "accelerate_config", "failed", f"{path} does not exist: correct `accelerate_config`"
        )


def image_findings(paths: Iterable[str], alpha: Container[str] = ()) -> Iterator[Finding]:
    """Warn of images that musubi-tuner and sd-scripts read otherwise than a viewer does.

    Pillow's conversion to RGB, which both call, cuts 16-bit greyscale off at 255, and drops the
    alpha channel. `alpha` are images whose alpha channel they read.
    """
    turned, clear, white = 0, 0, []
    for path in paths:
        with (
            contextlib.suppress(SourceError),  # said elsewhere
            opened(path) as file,
            opened_image(file, path, None) as image,
        ):
            white += [path] * image.mode.startswith("I")
            clear += image.has_transparency_data and path not in alpha
            # Pillow turns a TIFF itself, and the EXIF of a PNG may follow its pixels.
            turned += image.format != "TIFF" and orientation(image, decodes=False) > 1
    if turned:
        note = f"{turned} images are stored turned (EXIF), and are trained on as they are stored"
        yield Finding("EXIF orientation", "warning", note)
    if clear:
        many = "1 image has" if clear == 1 else f"{clear} images have"
        note = f"{many} an alpha channel, which is dropped: what is transparent gets the colour "
        yield Finding("transparency", "warning", f"{note}stored under it, often black")
    if white:
        many = "1 image is" if len(white) == 1 else f"{len(white)} images are"
        names = ", ".join(white[:_SHOWN]) + ", ..." * (len(white) > _SHOWN)
        note = f"{many} 16-bit greyscale, of which nearly every pixel becomes white: {names}"
        yield Finding("16-bit images", "warning", f"{note}; save with 8 bits")


def passed(findings: Iterable[Finding], say: Callable[[str], object]) -> None:
    """Show a checklist, and refuse if a finding has failed; see `refuse_failed`."""
    found = list(findings)
    say(checklist(found))
    refuse_failed(found)


def check_settings(
    trainer: LoopTrainer, *, here: bool = True, local: bool = True
) -> Iterator[Finding]:
    """Check files that the settings need, and this machine if it trains.

    Args:
        trainer: the settings.
        here: whether it is trained in this environment.
        local: whether it is trained on this machine, not on one of a cluster.
    """
    lacks = here and trainer.optimizer == "adamw8bit" and find_spec("bitsandbytes") is None
    faults = ["bitsandbytes is not installed, which these settings need"] if lacks else []
    yield of_faults("environment", faults, "has what these settings need")
    yield from accelerate_config(trainer.accelerate_config)
    if local and sys.platform == "linux":
        yield from _precision(trainer.mixed_precision)


def gpu_findings(*, here: bool = True) -> Iterator[Finding]:
    """Note that this machine has no GPU to train on, unless it belongs to a cluster.

    `here`: whether torch of this environment trains, whose build may know no GPU.
    """
    if sys.platform != "linux" or visible() or which("sbatch") is not None:
        return
    note = "no GPU was found"
    if here and not _torch_knows_gpus():
        note += ", and torch is built without CUDA"
    yield Finding("GPU", "warning", f"{note}: training will be slow")


def _torch_knows_gpus() -> bool:
    """Return whether the build of torch has CUDA or ROCm; torch is not imported."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    with contextlib.suppress(OSError):
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
        return bool(re.search(r"^(cuda|hip)\b.*= *['\"]", text, re.MULTILINE))
    return True


def _precision(name: str) -> Iterator[Finding]:
    """Check that this machine computes in a precision; on a CPU accelerate refuses float16."""
    what, hint = "mixed precision", "or leave it out: `auto` chooses"
    if name == "fp16" and not visible() and which("sbatch") is None:
        note = f"fp16 needs a GPU, and this machine has none: set `mixed_precision: bf16`, {hint}"
        yield Finding(what, "failed", note)
    if name == "bf16" and emulates_bfloat16():
        note = f"this GPU only emulates bf16, which is slow: set `mixed_precision: fp16`, {hint}"
        yield Finding(what, "warning", note)
