"""Import of a dataset file of musubi-tuner or sd-scripts as a configuration of Latentmake.

The file is read as these programs read it: keys, defaults and inheritance follow musubi-tuner's
dataset/config_utils.py and sd-scripts' library/config_util.py. The import executes no code of it.

Blocks of one folder with the same settings become one dataset at several resolutions. A run uses
all its datasets at all its resolutions, so datasets with other resolutions become another run.
"""

from __future__ import annotations

import contextlib
import json
import os
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import yaml
from pydantic import BaseModel, Field, ValidationError

from latentmake.base.errors import ConfigError, unreadable
from latentmake.base.regular import read_text
from latentmake.config.architectures import ROWS
from latentmake.config.datasets import Captions, Dataset
from latentmake.config.fields import literal
from latentmake.config.makers import Architecture
from latentmake.config.root import parse
from latentmake.data.folders import kohya, slug
from latentmake.layouts.names import encoder_name

_SOURCES = ("image_directory", "image_jsonl_file", "video_directory", "video_jsonl_file")
_VARIANTS = 4  # texts of each item, if a file of sd-scripts asks for random texts

Table = dict[str, Any]
Sides = tuple[int, int]

# Keys that have the same name, meaning and default here.
_IMAGES = (
    *("num_repeats", "multiple_target", "no_resize_control", "control_resolution"),
    *("fp_latent_window_size", "fp_1f_clean_indices", "fp_1f_target_index", "fp_1f_no_post"),
)
_VIDEOS = (
    *("num_repeats", "frame_extraction", "frame_stride", "frame_sample", "max_frames"),
    *("source_fps", "fp_latent_window_size"),
)
_CAPTIONS = (
    *("shuffle_caption", "caption_separator", "keep_tokens", "keep_tokens_separator"),
    *("secondary_separator", "enable_wildcard", "caption_prefix", "caption_suffix"),
    *("caption_dropout_rate", "caption_tag_dropout_rate"),
)
_OLD = {  # former name of a key in musubi-tuner -> present name
    "flux_kontext_no_resize_control": "no_resize_control",
    "qwen_image_edit_no_resize_control": "no_resize_control",
    "qwen_image_edit_control_resolution": "control_resolution",
}
_RANDOM = ("shuffle_caption", "enable_wildcard", "caption_dropout_rate", "caption_tag_dropout_rate")
_SUBSET = ("num_repeats", "flip_aug", "alpha_mask")
_BUCKETS = ("bucket_reso_steps", "min_bucket_reso", "max_bucket_reso")
_FIELDS = {**Dataset.model_fields, **Captions.model_fields}
_DEFAULTS = {name: field_info.default for name, field_info in _FIELDS.items()}
_HINTS = {
    "general": "write it as [general]",
    "datasets": "write it as [[datasets]]",
    "subsets": "write it as [[datasets.subsets]]",
    "resolution": "it should be a number, or a width and a height such as [960, 544]",
}


