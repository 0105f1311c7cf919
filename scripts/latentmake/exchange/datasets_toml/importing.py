"""Import of a dataset file of musubi-tuner or sd-scripts: a configuration of ours for the same.

Blocks of one folder with the same settings become one dataset at several resolutions. A run has all
its datasets at all its resolutions, so datasets of other resolutions become another run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from latentmake.config.architectures import ARCHITECTURES, WAN, Architecture
from latentmake.config.root import parse
from latentmake.errors import ConfigError, nearest
from latentmake.exchange.datasets_toml import musubi, sdscripts
from latentmake.exchange.datasets_toml.document import Block, Document, read
from latentmake.files import atomic
from latentmake.layouts.layout import layout_of


def choose(name: str | None, folders: Collection[str], *, musubi: bool) -> tuple[Architecture, str]:
    """Return the architecture of a name, or of the caches in some folders, and how it is known.

    Raises:
        ConfigError: the trainer of the file does not train it.
    """
    usual = WAN if musubi else ARCHITECTURES["sdxl"]
    rows = [row for row in ARCHITECTURES.values() if (row.scripts is not None) == musubi]
    named = {row.name: row for row in [usual, *rows]}
    if name in named:
        return named[name], ""
    if name is not None:
        trainer = "musubi-tuner" if musubi else "sd-scripts"
        what = f"{name} is no architecture of {trainer}, whose file this is"
        known = name in (WAN.name, *ARCHITECTURES)  # of the other trainer
        guess = None if known else nearest(re.sub(r"\W+", "_", name), named)
        hint = f"did you mean {guess}?" if guess else f"use one of {', '.join(named)}"
        raise ConfigError(what, where="--architecture", hint=hint)
    for folder in folders:
        for row in named.values():
            if any(Path(folder.replace("$$", "$")).rglob(f"*{_ending(row)}")):
                return row, f"as the caches in {folder} are"
    return usual, "the usual one"


def _ending(row: Architecture) -> str:
    """Return the end of the names of an architecture's caches of latents."""
    if row.scripts is not None:
        return f"x[0-9][0-9][0-9][0-9]_{row.scripts.suffix}.safetensors"
    return layout_of(f"sdscripts-{row.name}").latents_ending


def tasks_of(spec: Architecture) -> list[str | None]:
    """Return what the model's `task` may be."""
    return [None] if spec.scripts is None else [name or None for name in spec.scripts.versions]


def model_of(spec: Architecture, task: str | None) -> dict[str, Any]:
    """Return the section of a model whose weights are placeholders."""
    folder = f"models/{spec.name}"
    scripts = spec.scripts
    if scripts is None:
        names = spec.text_encoders
        if not names and spec.strategies is not None and spec.strategies.text is not None:
            networks = spec.strategies.text.networks
            names = tuple(sorted({x.key for x in networks if x.key.startswith("text")}))
        encoders = ["text_encoder", *(f"text_encoder_{n + 2}" for n in range(len(names) - 1))]
        return {
            "architecture": spec.name,
            "layout": "sdscripts",
            "vae": f"{folder}/vae",
            "text": [f"{folder}/{each}" for each in encoders],
            "checkpoint": f"{folder}/model.safetensors",
        }
    found: dict[str, Any] = {"architecture": spec.name} | ({"task": task} if task else {})
    version = scripts.versions.get(task or "")
    wanted = version.needs if version else ()
    files = (*scripts.latents.files, *scripts.text.files, *scripts.training.files)
    keys = [x.key for x in files if x.required or x.key in wanted]
    texts = sorted({key for key in keys if key.startswith("text")})
    found |= {key: f"{folder}/{key}.safetensors" for key in keys if key not in texts}
    places: list[Any] = [f"{folder}/text_{n + 1}.safetensors" for n in range(len(texts))]
    if spec.encodes:
        places = [{"path": each, "tokenizer": f"{folder}/tokenizer"} for each in places]
    return found | ({"text": places} if places else {})


def trainer_of(spec: Architecture, batch_size: int) -> dict[str, Any]:
    """Return the section of a trainer."""
    kind, key = ("sdscripts", "train_") if spec.scripts is None else ("musubi", "")
    return {"kind": kind} | ({f"{key}batch_size": batch_size} if batch_size > 1 else {})


Sizes = list[tuple[int, int]]


class Imported(NamedTuple):
    """A configuration of ours, made of a dataset file.

    Attributes:
        values: of the configuration.
        notes: what could not be taken over as it is, a line each.
        text: both, as YAML with comments.
        written: lists that it names: path -> content.
    """

    values: dict[str, Any]
    notes: list[str]
    text: str
    written: dict[str, bytes]


class _Dataset(NamedTuple):
    name: str
    values: dict[str, Any]
    sizes: Sizes
    batch_sizes: set[int]


