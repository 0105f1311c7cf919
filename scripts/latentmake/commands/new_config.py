"""Text of a new configuration that `latentmake init` writes: keys with explanatory comments."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

import yaml

from latentmake.base import digest
from latentmake.commands.dataset_folders import FoundDataset
from latentmake.commands.local_models import RECOGNISED, Model
from latentmake.commands.model_section import Section
from latentmake.config.architectures import WAN, Scripts
from latentmake.config.fields import literal
from latentmake.config.weights import Weights
from latentmake.data.folders import slug
from latentmake.encode import gpu
from latentmake.models.files import network_config
from latentmake.pages.plan_report import counted
from latentmake.training.external.musubi.checks import number_format

_UNEDITED = "# Until you edit it, the next `latentmake init` replaces it"
_COLUMN = 34  # column of the comments behind lines that are short enough
# Trainer -> number of times that a training sees each item, and fewest and most items in all.
_SEEN = {"sd": (100, 2000, 12000), "sdscripts": (60, 1000, 3000)}
_SEEN |= {"musubi": (50, 800, 2000), "wan": (50, 800, 2000)}
_TIMES = 200  # most times that a training sees an item
_CAPTIONS = 3  # number of captions that become prompts of samples
_NEW = "on a beach at night"
_SECTION = 37  # frames: the first frame of FramePack, and one section of 36
_BATCH = 4  # default batch size of the trainer sd
PROGRAMS = {"musubi": ("musubi_tuner", "musubi-tuner"), "sdscripts": ("sd_scripts", "sd-scripts")}
"""Trainer that is another program -> section of its settings, and name of its folder."""
_WHY = {
    **dict.fromkeys(("unet", "checkpoint", "dit"), "the network to train"),
    "task": "which version of the model it is",
}


def run_and_file(
    datasets: Sequence[FoundDataset], output: Path | None, is_used: Callable[[str, Path], bool]
) -> tuple[str, Path]:
    """Return the name of a run and the path of its configuration.

    The run has the name of its folder, or that of its file if another run has the folder's name:
    the two must not write over each other's results.

    Args:
        datasets: datasets of the run.
        output: path that the user named.
        is_used: whether a name belongs to a run that is not in the configuration at a path.
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
    name = model.architecture.name
    has_clips = any(dataset.video for dataset in datasets) or name == "wan"
    clip = RECOGNISED[name].get("clip") if has_clips else None
    own = (clip[0] * clip[1]) ** 0.5 if clip else float(_own_side(model))
    sizes = (size for dataset in datasets for size in dataset.sizes)
    sides = sorted((width * height) ** 0.5 for width, height in sizes)
    middle = sides[len(sides) // 2] if sides else own
    if middle >= 0.9 * own:
        return [*clip] if clip else round(own), "the size that the model was made for"
    step = 64 if own >= 256 else model.architecture.side
    larger = f"{clip[0]} x {clip[1]}" if clip else str(round(own))
    side = max(middle // step * step, own // 2 // step * step)
    return int(side), f"most are smaller than the model's {larger}"


def _own_side(model: Model) -> int:
    """Return the side of the pictures that a model was trained on, in pixels."""
    side: int = RECOGNISED[model.architecture.name].get("side", 1024)
    if model.architecture.checkpoints and model.networks and model.networks[0].path.is_dir():
        config = network_config(Weights(path=str(model.networks[0].path))) or {}
        return 8 * int(config.get("sample_size", side // 8))
    return side


class Run(NamedTuple):
    """Content of a new configuration.

    Attributes:
        name: name of the run.
        datasets: datasets of the run.
        section: section of the model.
        size: resolution of the run.
        why: reason for the resolution.
        program: folder of the trainer; None if it is not installed or no other program.
        file: path of the configuration.
    """

    name: str
    datasets: list[FoundDataset]
    section: Section
    size: int | list[int]
    why: str
    program: str | None
    file: Path

    @property
    def command(self) -> str:
        """Arguments of the command that trains."""
        return f"train_{self.name} --configfile {quote(str(self.file))}"

    @property
    def clone(self) -> str:
        """Command that fetches the trainer; "" if it is installed or part of Latentmake."""
        _, name = PROGRAMS.get(self.section.kind, ("", ""))
        needed = name and self.program is None
        return f"git clone https://github.com/kohya-ss/{name} ../{name}" if needed else ""


def shown(value: Any) -> str:
    """Return a value or a key as YAML on one line."""
    if isinstance(value, float):
        return f"{value:.0e}".replace("e-0", "e-") if 0 < value < 0.01 else f"{value:g}"
    options: dict[str, Any] = {"default_flow_style": True, "sort_keys": False, "width": 10**6}
    options["default_style"] = '"' if isinstance(value, str) and "\n" in value else None
    return str(yaml.safe_dump([value], allow_unicode=True, **options)).strip()[1:-1]


def _line(depth: int, key: str, value: Any = None, why: str = "") -> str:
    """Return a key with its value; the comment stands above a long line and behind a short one."""
    indent = "  " * depth
    name = key if key.startswith("#") else shown(key)
    text = f"{indent}{name}:" if value is None else f"{indent}{name}: {shown(value)}"
    if why and len(text) > _COLUMN + 12:
        return f"{indent}# {why}\n{text}"
    return f"{text:<{_COLUMN}} # {why}" if why else text


def config_text(run: Run) -> str:
    """Return the text of the configuration."""
    section = run.section
    trained = sum(dataset.items * dataset.repeats for dataset in run.datasets)
    lines = [
        f"# A LoRA of {section.model.title}. `latentmake init` wrote this file; edit it.",
        _UNEDITED,
        f"#   snakemake -n {run.command}            # show the plan",
        f"#   snakemake --cores all {run.command}   # build the caches, and train",
        "# All keys are described in docs/reference/.",
        "",
        "datasets:",
        *(line for dataset in run.datasets for line in _dataset(dataset, run)),
        "",
        "models:",
        *_model(section),
        "",
        "runs:",
        _line(1, run.name),
        _line(2, "datasets", [dataset.name for dataset in run.datasets]),
        _line(2, "model", section.name),
        _line(2, "resolutions", [run.size], f"pixels; {run.why}"),
        _line(2, "trainer"),
        *_trainer(run, trained),
    ]
    if section.kind in PROGRAMS:
        key, name = PROGRAMS[section.kind]
        lines += ["", f"{key}: {{path: {shown(literal(run.program or f'../{name}'))}}}"]
        if run.clone:
            lines.append(f"# {run.clone}")
    text = "\n".join(lines) + "\n"
    return text.replace(_UNEDITED, f"{_UNEDITED} ({_digest(text)})", 1)


def unedited(text: str) -> bool:
    """Return whether a configuration is exactly as `init` wrote it, or has only comments."""
    if text and all(line.startswith("#") for line in text.splitlines()):
        return True  # `latentmake new` writes such a file
    mark = re.search(rf"{re.escape(_UNEDITED)} \((\w+)\)", text)
    return mark is not None and mark[1] == _digest(text.replace(mark[0], _UNEDITED, 1))


def _digest(text: str) -> str:
    return digest.of_bytes(text.encode("utf-8", "surrogateescape"))[:8]


def _dataset(dataset: FoundDataset, run: Run) -> Iterator[str]:
    scripts, version = run.section.model.architecture.scripts, run.section.model.version
    yield _line(1, dataset.name)
    why, first = dataset.counted, "a.mp4" if dataset.video else "a.jpg"
    if dataset.captioned and not dataset.listed:
        why += f"; {first} has its caption in a{dataset.ending}"
    yield _line(2, "path", literal(dataset.path), why)
    yield _line(2, "fit", "bucket", "keep the shape of each; `crop` cuts off the sides")
    if dataset.repeats > 1:
        why = "in an epoch; the number in the folder's name"
        yield _line(2, "num_repeats", dataset.repeats, why)
    if dataset.ending != ".txt":
        yield _line(2, "caption_extension", dataset.ending)
    if dataset.listed:
        yield _line(2, "metadata_file", literal(dataset.path / dataset.listed), "has the captions")
    if not dataset.captioned:
        yield _line(2, "class_tokens", dataset.words, "the caption of each, since none has one")
    if dataset.video and scripts is not None:
        yield from _clips(dataset, scripts)
    if version.controls[0]:
        why = "an image of the same name for each"
        yield _line(2, "control_directory", literal(controls_of(dataset)), why)
    if scripts is not None and scripts.layers:
        yield _line(2, "multiple_target", True, "a_1.png, a_2.png are layers of a.png")
    if run.section.kind == "sdscripts" and isinstance(run.size, int) and run.size > 1024:
        yield _line(2, "max_bucket_reso", 2 * run.size, "at least the resolution")


def controls_of(dataset: FoundDataset) -> str:
    """Return the folder where the control images of a dataset are expected."""
    return str(dataset.path.parent / f"control_{dataset.name}")


def _clips(dataset: FoundDataset, scripts: Scripts) -> Iterator[str]:
    frames = _SECTION if scripts.sections else dataset.target_frames(scripts.fps)
    seconds = f"{frames / scripts.fps:.1f} seconds"
    yield _line(2, "target_frames", [frames], f"{seconds} a clip; 4 n + 1 frames")
    if scripts.sections:
        yield _line(2, "frame_extraction", "full", "all of a video, in sections of 36 frames")
    else:
        yield _line(2, "frame_extraction", "head", "its beginning; `chunk` cuts all of it up")
    why = f"frames a second; brought to the {scripts.fps:g} of {scripts.title}"
    yield _line(2, "source_fps", dataset.fps or "auto", why)


def _model(section: Section) -> Iterator[str]:
    yield _line(1, section.name)
    absent = {key.partition(".")[0] for key in section.missing}
    for key, value in section.keys.items():
        why = "not there yet" if key in absent else _WHY.get(key, "")
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if isinstance(value, list):
            yield _line(2, key, None, why)
            yield from (f"      - {shown(item)}" for item in value)
        else:
            yield _line(2, key, value, why)
    if section.kind == "sd" or section.keys.get("layout") == "sdscripts":
        yield _line(2, "dtype", dtype_of(section), "of the caches; takes half of float32")


def dtype_of(section: Section) -> str:
    """Return the dtype of new caches, which depends on the network's dtype and on the GPUs."""
    tensors = section.network.tensors.values() if section.network else ()
    half = section.kind != "sd" or any(tensor.dtype in ("BF16", "F16") for tensor in tensors)
    return "bfloat16" if half or gpu.computes_bfloat16() else "float16"


def _trainer(run: Run, items: int) -> Iterator[str]:
    """Yield the lines of the trainer's settings; `items` is the number of items in an epoch."""
    kind = run.section.kind
    times, least, most = _SEEN[kind]
    seen = min(max(times * items, least), most, _TIMES * items)
    yield _line(3, "kind", kind)
    if kind in ("sd", "wan"):
        yield from _loop(run, seen, items)
    else:
        yield from _launched(run.section, max(1, round(seen / items)), items)


def _loop(run: Run, seen: int, items: int) -> Iterator[str]:
    section = run.section
    kind, is_large = section.kind, len(section.model.architecture.text_encoders) > 1
    batch, rank = (_BATCH, 16) if kind == "sd" else (1, 32)
    steps = max(50, round(seen / batch / 50) * 50)
    every = max(50, round(steps / 250) * 50)
    times = counted(max(1, round(steps * batch / items)), "time")
    yield _line(3, "rank", rank, "size of the LoRA; a larger one can learn more")
    yield _line(3, "learning_rate", 1e-4, "lower it if the pictures become worse")
    yield _line(3, "steps", steps, f"each is seen about {times}, {batch} a step")
    yield _line(3, "save_every_n_steps", every, "copies, since the last is not always the best")
    why = "a crash loses no more steps; Ctrl-C loses none"
    yield _line(3, "checkpointing_steps", every, why)
    if kind == "sd" and is_large:
        yield _line(3, "train_batch_size", 1, "less memory, as the next two")
        yield _line(3, "gradient_accumulation_steps", batch)
        yield _line(3, "gradient_checkpointing", True)
    if kind == "sd":
        yield _line(3, "samples")
        yield _line(4, "every", every, "steps between pictures that it draws")
        yield _line(4, "prompts", None, "captions from all over the dataset, and a new one")
        yield from (f"          - {shown(prompt)}" for prompt in prompts_of(run.datasets))


def prompts_of(datasets: Sequence[FoundDataset]) -> list[str]:
    """Return prompts of samples: some captions of all datasets, and one that no picture has."""
    texts = [text for dataset in datasets for text in dataset.texts] or [datasets[0].words]
    spread = [texts[at * (len(texts) - 1) // (_CAPTIONS - 1)] for at in range(_CAPTIONS)]
    # The words that all captions share are the trigger word, or the words of a style.
    parts = [[part.strip() for part in text.split(",")] for text in texts]
    shared = [part for part in parts[0] if all(part in others for others in parts)]
    words = ", ".join(shared) or datasets[0].words
    return list(dict.fromkeys([*spread, f"{words}, {_NEW}"]))


def _launched(section: Section, epochs: int, items: int) -> Iterator[str]:
    """Yield the lines of another trainer's settings, with the values of its guide."""
    row, network = section.model.architecture, section.network
    scripts = row.scripts if section.kind == "musubi" else None
    program = scripts or row.strategies
    assert program is not None
    guide, title = program.settings, "musubi-tuner" if scripts else "sd-scripts"
    why = f"rank of the LoRA, as in the guide of {title}"
    yield _line(3, "network_dim", guide["network_dim"], why)
    alpha = guide["network_alpha"] or guide["network_dim"]
    yield _line(3, "network_alpha", alpha, "as in the guide")
    yield _line(3, "learning_rate", guide["learning_rate"], "as in the guide")
    yield _line(3, "max_train_epochs", epochs, f"{epochs * items} steps of one item each")
    every = max(1, epochs // 5)
    yield _line(3, "save_every_n_epochs", every, "copies, since the last is not always the best")
    if row is WAN and network and number_format(network.tensors) == "fp16":
        yield _line(3, "mixed_precision", "fp16", "that of the network's file")
    if scripts is None:
        yield _line(3, "# optimizer_type", "AdamW8bit", "less memory; it needs bitsandbytes")
        return
    for key in scripts.fp8[-1] if scripts.fp8 else ():
        why = "needs fp8_base" if key == "fp8_scaled" else "the network in 8 bits: less memory"
        yield _line(3, f"# {key}", True, why)
    yield _line(3, "# arguments", ["--blocks_to_swap", "16"], "less memory for more time")
