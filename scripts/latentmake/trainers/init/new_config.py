"""Text of a new configuration that `latentmake init` writes: keys with explanatory comments."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

import yaml

from latentmake.base import digest
from latentmake.base.machine import counted
from latentmake.commands.project import is_used
from latentmake.config.fields import literal
from latentmake.config.weights import Weights
from latentmake.data.folders import slug
from latentmake.encode import gpu
from latentmake.models.files import network_config
from latentmake.trainers.init.dataset_folders import FoundDataset
from latentmake.trainers.init.local_models import Model
from latentmake.trainers.musubi.checks import number_format

_UNEDITED = "# Until you edit it, the next `latentmake init` replaces it"
_SECTION = 37  # frames: the first frame of FramePack, and one section of 36
_TEMPLATE = Path(__file__).with_name("new_config.jinja")
_COLUMN = 34  # column of the comments behind lines that are short enough
# Trainer -> number of times that a training sees each item, and fewest and most items in all.
_SEEN = {"sd": (100, 2000, 12000), "sdscripts": (60, 1000, 3000)}
_SEEN |= {"musubi": (50, 800, 2000), "wan": (50, 800, 2000)}
_TIMES = 200  # most times that a training sees an item
_CAPTIONS = 3  # number of captions that become prompts of samples
_NEW = "on a beach at night"
_BATCH = 4  # default batch size of the trainer sd
PROGRAMS = {"musubi": ("musubi_tuner", "musubi-tuner"), "sdscripts": ("sd_scripts", "sd-scripts")}
"""Trainer that is another program -> section of its settings, and name of its folder."""
CAPTIONER = "florence-community/Florence-2-base-ft"
"""Repository on the hub of the captioner that a new configuration offers."""
_COMMENTS = {
    **dict.fromkeys(("unet", "checkpoint", "dit"), "\tthe network to train"),
    "task": "\twhich version of the model it is",
}


def run_and_file(datasets: Sequence[FoundDataset], output: Path | None) -> tuple[str, Path]:
    """Return the name of a run and the path of its configuration; the user may name the path.

    The run has the name of its folder, or that of its file if another run has the folder's name:
    the two must not write over each other's results.
    """
    name = slug(datasets[0].words)
    if output is None:
        return name, Path(f"{name}.yaml")
    if output.stem != "config" and is_used(name, output):
        name = slug(output.stem)
    return name, output


def size_of(model: Model, datasets: Sequence[FoundDataset]) -> tuple[int | list[int], str]:
    """Choose a resolution: the model's own, or a smaller one if most items are smaller.

    Returns:
        The value in the configuration, and a comment that gives the reason.
    """
    facts = model.architecture.init
    has_clips = any(dataset.settings.video for dataset in datasets)
    best = facts.clips if has_clips and facts.clips else facts.images
    clip = None if isinstance(best, int) else best
    own = float(_own_side(model, best)) if isinstance(best, int) else (best[0] * best[1]) ** 0.5
    sizes = (size for dataset in datasets for size in dataset.sizes)
    sides = sorted((width * height) ** 0.5 for width, height in sizes)
    middle = sides[len(sides) // 2] if sides else own
    if middle >= 0.9 * own:
        return [*clip] if clip else round(own), "the size that the model was made for"
    step = 64 if own >= 256 else model.architecture.side
    larger = f"{clip[0]} x {clip[1]}" if clip else str(round(own))
    side = max(middle // step * step, own // 2 // step * step)
    return int(side), f"most are smaller than the model's {larger}"


def _own_side(model: Model, side: int) -> int:
    """Return the side of the pictures that a model was trained on, in pixels."""
    if model.architecture.checkpoints and model.networks and model.networks[0].path.is_dir():
        config = network_config(Weights(path=str(model.networks[0].path))) or {}
        return 8 * int(config.get("sample_size", side // 8))
    return side


class Run(NamedTuple):
    """Content of a new configuration.

    Attributes:
        name: name of the run.
        datasets: datasets of the run.
        model: model to train, with its section.
        size: resolution of the run.
        why: reason for the resolution.
        program: folder of the trainer; None if it is not installed or no other program.
        file: path of the configuration.
    """

    name: str
    datasets: list[FoundDataset]
    model: Model
    size: int | list[int]
    why: str
    program: str | None
    file: Path

    @property
    def arguments(self) -> str:
        """Arguments of the commands that train and check it."""
        return f"{self.name} -c {quote(str(self.file))}"

    @property
    def clone(self) -> str:
        """Command that fetches the trainer; "" if it is installed or part of Latentmake."""
        _, name = PROGRAMS.get(self.model.kind, ("", ""))
        needed = name and self.program is None
        return f"git clone https://github.com/kohya-ss/{name} ../{name}" if needed else ""


def shown(value: Any) -> str:
    """Return a value or a key as YAML on one line."""
    if isinstance(value, float):
        return f"{value:.0e}".replace("e-0", "e-") if 0 < value < 0.01 else f"{value:g}"
    options: dict[str, Any] = {"default_flow_style": True, "sort_keys": False, "width": 10**6}
    options["default_style"] = '"' if isinstance(value, str) and "\n" in value else None
    return str(yaml.safe_dump([value], allow_unicode=True, **options)).strip()[1:-1]


def config_text(run: Run) -> str:
    """Return the text of the configuration; in its template, a tab stands before a comment."""
    from jinja2 import Environment

    model = run.model
    items = sum(dataset.items * dataset.settings.num_repeats for dataset in run.datasets)
    times, least, most = _SEEN[model.kind]
    seen = min(max(times * items, least), most, _TIMES * items)
    batch = _BATCH if model.kind == "sd" else 1
    steps = max(50, round(seen / batch / 50) * 50)
    tensors = model.network.tensors if model.network else {}
    # The result is no HTML, so nothing is escaped.
    templates = Environment(line_statement_prefix="%", autoescape=False)  # noqa: S701
    templates.filters |= {"yaml": shown, "path": lambda path: shown(literal(path))}
    text = templates.from_string(_TEMPLATE.read_text("utf-8")).render(
        run=run,
        model=model,
        trainer=PROGRAMS.get(model.kind),
        keys={
            key: value[0] if isinstance(value, list) and len(value) == 1 else value
            for key, value in model.keys.items()
        },
        absent={key.partition(".")[0] for key in model.missing},
        comments=_COMMENTS,
        dtype=dtype_of(model),
        is_half=number_format(tensors) == "fp16",
        section=_SECTION,
        items=items,
        batch=batch,
        steps=steps,
        every=max(50, round(steps / 250) * 50),
        times=counted(max(1, round(steps * batch / items)), "time"),
        epochs=max(1, round(seen / items)),
        prompts=prompts_of(run.datasets),
        unedited=_UNEDITED,
        captioner=CAPTIONER,
    )
    text = "\n".join(map(_commented, text.rstrip("\n").split("\n"))) + "\n"
    return text.replace(_UNEDITED, f"{_UNEDITED} ({_digest(text)})", 1)


def _commented(line: str) -> str:
    """Return the line of a key with the comment after its tab: above a long one, or behind it."""
    text, tab, why = line.partition("\t") if line.startswith(" ") else (line, "", "")
    if tab and len(text) > _COLUMN + 12:
        return f"{text[: len(text) - len(text.lstrip())]}# {why}\n{text}"
    return f"{text:<{_COLUMN}} # {why}" if tab else text


def unedited(text: str) -> bool:
    """Return whether a configuration is exactly as `init` wrote it, or has only comments."""
    if text and all(line.startswith("#") for line in text.splitlines()):
        return True  # `latentmake new` writes such a file
    mark = re.search(rf"{re.escape(_UNEDITED)} \((\w+)\)", text)
    return mark is not None and mark[1] == _digest(text.replace(mark[0], _UNEDITED, 1))


def _digest(text: str) -> str:
    return digest.of_bytes(text.encode("utf-8", "surrogateescape"))[:8]


def dtype_of(model: Model) -> str:
    """Return the dtype of new caches, which depends on the network's dtype and on the GPUs."""
    tensors = model.network.tensors.values() if model.network else ()
    half = model.kind != "sd" or any(tensor.dtype in ("BF16", "F16") for tensor in tensors)
    return "bfloat16" if half or gpu.computes_bfloat16() else "float16"


def prompts_of(datasets: Sequence[FoundDataset]) -> list[str]:
    """Return prompts of samples: some captions of all datasets, and one that no picture has."""
    texts = [text for dataset in datasets for text in dataset.texts] or [datasets[0].words]
    spread = [texts[at * (len(texts) - 1) // (_CAPTIONS - 1)] for at in range(_CAPTIONS)]
    # The words that all captions share are the trigger word, or the words of a style.
    parts = [[part.strip() for part in text.split(",")] for text in texts]
    shared = [part for part in parts[0] if all(part in others for others in parts)]
    words = ", ".join(shared) or datasets[0].words
    return list(dict.fromkeys([*spread, f"{words}, {_NEW}"]))
