"""Checklist of a run: findings, and how they are shown.

A finding is `failed` where the training would surely end or learn from the wrong files, `warning`
where that depends. Nothing here imports torch or reads tensors: planning runs these checks too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from tabulate import tabulate

from latentmake.errors import TrainingError
from latentmake.files.media import IMAGE_FORMATS
from latentmake.models.model_files import ModelFile

Verdict = Literal["ok", "warning", "failed"]
_SHOWN = 3  # faults or images of one check that are named


class Finding(NamedTuple):
    """One line of the checklist: subject, verdict, reason."""

    what: str
    verdict: Verdict
    note: str


def checklist(findings: Iterable[Finding]) -> str:
    """Return the checklist as a table, a verdict each."""
    return tabulate(
        [[each.what, each.verdict, each.note] for each in findings],
        headers=["checked", "verdict", "note"],
        disable_numparse=True,
        colalign=["left"] * 3,
    )


def model_finding(file: ModelFile) -> Finding:
    """Return the finding of one of a model's files."""
    verdict: Verdict = "failed" if file.fault else "warning" if file.doubt else "ok"
    note = ": ".join(filter(None, (file.place, file.fault or file.doubt or file.known)))
    return Finding(f"model: {file.key}", verdict, note)


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


def image_findings(paths: Iterable[str]) -> Iterator[Finding]:
    """Warn of images that musubi-tuner and sd-scripts read otherwise than a viewer does.

    Pillow's conversion to RGB, which both call, cuts 16-bit greyscale off at 255.
    """
    from PIL import ExifTags, Image

    turned, white = 0, []
    unreadable = OSError, ValueError, SyntaxError, Image.DecompressionBombError  # said elsewhere
    for path in paths:
        with contextlib.suppress(*unreadable), Image.open(path, formats=IMAGE_FORMATS) as image:
            white += [path] * image.mode.startswith("I")
            if path.lower().endswith((".jpg", ".jpeg", ".webp")):  # a PNG's may follow its pixels
                turned += image.getexif().get(ExifTags.Base.Orientation, 1) in range(2, 9)
    if turned:
        note = f"{turned} images are stored turned (EXIF), and are trained on as they are stored"
        yield Finding("EXIF orientation", "warning", note)
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
