"""Checklist of a training: faults of its settings, networks and images.

A finding is `failed` if the training would certainly end with an error or learn from the wrong
files, and `warning` if it might. This module does not import torch or read tensors, because
planning runs these checks too.
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

from latentmake.base.errors import ModelError, SourceError, TrainingError
from latentmake.base.machine import counted
from latentmake.config.architectures import ARCHITECTURES
from latentmake.config.models import Model
from latentmake.config.trainers import LoopTrainer
from latentmake.encode.gpu import computes_bfloat16, visible
from latentmake.formats.media import opened, opened_image
from latentmake.formats.metadata import orientation
from latentmake.models.inspection import ModelFile
from latentmake.models.parameterization import Parameterization, scale_of

Say = Callable[[str], None]
Verdict = Literal["ok", "warning", "failed"]

_SHOWN = 3  # most faults or images that one finding names


class Finding(NamedTuple):
    """One line of the checklist.

    Attributes:
        what: subject of the check.
        verdict: result of the check.
        note: explanation of the verdict.
    """

    what: str
    verdict: Verdict
    note: str


def checklist(findings: Iterable[Finding], shown: Callable[[str], str] = str) -> str:
    """Return the checklist as a table; `shown` formats a verdict, for example in colour."""
    from tabulate import tabulate  # the environment of encoding does not have it

    return tabulate(
        [[finding.what, shown(finding.verdict), finding.note] for finding in findings],
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
    model: Model, read: Callable[[bool], Parameterization | None]
) -> Iterator[Finding]:
    """Yield findings about the network's prediction, noise schedule and scale of latents.

    Args:
        model: model of the run.
        read: returns prediction and schedule. With True, the user's keys count; with False, only
            the files of the model do.
    """
    try:
        used, own = read(True), None
        with contextlib.suppress(ModelError):  # files that say too little without the keys
            own = read(False)
        # Keys that change nothing are not shown as the source.
        if used is not None and own is not None and used.schedule == own.schedule:
            used = own
        if used is not None:
            yield Finding("prediction", "warning" if used.against else "ok", str(used))
        if model.vae.hub is None:
            factor, shift, source = scale_of(model)
            others = {row.scaling_factor for row in ARCHITECTURES.values()}
            foreign = model.spec.scaling_factor not in (None, factor)
            note = f"factor {factor:g}, shift {shift:g} ({source})"
            if foreign and factor in others:
                note += f", but those of {model.title} have the factor {model.spec.scaling_factor}"
            yield Finding("latents", "warning" if " but " in note else "ok", note)
    except ModelError as error:
        yield Finding("prediction", "failed", str(error))


def failed(findings: Iterable[Finding]) -> bool:
    """Whether any finding has failed."""
    return any(finding.verdict == "failed" for finding in findings)


def refuse_failed(findings: Iterable[Finding]) -> None:
    """Raise a TrainingError that names all failed findings, if there are any."""
    lines = [
        f"{finding.what}: {finding.note}" for finding in findings if finding.verdict == "failed"
    ]
    if lines:
        raise TrainingError(f"{len(lines)} failed in the checklist: {' | '.join(lines)}")


def of_faults(what: str, faults: Iterable[str], sound: str) -> Finding:
    """Return a finding, which is `failed` if there are faults, and names the first of them."""
    listed = list(faults)
    if not listed:
        return Finding(what, "ok", sound)
    rest = f"; and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return Finding(what, "failed", "; ".join(listed[:_SHOWN]) + rest)


def accelerate_config(path: str | None) -> Iterator[Finding]:
    """Check that accelerate's configuration file exists, if one is set."""
    if path is not None and not Path(path).is_file():
        yield Finding(
            "accelerate_config", "failed", f"{path} does not exist: correct `accelerate_config`"
        )