def imported(
    path: Path, run: str, architecture: str | None = None, task: str | None = None
) -> Imported:
    """Return the configuration that a dataset file stands for; nothing is written.

    Raises:
        ConfigError: the file is damaged, or cannot be taken over.
    """
    document = Document(path, run, read(path))
    tables = document.tables(document.values, "datasets")
    trainer = sdscripts if any(sdscripts.SUBSETS in each for _, each in tables) else musubi
    known = ("general", "datasets")
    document.unknown("file", document.values, known, trainer.TITLE)
    blocks = trainer.blocks_of(document)
    if not blocks:
        what = "names no dataset that can be taken over"
        what += f" ({document.notes[0]})" if document.notes else ""
        raise ConfigError(what, where=path, hint="name a file of musubi-tuner or sd-scripts")
    caches = [folder for block in blocks for folder in block.caches]
    spec, why = choose(architecture, caches, musubi=trainer is musubi)
    if why:
        document.note(f"models: the architecture is {spec.name}, {why}; else use --architecture")
    document.note_missing()
    runs = _runs(document, _datasets(document, blocks, spec))
    values = _fitting(document, runs, spec, [task] if task else tasks_of(spec))
    head = [
        f"Made of {path} ({trainer.TITLE}).",
        "Weights and folders of programs are placeholders: name yours under models.",
        *(f"- {note}" for note in document.notes),
    ]
    comments = "".join(f"# {' '.join(line.split())}\n" for line in head)
    dumped = yaml.safe_dump(
        values, sort_keys=False, default_flow_style=None, width=100, allow_unicode=True
    )
    return Imported(values, document.notes, f"{comments}\n{dumped}", document.written)


def write(path: Path, data: bytes) -> None:
    """Write a file of an import.

    Raises:
        ConfigError: another file is there, which its user may have edited.
    """
    if path.exists() and path.read_bytes() != data:
        raise ConfigError("is there already", where=path, hint="rename or remove it")
    atomic.write(path, data)


def _datasets(document: Document, blocks: Sequence[Block], spec: Architecture) -> list[_Dataset]:
    """Return the datasets that some blocks stand for, each with a name of its own."""
    alike: dict[str, list[Block]] = {}
    for block in blocks:
        alike.setdefault(json.dumps(block.values, sort_keys=True), []).append(block)
    found: dict[str, _Dataset] = {}
    for several in alike.values():
        base = name = _name(str(several[0].values["path"]))
        while name in found:
            name = f"{base}_{int(name[len(base) + 1 :] or 1) + 1}"
        caches = list(dict.fromkeys(folder for block in several for folder in block.caches))
        values = several[0].values | ({"adopt_from": caches} if caches else {})
        sizes = list(dict.fromkeys(_size(document, block, spec) for block in several))
        found[name] = _Dataset(name, values, sizes, {block.batch_size for block in several})
    return [*found.values()]


def _size(document: Document, block: Block, spec: Architecture) -> tuple[int, int]:
    """Return a block's resolution, with sides that a run may have."""
    if block.resolution is None:
        side = 1024 if spec.caches_text else 512
        document.note(f"resolution: missing, {side} is used in place of sd-scripts' --resolution")
        return side, side
    width, height = (max(side // spec.side, 1) * spec.side for side in block.resolution)
    if (width, height) != block.resolution:
        document.note(
            f"resolution: sides are multiples of {spec.side} here: {width} x {height} in place of "
            f"{block.resolution[0]} x {block.resolution[1]}, whose latents are of other sizes"
        )
    return width, height


def _name(path: str) -> str:
    """Return a dataset's name, from the name of its folder or list."""
    place = Path(path.replace("\\", "/"))
    last = place.stem if place.suffix.lower() in (".jsonl", ".json") else place.name
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", last).lstrip("_.-") or "dataset"


def _runs(document: Document, datasets: Sequence[_Dataset]) -> dict[str, list[_Dataset]]:
    """Return the runs of some datasets: those of the same resolutions are trained together."""
    alike: dict[frozenset[tuple[int, int]], list[_Dataset]] = {}
    for dataset in datasets:
        alike.setdefault(frozenset(dataset.sizes), []).append(dataset)
    name = document.run
    runs = {name if n == 1 else f"{name}_{n}": each for n, each in enumerate(alike.values(), 1)}
    if len(runs) > 1:
        document.note(
            f"resolution: datasets of other resolutions are runs of their own ({', '.join(runs)}), "
            "which train one after the other; to train all together, give one run all datasets"
        )
    for run, several in runs.items():
        if len(sizes := set().union(*(dataset.batch_sizes for dataset in several))) > 1:
            document.note(f"batch_size: the run {run} has one, the smallest of {sorted(sizes)}")
    return runs


def _fitting(
    document: Document,
    runs: dict[str, list[_Dataset]],
    spec: Architecture,
    tasks: Sequence[str | None],
) -> dict[str, Any]:
    """Return the values of the first configuration that loads, over some tasks of the model.

    Raises:
        ConfigError: none does.
    """
    first: ConfigError | None = None
    for task in tasks:
        values = _values(runs, spec, task)
        try:
            parse(values)
        except ConfigError as error:
            first = first or error
            continue
        if len(tasks) > 1:
            names = ", ".join(filter(None, tasks))
            document.note(f"models: the task is {task}; else use --task, with one of {names}")
        return values
    what = f"does not fit {spec.name}: {first}"
    hint = "name another --architecture or --task"
    raise ConfigError(what, where=document.path, hint=hint)


def _values(
    runs: dict[str, list[_Dataset]], spec: Architecture, task: str | None
) -> dict[str, Any]:
    program = "sd_scripts" if spec.scripts is None else "musubi_tuner"
    return {
        "datasets": {each.name: each.values for several in runs.values() for each in several},
        "models": {spec.name: model_of(spec, task)},
        "runs": {
            run: {
                "datasets": [each.name for each in several],
                "model": spec.name,
                "resolutions": [w if w == h else [w, h] for w, h in several[0].sizes],
                "trainer": trainer_of(spec, min(min(each.batch_sizes) for each in several)),
            }
            for run, several in runs.items()
        },
        program: {"path": f"../{program.replace('_', '-')}"},
    }