class _Keys(BaseModel, extra="allow", strict=True):
    """Keys of a file, or of a table in it, that the import reads.

    Other keys stay in `model_extra`: they are copied, or left out.
    """

    general: Table = {}
    datasets: list[Table] = []
    subsets: list[Table] = []
    resolution: int | Annotated[list[int], Field(min_length=2, max_length=2)] | None = None
    batch_size: int = 1
    enable_bucket: bool = False
    bucket_no_upscale: bool = False
    caption_extension: str | None = None
    # musubi-tuner's
    image_directory: str | None = None
    image_jsonl_file: str | None = None
    video_directory: str | None = None
    video_jsonl_file: str | None = None
    cache_directory: str | None = None
    control_directory: str | None = None
    target_frames: list[int] = []
    # sd-scripts'
    image_dir: str | None = None
    metadata_file: str | None = None
    class_tokens: str | None = None
    is_reg: bool = False
    conditioning_data_dir: str | None = None

    @property
    def sides(self) -> Sides | None:
        """Width and height in pixels; None if the table has no resolution."""
        if isinstance(self.resolution, int):
            return self.resolution, self.resolution
        return (self.resolution[0], self.resolution[1]) if self.resolution else None

    @property
    def ending(self) -> str:
        """Ending of caption files, with its dot; "" if the table has none."""
        return f".{self.caption_extension.removeprefix('.')}" if self.caption_extension else ""

    @property
    def fit(self) -> dict[str, Any]:
        """Keys of our dataset section that decide how an image is resized."""
        if not self.enable_bucket:
            return {"fit": "crop"}
        if self.bucket_no_upscale:
            return {"fit": "bucket", "bucket_no_upscale": True}
        return {"fit": "bucket"}

    def take(self, *names: str) -> dict[str, Any]:
        """Remove some keys; return those whose value is neither "" nor our default."""
        extra = self.model_extra or {}
        taken = {name: extra.pop(name) for name in names if name in extra}
        return {name: value for name, value in taken.items() if value not in ("", _DEFAULTS[name])}


class Block(NamedTuple):
    """A folder or list at one resolution.

    Attributes:
        values: keys of our dataset section.
        resolution: width and height in pixels; None if the file has no resolution.
        batch_size: items per step.
        caches: folder that has caches of the block's items; None if there are no caches.
        table: number of the `[[datasets]]` table in a file of sd-scripts.
    """

    values: dict[str, Any]
    resolution: Sides | None
    batch_size: int
    caches: str | None
    table: int = 0


@dataclass
class Imported:
    """A configuration of ours, made from a dataset file.

    Attributes:
        path: path of the dataset file.
        run: name of the first run.
        values: sections of the configuration.
        notes: lines about differences from the dataset file.
        left: keys that are left out, in their order.
        has_weights: whether the paths of the model are those of real files.
    """

    path: Path
    run: str
    values: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    left: dict[str, None] = field(default_factory=dict)
    has_weights: bool = False

    @property
    def text(self) -> str:
        """The configuration as YAML, with the notes as comments at its head."""
        what = "Weights and folders of programs are placeholders: name yours under models."
        if self.has_weights:
            what = "The folder of the trainer is a placeholder: name yours at the end."
        head = [f"Made of {self.path}.", what, *(f"- {note}" for note in self.notes)]
        comments = "".join(f"# {' '.join(line.split())}\n" for line in head)
        options: dict[str, Any] = {"sort_keys": False, "default_flow_style": None, "width": 100}
        dumped = yaml.safe_dump(self.values, allow_unicode=True, **options)
        return f"{comments}\n{dumped}"

    def note(self, line: str) -> None:
        """Add a line to the notes, unless they have it."""
        if line not in self.notes:
            self.notes.append(line)

    def keys(self, table: Table, where: str = "") -> _Keys:
        """Return the keys of a table; raises ConfigError if a value has the wrong type."""
        try:
            return _Keys.model_validate({_OLD.get(key, key): table[key] for key in table})
        except ValidationError as error:
            first, *_ = error.errors(include_url=False)
            key = str(first["loc"][0])
            hint = _HINTS.get(key, first["msg"].replace("Input", "it"))
            place = f"{self.path}: {where}{key}"
            raise ConfigError("cannot be read", where=place, hint=hint) from None

    def leave(self, keys: _Keys) -> None:
        """Note the keys that have no use here, unless their value is false, 0 or empty."""
        values = keys.model_extra or {}
        self.left |= dict.fromkeys(filter(values.get, values))

    def find(self, path: str) -> Path:
        """Return a path as it is, or relative to the dataset file if it exists only there."""
        beside = self.path.parent / path
        is_beside = os.path.exists(beside) and not os.path.exists(path)  # noqa: PTH110 -- long names
        return beside if is_beside else Path(path)