def image_findings(paths: Iterable[str], alpha: Container[str] = ()) -> Iterator[Finding]:
    """Warn about images that musubi-tuner and sd-scripts read differently from an image viewer.

    Both call Pillow's conversion to RGB. It cuts 16-bit greyscale off at 255 and drops the alpha
    channel.

    Args:
        paths: files of the images.
        alpha: images whose alpha channel the trainer reads.
    """
    turned, clear, white = 0, 0, []
    for path in paths:
        with (
            contextlib.suppress(SourceError),  # reported elsewhere
            opened(path) as file,
            opened_image(file, path, None) as image,
        ):
            if image.mode.startswith("I"):
                white.append(path)
            clear += image.has_transparency_data and path not in alpha
            # Pillow rotates a TIFF itself. EXIF after the pixels of a PNG is not read, because that
            # would decode the image.
            turned += image.format != "TIFF" and orientation(image, decodes=False) > 1
    if turned:
        note = f"{turned} images are stored turned (EXIF), and are trained on as they are stored"
        yield Finding("EXIF orientation", "warning", note)
    if clear:
        many = counted(clear, "image", "have")
        note = f"{many} an alpha channel, which is dropped: what is transparent gets the colour "
        yield Finding("transparency", "warning", f"{note}stored under it, often black")
    if white:
        many = counted(len(white), "image", "are")
        names = ", ".join(white[:_SHOWN]) + (", ..." if len(white) > _SHOWN else "")
        note = f"{many} 16-bit greyscale, of which nearly every pixel becomes white: {names}"
        yield Finding("16-bit images", "warning", f"{note}; save with 8 bits")


def passed(findings: Iterable[Finding], say: Callable[[str], object]) -> None:
    """Show a checklist, then raise a TrainingError if a finding has failed."""
    listed = list(findings)
    say(checklist(listed))
    refuse_failed(listed)


def check_settings(
    trainer: LoopTrainer, *, here: bool = True, local: bool = True
) -> Iterator[Finding]:
    """Check the files that the settings need, and this machine if it trains.

    Args:
        trainer: settings of the trainer.
        here: whether the training runs in this environment.
        local: whether the training runs on this machine, not on a node of a cluster.
    """
    lacks = here and trainer.optimizer == "adamw8bit" and find_spec("bitsandbytes") is None
    faults = ["bitsandbytes is not installed, which these settings need"] if lacks else []
    yield of_faults("environment", faults, "has what these settings need")
    yield from accelerate_config(trainer.accelerate_config)
    if local and sys.platform == "linux":
        yield from _precision(trainer.mixed_precision)


def gpu_findings(*, here: bool = True) -> Iterator[Finding]:
    """Warn if this machine has no GPU to train on, unless it belongs to a cluster.

    `here` says whether this environment's torch trains. Its build may lack CUDA, which the warning
    then mentions.
    """
    if sys.platform != "linux" or visible() or which("sbatch") is not None:
        return
    note = "no GPU was found"
    if here and not _torch_knows_gpus():
        note += ", and torch is built without CUDA"
    yield Finding("GPU", "warning", f"{note}: training will be slow")


def _torch_knows_gpus() -> bool:
    """Return whether the build of torch has CUDA or ROCm, without importing torch."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    with contextlib.suppress(OSError):
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
        return bool(re.search(r"^(cuda|hip)\b.*= *['\"]", text, re.MULTILINE))
    return True


def _precision(name: str) -> Iterator[Finding]:
    """Check that this machine can compute in a precision; accelerate refuses float16 on a CPU."""
    what, hint = "mixed precision", "or leave it out: `auto` chooses"
    if name == "fp16" and not visible() and which("sbatch") is None:
        note = f"fp16 needs a GPU, and this machine has none: set `mixed_precision: bf16`, {hint}"
        yield Finding(what, "failed", note)
    if name == "bf16" and computes_bfloat16() is False:
        note = f"this GPU only emulates bf16, which is slow: set `mixed_precision: fp16`, {hint}"
        yield Finding(what, "warning", note)
