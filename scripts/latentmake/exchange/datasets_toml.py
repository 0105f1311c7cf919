"""Import of a dataset file of musubi-tuner or sd-scripts: a configuration of ours for the same.

Keys, defaults and inheritance are those of musubi-tuner's dataset/config_utils.py and of
sd-scripts' library/config_util.py. Nothing in such a file is executed.

Blocks of one folder with the same settings become one dataset at several resolutions. A run has all
its datasets at all its resolutions, so datasets of other resolutions become another run.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import yaml
from pydantic import BaseModel, Field, ValidationError

from latentmake.config.architectures import ARCHITECTURES, WAN, Architecture
from latentmake.config.datasets import Captions, Dataset
from latentmake.config.fields import literal
from latentmake.config.root import parse
from latentmake.data.folders import kohya, slug
from latentmake.errors import ConfigError, unreadable
from latentmake.layouts.layout import layout_of
from latentmake.regular import read_text

_SOURCES = ("image_directory", "image_jsonl_file", "video_directory", "video_jsonl_file")
_VARIANTS = 4  # texts of each item, where a file of sd-scripts asks for random ones

Table = dict[str, Any]
Sides = tuple[int, int]

# Keys of the same name, meaning and default here.
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
_OLD = {  # of musubi-tuner
    "flux_kontext_no_resize_control": "no_resize_control",
    "qwen_image_edit_no_resize_control": "no_resize_control",
    "qwen_image_edit_control_resolution": "control_resolution",
}
_RANDOM = ("shuffle_caption", "enable_wildcard", "caption_dropout_rate", "caption_tag_dropout_rate")
_SUBSET = ("num_repeats", "flip_aug", "alpha_mask")
_BUCKETS = ("bucket_reso_steps", "min_bucket_reso", "max_bucket_reso")
_DEFAULTS = {
    name: x.default for each in (Dataset, Captions) for name, x in each.model_fields.items()
}
_HINTS = {
    "general": "write it as [general]",
    "datasets": "write it as [[datasets]]",
    "subsets": "write it as [[datasets.subsets]]",
    "resolution": "it should be a number, or a width and a height such as [960, 544]",
}


class _Keys(BaseModel, extra="allow", strict=True):
    """Keys that are read, of a file or a table in it; others are copied, or left out."""

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
        """Width and height in pixels."""
        match self.resolution:
            case [width, height]:
                return width, height
            case int(side):
                return side, side
        return None

    @property
    def fit(self) -> dict[str, Any]:
        """Our keys that say how an image is brought to a size."""
        if not self.enable_bucket:
            return {"fit": "crop"}
        return {"fit": "bucket"} | ({"bucket_no_upscale": True} if self.bucket_no_upscale else {})

    def take(self, *names: str) -> dict[str, Any]:
        """Remove some keys; return those that say something else than our default, or "" for it."""
        extra = self.model_extra or {}
        found = {name: extra.pop(name) for name in names if name in extra}
        return {name: x for name, x in found.items() if x not in ("", _DEFAULTS[name])}


class Block(NamedTuple):
    """A folder or list at one resolution.

    Attributes:
        values: keys of our dataset section.
        resolution: width and height in pixels; None where the file names none.
        batch_size: items a step.
        caches: folder that has caches of it, if one has.
        table: number of the block in a file of sd-scripts.
    """

    values: dict[str, Any]
    resolution: Sides | None
    batch_size: int
    caches: str | None
    table: int = 0

    @property
    def is_reg(self) -> bool:
        """Whether its images are for regularisation."""
        return bool(self.values.get("is_reg"))


@dataclass
class Imported:
    """A configuration of ours, made of a dataset file.

    Attributes:
        path: of the file.
        run: name of its run.
        values: of the configuration.
        notes: what differs from the file, a line each.
        left: keys that are left out.
        has_weights: whether its model's paths are those of files.
    """

    path: Path
    run: str
    values: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    left: dict[str, None] = field(default_factory=dict)
    has_weights: bool = False

    @property
    def text(self) -> str:
        """The configuration as YAML, with the notes as comments."""
        what = "Weights and folders of programs are placeholders: name yours under models."
        if self.has_weights:
            what = "The folder of the trainer is a placeholder: name yours at the end."
        head = [f"Made of {self.path}.", what, *(f"- {note}" for note in self.notes)]
        comments = "".join(f"# {' '.join(line.split())}\n" for line in head)
        options: dict[str, Any] = {"sort_keys": False, "default_flow_style": None, "width": 100}
        dumped = yaml.safe_dump(self.values, allow_unicode=True, **options)
        return f"{comments}\n{dumped}"

    def note(self, line: str) -> None:
        """Note a difference, once."""
        self.notes += [line] if line not in self.notes else []

    def keys(self, table: Table, where: str = "") -> _Keys:
        """Return the keys of a table; a ConfigError names a value of another kind."""
        try:
            return _Keys.model_validate({_OLD.get(key, key): table[key] for key in table})
        except ValidationError as error:
            first, *_ = error.errors(include_url=False)
            key = str(first["loc"][0])
            hint = _HINTS.get(key, first["msg"].replace("Input", "it"))
            place = f"{self.path}: {where}{key}"
            raise ConfigError("cannot be read", where=place, hint=hint) from None

    def leave(self, keys: _Keys) -> None:
        """Note the keys that nothing here takes; false, 0 and 0.0 ask for nothing."""
        values = keys.model_extra or {}
        self.left |= dict.fromkeys(filter(values.get, values))

    def find(self, path: str) -> Path:
        """Return the place of a path: as it is, or beside the file."""
        beside = self.path.parent / path
        return beside if beside.exists() and not Path(path).exists() else Path(path)


def imported(
    path: Path, run: str, architecture: str | None = None, task: str | None = None
) -> Imported:
    """Return the configuration that a dataset file stands for; nothing is written.

    Raises:
        ConfigError: the file is damaged, or cannot be taken over.
    """
    found = Imported(path, run)
    file = found.keys(_read(path))
    found.leave(file)
    musubi = not any("subsets" in each for each in file.datasets)
    blocks = [*(_blocks_of_musubi if musubi else _blocks_of_sdscripts)(found, file)]
    if not blocks:
        what = ": ".join(["names no dataset that can be taken over", *found.notes[-1:]])
        raise ConfigError(what, where=path, hint="name a file of musubi-tuner or sd-scripts")
    if found.left:
        found.note(f"left out, without effect here: {', '.join(found.left)}")
    spec = _architecture(found, architecture, blocks, musubi=musubi)
    found.values = _fitting(found, blocks, spec, task)
    return found


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


def _dotted(ending: str) -> str:
    return f".{ending.removeprefix('.')}"


def _blocks_of_musubi(found: Imported, file: _Keys) -> Iterator[Block]:
    for number, own in enumerate(file.datasets):
        where = f"datasets[{number}]"
        keys = found.keys({**file.general, **own}, f"{where}.")
        # Images come first there, and a folder before a list.
        key = next((key for key in _SOURCES if getattr(keys, key)), None)
        if key is None:
            found.note(f"{where}: left out, it names no images or videos")
            continue
        path = found.find(getattr(keys, key))
        if key.endswith("file"):
            found.note(f"{path}: relative paths in a list begin at the list's folder here")
        yield _block_of_musubi(found, keys, key, path)
        found.leave(keys)


def _block_of_musubi(found: Imported, keys: _Keys, key: str, path: Path) -> Block:
    values: dict[str, Any] = {"path": literal(path), "flat": True, "empty_caption": "allow"}
    video = key.startswith("video")
    if key.endswith("directory"):
        values["caption_extension"] = _dotted(keys.caption_extension or "txt")
        values |= {} if video else {"on_error": "skip"}
    if keys.control_directory:
        values["control_directory"] = literal(found.find(keys.control_directory))
    if video:
        lengths = {(frames - 1) // 4 * 4 + 1 for frames in keys.target_frames if frames > 0}
        values["target_frames"] = sorted(lengths) or [1]
    values |= keys.take(*_VIDEOS) if video else keys.fit | keys.take(*_IMAGES)
    folder = found.find(keys.cache_directory) if keys.cache_directory else path
    caches = literal(folder) if any(folder.glob("*.safetensors")) else None
    return Block(values, keys.sides or (960, 544), keys.batch_size, caches)


def _blocks_of_sdscripts(found: Imported, file: _Keys) -> Iterator[Block]:
    for number, table in enumerate(file.datasets):
        inherited = {**file.general, **table}
        seen: set[str | None] = {None}
        blocks: list[Block] = []
        for place, own in enumerate(found.keys(inherited, f"datasets[{number}].").subsets):
            where = f"datasets[{number}].subsets[{place}]"
            keys = found.keys({**inherited, **own}, f"{where}.")
            source = keys.metadata_file or keys.image_dir
            if source in seen:  # of two of one folder the first counts there
                why = "an earlier one is the same" if source else "it names no image_dir"
                found.note(f"{where}: left out, {why}")
                continue
            seen.add(source)
            blocks.append(_block_of_sdscripts(found, keys, where)._replace(table=number))
            found.leave(keys)
        if not any(block.is_reg for block in blocks):
            yield from blocks
        elif all(block.is_reg for block in blocks):
            why = "sd-scripts shows regularisation images beside others of their block only"
            found.note(f"datasets[{number}]: left out, {why}")
        else:
            found.note("is_reg: set `prior_loss_weight` of the trainer as on your command line")
            yield from blocks


def _block_of_sdscripts(found: Imported, keys: _Keys, where: str) -> Block:
    place = f"{found.path}: {where}"
    if keys.conditioning_data_dir is not None:
        hint = "take the block out of a copy of the file"
        raise ConfigError("is a ControlNet dataset, which has no use here", where=place, hint=hint)
    if keys.image_dir is None:
        hint = "add image_dir, the folder that holds all of its images"
        raise ConfigError("names no image_dir beside its metadata_file", where=place, hint=hint)
    folder = found.find(keys.image_dir)
    values: dict[str, Any] = {"path": literal(folder)}
    if keys.metadata_file:
        values |= {"metadata_file": literal(found.find(keys.metadata_file))}
        values |= {"caption_extension": ".none", "empty_caption": "allow", "on_error": "skip"}
    else:
        ending, tokens = _dotted(keys.caption_extension or "caption"), keys.class_tokens
        values |= {"flat": True, "caption_extension": ending}
        values |= {"class_tokens": tokens} if tokens else {"missing_caption": "empty"}
    captions = keys.take(*_CAPTIONS)
    if asked := ", ".join(key for key in _RANDOM if key in captions):
        captions = {"variants": _VARIANTS, **captions}
        found.note(
            f"{asked}: sd-scripts draws anew in each step; here each item has {_VARIANTS} texts "
            "that are drawn once and cached: raise captions.variants for more"
        )
    values |= {"captions": captions} if captions else {}
    values |= keys.fit | keys.take(*_SUBSET) | ({"is_reg": True} if keys.is_reg else {})
    if keys.enable_bucket:
        values |= {"bucket_reso_steps": 64, **keys.take(*_BUCKETS)}
    caches = values["path"] if any(folder.rglob("*.npz")) else None
    return Block(values, keys.sides, keys.batch_size, caches)


def _architecture(
    found: Imported, name: str | None, blocks: Sequence[Block], *, musubi: bool
) -> Architecture:
    """Return the architecture of a name, or of the caches of some blocks; raises ConfigError."""
    usual = WAN if musubi else ARCHITECTURES["sdxl"]
    rows = [row for row in ARCHITECTURES.values() if (row.scripts is not None) == musubi]
    named = {row.name: row for row in [usual, *rows]}
    if name in named:
        return named[name]
    if name is not None:
        trainer = "musubi-tuner" if musubi else "sd-scripts"
        what = f"{name} is no architecture of {trainer}, whose file this is"
        raise ConfigError(what, where="--architecture", hint=f"use one of {', '.join(named)}")
    for folder in dict.fromkeys(filter(None, (block.caches for block in blocks))):
        for row in named.values():
            if any(Path(folder.replace("$$", "$")).rglob(f"*{_ending(row)}")):
                known = f"as the caches in {folder} are"
                found.note(f"models: the architecture is {row.name}, {known}")
                return row
    found.note(f"models: the architecture is {usual.name}, the usual one; else use --architecture")
    return usual


def _ending(row: Architecture) -> str:
    if row.scripts is not None:
        return f"x[0-9][0-9][0-9][0-9]_{row.scripts.suffix}.safetensors"
    return layout_of(f"sdscripts-{row.name}").latents_ending


def _size(found: Imported, block: Block, spec: Architecture) -> Sides:
    """Return a block's resolution, with sides that a run may have."""
    if block.resolution is None:
        side = 1024 if spec.caches_text else 512
        found.note(f"resolution: missing, {side} is used in place of sd-scripts' --resolution")
        return side, side
    width, height = (max(side // spec.side, 1) * spec.side for side in block.resolution)
    if (width, height) != block.resolution:
        found.note(
            f"resolution: sides are multiples of {spec.side} here: {width} x {height} in place of "
            f"{block.resolution[0]} x {block.resolution[1]}, whose latents are of other sizes"
        )
    return width, height


def _name(path: str, taken: Collection[str]) -> str:
    """Return the name of a dataset, as `init` names its folder: `10_sks man` is `sks_man`."""
    place = Path(path.replace("\\", "/"))
    last = place.stem if place.suffix.lower() in (".jsonl", ".json") else place.name
    _, words = kohya(place) or (1, last)
    base = slug(words)
    numbered = (f"{base}_{number}" if number > 1 else base for number in count(1))
    return next(each for each in numbered if each not in taken)


def _fitting(
    found: Imported, blocks: Sequence[Block], spec: Architecture, task: str | None
) -> dict[str, Any]:
    """Return the first configuration that loads, over the model's tasks; raises ConfigError."""
    values = _values(found, blocks, spec)
    every = [name or None for name in spec.scripts.versions] if spec.scripts else [None]
    faults: list[ConfigError] = []
    for each in [task] if task else every:
        values["models"] = {spec.name: {"architecture": spec.name, **_weights(spec, each)}}
        try:
            parse(values)
        except ConfigError as error:
            faults.append(error)
            continue
        if each != task:
            names = ", ".join(filter(None, every))
            found.note(f"models: the task is {each}; else use --task, with one of {names}")
        return values
    what, hint = f"does not fit {spec.name}: {faults[0]}", "name another --architecture or --task"
    raise ConfigError(what, where=found.path, hint=hint)


def _values(found: Imported, blocks: Sequence[Block], spec: Architecture) -> dict[str, Any]:
    """Return datasets and runs of some blocks: those of the same resolutions train together."""
    musubi, alike = spec.scripts is not None, dict[str, list[Block]]()
    for block in blocks:
        alike.setdefault(json.dumps(block.values, sort_keys=True), []).append(block)
    datasets: dict[str, Any] = {}
    together: dict[tuple[Sides, ...], dict[str, list[int]]] = {}  # dataset -> batch sizes
    tables: dict[str, set[int]] = {}  # dataset -> blocks of the file
    for several in alike.values():
        name = _name(several[0].values["path"], datasets)
        caches = list(dict.fromkeys(block.caches for block in several if block.caches))
        datasets[name] = several[0].values | ({"adopt_from": caches} if caches else {})
        sizes = sorted({_size(found, block, spec) for block in several})
        batches = [block.batch_size for block in several]
        together.setdefault(tuple(sizes), {})[name] = batches
        tables[name] = {block.table for block in several}
    _join_regularisation(found, datasets, together)
    runs: dict[str, Any] = {}
    kind, key = ("musubi", "batch_size") if musubi else ("sdscripts", "train_batch_size")
    for number, (resolutions, members) in enumerate(together.items(), 1):
        name = f"{found.run}_{number}" if number > 1 else found.run
        batches = sorted({each for several in members.values() for each in several})
        if len(batches) > 1:
            found.note(f"batch_size: the run {name} has one, the smallest of {batches}")
        if any(datasets[each].get("is_reg") for each in members) and any(
            tables[each] != tables[other] and datasets[each]["fit"] == datasets[other]["fit"]
            for each in members
            for other in members
        ):
            why = f"the run {name} balances them over its datasets of the same buckets"
            found.note(f"is_reg: sd-scripts balances images within a block of its file; {why}")
        runs[name] = {
            "datasets": [*members],
            "model": spec.name,
            "resolutions": [w if w == h else [w, h] for w, h in resolutions],
            "trainer": {"kind": kind} | ({key: batches[0]} if batches[0] > 1 else {}),
        }
    if len(runs) > 1:
        found.note(
            "resolution: datasets of other resolutions are runs of their own "
            f"({', '.join(runs)}), which train one after the other; to train all together, give "
            "one run all datasets"
        )
    program = "musubi_tuner" if musubi else "sd_scripts"
    path = f"../{program.replace('_', '-')}"
    return {"datasets": datasets, "models": {}, "runs": runs, program: {"path": path}}


def _join_regularisation(
    found: Imported,
    datasets: Mapping[str, Any],
    together: dict[tuple[Sides, ...], dict[str, list[int]]],
) -> None:
    """Put datasets of regularisation images into a run of others, one with their resolutions.

    `together` is resolutions -> dataset -> batch sizes, of each run.
    """
    alone = [
        sizes
        for sizes, members in together.items()
        if all(datasets[name].get("is_reg") for name in members)
    ]
    for sizes in alone:
        members = together.pop(sizes)
        home = next(other for other in together if other not in alone and {*sizes} & {*other})
        together[home].update(members)
        names = ", ".join(members)
        found.note(f"resolution: the run shows the regularisation images {names} at all of its own")


def _weights(spec: Architecture, task: str | None) -> dict[str, Any]:
    folder, scripts = f"models/{spec.name}", spec.scripts
    if scripts is None:
        strategies = spec.strategies and spec.strategies.text
        networks = {each.key for each in strategies.networks} if strategies else set()
        names = spec.text_encoders or [key for key in networks if key.startswith("text")]
        encoders = ["text_encoder", *(f"text_encoder_{n}" for n in range(2, len(names) + 1))]
        return {
            "layout": "sdscripts",
            "vae": f"{folder}/vae",
            "text": [f"{folder}/{each}" for each in encoders],
            "checkpoint": f"{folder}/model.safetensors",
        }
    needs = scripts.versions[task or ""].needs if (task or "") in scripts.versions else ()
    files = (*scripts.latents.files, *scripts.text.files, *scripts.training.files)
    keys = [each.key for each in files if each.required or each.key in needs]
    found: dict[str, Any] = {"task": task} if task else {}
    found |= {key: f"{folder}/{key}.safetensors" for key in keys if not key.startswith("text")}
    texts = {key for key in keys if key.startswith("text")}
    places: list[Any] = [f"{folder}/text_{n + 1}.safetensors" for n in range(len(texts))]
    if spec.encodes:
        places = [{"path": each, "tokenizer": f"{folder}/tokenizer"} for each in places]
    return found | ({"text": places} if places else {})