def imported(
    path: Path, run: str, architecture: str | None = None, task: str | None = None
) -> Imported:
    """Return the configuration for a dataset file, without writing it.

    Args:
        path: path of the dataset file.
        run: name of the first run; further runs are named `{run}_2` and so on.
        architecture: architecture of the model; None finds it by caches, or takes the usual one.
        task: task of the model; None tries all tasks of the architecture.

    Raises:
        ConfigError: the file is damaged, or the import does not support it.
    """
    config, table = Imported(path, run), _read(path)
    _refuse_training(path, table)
    file = config.keys(table)
    config.leave(file)
    musubi = not any("subsets" in table for table in file.datasets)
    blocks = [*(_blocks_of_musubi if musubi else _blocks_of_sdscripts)(config, file)]
    if not blocks:
        what = ": ".join(["names no dataset that can be taken over", *config.notes[-1:]])
        raise ConfigError(what, where=path, hint="name a file of musubi-tuner or sd-scripts")
    if config.left:
        config.note(f"left out, without effect here: {', '.join(config.left)}")
    spec = _architecture(config, architecture, blocks, musubi=musubi)
    config.values = _fitting(config, blocks, spec, task)
    return config


def _read(path: Path) -> dict[str, Any]:
    hint = "name a dataset file of musubi-tuner or sd-scripts"
    if path.suffix.lower() != ".toml":
        raise ConfigError("is no .toml file", where=path, hint=hint)
    try:
        return tomllib.loads(read_text(path))
    except OSError as error:
        raise unreadable(error, path) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"is not TOML: {error}", where=path, hint="correct it") from None


def _refuse_training(path: Path, table: Table) -> None:
    """Raise ConfigError for a file that has options of a training, and no datasets."""
    if not table or {"general", "datasets"} & table.keys():
        return
    sections = [table, *(value for value in table.values() if isinstance(value, dict))]
    options = {key: value for section in sections for key, value in section.items()}
    hint = "name the file that the training gets by `--dataset_config`"
    if file := options.get("dataset_config"):
        hint = f"name the file of its dataset_config: `latentmake import {file}`"
    elif folder := options.get("train_data_dir"):
        hint = f"for the folder of its images run `latentmake init {folder}`"
    raise ConfigError("is no dataset file: it has no [[datasets]]", where=path, hint=hint)


def _holds(folder: Path, pattern: str) -> bool:
    """Whether a folder has a file of a pattern; False if it cannot be listed."""
    with contextlib.suppress(OSError):
        return any(folder.glob(pattern))
    return False


def _blocks_of_musubi(config: Imported, file: _Keys) -> Iterator[Block]:
    for number, own in enumerate(file.datasets):
        where = f"datasets[{number}]"
        keys = config.keys({**file.general, **own}, f"{where}.")
        # If a table names several sources, musubi-tuner prefers images to videos, and a folder to
        # a list, as the order of `_SOURCES` does.
        key = next((key for key in _SOURCES if getattr(keys, key)), None)
        if key is None:
            config.note(f"{where}: left out, it names no images or videos")
            continue
        path = config.find(getattr(keys, key))
        if key.endswith("file"):
            config.note(f"{path}: relative paths in a list begin at the list's folder here")
        yield _block_of_musubi(config, keys, key, path)
        config.leave(keys)


def _block_of_musubi(config: Imported, keys: _Keys, key: str, path: Path) -> Block:
    values: dict[str, Any] = {"path": literal(path), "flat": True, "empty_caption": "allow"}
    video = key.startswith("video")
    if key.endswith("directory"):
        values["caption_extension"] = keys.ending or ".txt"
        if not video:
            values["on_error"] = "skip"
    if keys.control_directory:
        values["control_directory"] = literal(config.find(keys.control_directory))
    if video:
        lengths = {(frames - 1) // 4 * 4 + 1 for frames in keys.target_frames if frames > 0}
        values |= {"target_frames": sorted(lengths) or [1], **keys.take(*_VIDEOS)}
    else:
        values |= keys.fit | keys.take(*_IMAGES)
    folder = config.find(keys.cache_directory) if keys.cache_directory else path
    caches = literal(folder) if _holds(folder, "*.safetensors") else None
    return Block(values, keys.sides or (960, 544), keys.batch_size, caches)


def _blocks_of_sdscripts(config: Imported, file: _Keys) -> Iterator[Block]:
    for number, table in enumerate(file.datasets):
        inherited = {**file.general, **table}
        seen: set[str | None] = {None}
        blocks: list[Block] = []
        for place, own in enumerate(config.keys(inherited, f"datasets[{number}].").subsets):
            where = f"datasets[{number}].subsets[{place}]"
            keys = config.keys({**inherited, **own}, f"{where}.")
            source = keys.metadata_file or keys.image_dir
            if source in seen:  # sd-scripts, too, reads only the first of two with one folder
                why = "an earlier one is the same" if source else "it names no image_dir"
                config.note(f"{where}: left out, {why}")
                continue
            seen.add(source)
            blocks.append(_block_of_sdscripts(config, keys, where)._replace(table=number))
            config.leave(keys)
        regularising = ["is_reg" in block.values for block in blocks]
        if any(regularising) and all(regularising):
            why = "sd-scripts shows regularisation images beside others of their block only"
            config.note(f"datasets[{number}]: left out, {why}")
            continue
        if any(regularising):
            config.note("is_reg: set `prior_loss_weight` of the trainer as on your command line")
        yield from blocks


def _block_of_sdscripts(config: Imported, keys: _Keys, where: str) -> Block:
    place = f"{config.path}: {where}"
    if keys.conditioning_data_dir is not None:
        hint = "take the block out of a copy of the file"
        raise ConfigError("is a ControlNet dataset, which has no use here", where=place, hint=hint)
    if keys.image_dir is None:
        hint = "add image_dir, the folder that holds all of its images"
        raise ConfigError("names no image_dir beside its metadata_file", where=place, hint=hint)
    folder = config.find(keys.image_dir)
    values: dict[str, Any] = {"path": literal(folder)}
    if keys.metadata_file:
        values |= {"metadata_file": literal(config.find(keys.metadata_file))}
        values |= {"caption_extension": ".none", "empty_caption": "allow", "on_error": "skip"}
    else:
        values |= {"flat": True, "caption_extension": keys.ending or ".caption"}
        values |= (
            {"class_tokens": keys.class_tokens}
            if keys.class_tokens
            else {"missing_caption": "empty"}
        )
    captions = keys.take(*_CAPTIONS)
    if drawn := ", ".join(key for key in _RANDOM if key in captions):
        captions = {"variants": _VARIANTS, **captions}
        config.note(
            f"{drawn}: sd-scripts draws anew in each step; here each item has {_VARIANTS} texts "
            "that are drawn once and cached: raise captions.variants for more; an epoch is "
            f"{_VARIANTS} times as long as there: lower max_train_epochs"
        )
    if captions:
        values["captions"] = captions
    values |= keys.fit | keys.take(*_SUBSET)
    if keys.is_reg:
        values["is_reg"] = True
    if keys.enable_bucket:
        values |= {"bucket_reso_steps": 64, **keys.take(*_BUCKETS)}
    caches = values["path"] if _holds(folder, "**/*.npz") else None
    return Block(values, keys.sides, keys.batch_size, caches)


def _architecture(
    config: Imported, name: str | None, blocks: Sequence[Block], *, musubi: bool
) -> Architecture:
    """Return the architecture of a name; without a name find it by the caches of some blocks.

    If neither decides, it is Wan or SDXL.

    Raises:
        ConfigError: the trainer of the file has no such architecture.
    """
    rows = [row for row in ROWS.values() if row.has_tasks == musubi]
    usual = next(row for row in rows if row.usual)
    named = {row.name: row for row in [usual, *rows]}
    if name in named:
        return named[name]
    if name is not None:
        trainer = "musubi-tuner" if musubi else "sd-scripts"
        what = f"{name} is no architecture of {trainer}, whose file this is"
        raise ConfigError(what, where="--architecture", hint=f"use one of {', '.join(named)}")
    for folder in dict.fromkeys(filter(None, (block.caches for block in blocks))):
        for row in named.values():
            if _holds(Path(folder.replace("$$", "$")), f"**/*{row.latents_names}"):
                reason = f"as the caches in {folder} are"
                config.note(f"models: the architecture is {row.name}, {reason}")
                return row
    config.note(f"models: the architecture is {usual.name}, the usual one; else use --architecture")
    return usual


def _size(config: Imported, block: Block, spec: Architecture) -> Sides:
    """Return the resolution of a block, rounded down to sides that the architecture allows."""
    if block.resolution is None:
        side = 1024 if spec.caches_text else 512
        config.note(f"resolution: missing, {side} is used in place of sd-scripts' --resolution")
        return side, side
    width, height = (max(side // spec.side, 1) * spec.side for side in block.resolution)
    if (width, height) != block.resolution:
        config.note(
            f"resolution: sides are multiples of {spec.side} here: {width} x {height} in place of "
            f"{block.resolution[0]} x {block.resolution[1]}, whose latents are of other sizes"
        )
    return width, height


def _name(path: str, taken: Collection[str]) -> str:
    """Return a new name for a dataset, as `init` names it: `sks_man` for `10_sks man`."""
    place = Path(path.replace("\\", "/"))
    last = place.stem if place.suffix.lower() in (".jsonl", ".json") else place.name
    _, words = kohya(place) or (1, last)
    base = slug(words)
    numbered = (f"{base}_{number}" if number > 1 else base for number in count(1))
    return next(name for name in numbered if name not in taken)


def _fitting(
    config: Imported, blocks: Sequence[Block], spec: Architecture, task: str | None
) -> dict[str, Any]:
    """Return the configuration with the first task of the model with which it is valid.

    Raises:
        ConfigError: it is valid with no task, or not with the given one.
    """
    values = _values(config, blocks, spec)
    tasks = [name or None for name in spec.versions] or [None]
    faults: list[ConfigError] = []
    for candidate in [task] if task else tasks:
        values["models"] = {spec.name: {"architecture": spec.name, **_weights(spec, candidate)}}
        try:
            parse(values)
        except ConfigError as error:
            faults.append(error)
            continue
        if candidate != task:
            names = ", ".join(filter(None, tasks))
            config.note(f"models: the task is {candidate}; else use --task, with one of {names}")
        return values
    what, hint = f"does not fit {spec.name}: {faults[0]}", "name another --architecture or --task"
    raise ConfigError(what, where=config.path, hint=hint)


def _values(config: Imported, blocks: Sequence[Block], spec: Architecture) -> dict[str, Any]:
    """Return the configuration for some blocks, without models.

    Datasets with the same resolutions share a run.
    """
    musubi, groups = spec.has_tasks, dict[str, list[Block]]()
    for block in blocks:
        groups.setdefault(json.dumps(block.values, sort_keys=True, default=str), []).append(block)
    datasets: dict[str, Any] = {}
    of_dataset: dict[str, list[Block]] = {}
    together: dict[tuple[Sides, ...], list[str]] = {}  # resolutions of a run -> its datasets
    for group in groups.values():
        name = _name(group[0].values["path"], datasets)
        caches = list(dict.fromkeys(block.caches for block in group if block.caches))
        datasets[name] = group[0].values | ({"adopt_from": caches} if caches else {})
        sizes = sorted({_size(config, block, spec) for block in group})
        if len(sizes) < len(group):
            what = f"num_repeats: {group[0].values['path']} has several blocks of one resolution"
            config.note(f"{what}, which are one here; raise it to show its items as often")
        together.setdefault(tuple(sizes), []).append(name)
        of_dataset[name] = group
    tables = {name: {block.table for block in group} for name, group in of_dataset.items()}
    _join_regularisation(config, datasets, together)
    runs: dict[str, Any] = {}
    kind, key = ("musubi", "batch_size") if musubi else ("sdscripts", "train_batch_size")
    for number, (resolutions, members) in enumerate(together.items(), 1):
        name = f"{config.run}_{number}" if number > 1 else config.run
        batches = sorted({block.batch_size for one in members for block in of_dataset[one]})
        if len(batches) > 1:
            config.note(f"batch_size: the run {name} has one, the smallest of {batches}")
        if any("is_reg" in datasets[member] for member in members) and any(
            tables[one] != tables[other] and datasets[one]["fit"] == datasets[other]["fit"]
            for one in members
            for other in members
        ):
            why = f"the run {name} balances them over its datasets of the same buckets"
            config.note(f"is_reg: sd-scripts balances images within a block of its file; {why}")
        runs[name] = {
            "datasets": members,
            "model": spec.name,
            "resolutions": [size[0] if size[0] == size[1] else [*size] for size in resolutions],
            "trainer": {"kind": kind} | ({key: batches[0]} if batches[0] > 1 else {}),
        }
    if len(runs) > 1:
        config.note(
            "resolution: datasets of other resolutions are runs of their own "
            f"({', '.join(runs)}), which train one after the other; to train all together, give "
            "one run all datasets"
        )
    program = "musubi_tuner" if musubi else "sd_scripts"
    path = f"../{program.replace('_', '-')}"
    return {"datasets": datasets, "models": {}, "runs": runs, program: {"path": path}}


def _join_regularisation(
    config: Imported, datasets: Mapping[str, Any], together: dict[tuple[Sides, ...], list[str]]
) -> None:
    """Move regularisation images that would be a run of their own into a run of other datasets.

    `together` is resolutions of a run -> datasets.

    Raises:
        ConfigError: they share no resolution with other datasets.
    """
    regularising = [
        sizes
        for sizes, members in together.items()
        if all("is_reg" in datasets[name] for name in members)
    ]
    for sizes in regularising:
        members = together.pop(sizes)
        names = f"the regularisation images {', '.join(members)}"
        others = (other for other in together if other not in regularising)
        if (other := next((other for other in others if {*sizes} & {*other}), None)) is None:
            what = f"{names} have a resolution of their own"
            hint = "give them the resolution of the images that they are shown beside"
            raise ConfigError(what, where=config.path, hint=hint)
        together[other] += members
        config.note(f"resolution: the run shows {names} at all of its own")


def _weights(spec: Architecture, task: str | None) -> dict[str, Any]:
    folder = f"models/{spec.name}"
    if not spec.has_tasks:
        encoder = spec.encoder("text")
        networks = {network.key for network in encoder.networks} if encoder else set()
        names = spec.text_encoders or [key for key in networks if key.startswith("text")]
        return {
            "layout": "sdscripts",
            "vae": f"{folder}/vae",
            "text": [f"{folder}/{encoder_name(n)}" for n in range(max(1, len(names)))],
            "checkpoint": f"{folder}/model.safetensors",
        }
    needs = spec.version(task).needs
    keys = [file.key for file in spec.program_files if file.required or file.key in needs]
    values: dict[str, Any] = {"task": task} if task else {}
    values |= {key: f"{folder}/{key}.safetensors" for key in keys if not key.startswith("text")}
    texts = {key for key in keys if key.startswith("text")}
    places: list[Any] = [f"{folder}/text_{n + 1}.safetensors" for n in range(len(texts))]
    if spec.encodes:
        places = [{"path": path, "tokenizer": f"{folder}/tokenizer"} for path in places]
    if places:
        values["text"] = places
    return values
