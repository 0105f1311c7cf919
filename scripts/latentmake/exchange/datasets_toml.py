"""Import of a dataset file of musubi-tuner or sd-scripts: a configuration of ours for the same.

Keys, defaults and inheritance are those of musubi-tuner's dataset/config_utils.py and of
sd-scripts' library/config_util.py. Nothing in such a file is executed.

Blocks of one folder with the same settings become one dataset at several resolutions. A run has all
its datasets at all its resolutions, so datasets of other resolutions become another run.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import yaml
from pydantic import BaseModel, Field, ValidationError

from latentmake.config.architectures import ARCHITECTURES, WAN, Architecture
from latentmake.config.root import parse
from latentmake.errors import ConfigError, nearest, unreadable
from latentmake.files import atomic
from latentmake.layouts.layout import layout_of

_SOURCES = ("image_directory", "image_jsonl_file", "video_directory", "video_jsonl_file")
_VARIANTS = 4  # texts of each item, where a file of sd-scripts asks for random ones

Table = dict[str, Any]
Sides = tuple[int, int]

# Keys of the same name and meaning here -> their defaults there, which are left out.
_IMAGES = {
    "num_repeats": 1,
    "multiple_target": False,
    "no_resize_control": False,
    "control_resolution": None,
    "fp_latent_window_size": 9,
    "fp_1f_clean_indices": None,
    "fp_1f_target_index": None,
    "fp_1f_no_post": False,
}
_VIDEOS = {
    "num_repeats": 1,
    "frame_extraction": "head",
    "frame_stride": 1,
    "frame_sample": 1,
    "max_frames": 129,
    "source_fps": None,
    "fp_latent_window_size": 9,
}
_CAPTIONS = {
    "shuffle_caption": False,
    "caption_separator": ",",
    "keep_tokens": 0,
    "keep_tokens_separator": "",
    "secondary_separator": "",
    "enable_wildcard": False,
    "caption_prefix": "",
    "caption_suffix": "",
    "caption_dropout_rate": 0,
    "caption_tag_dropout_rate": 0,
}
_OLD = {  # of musubi-tuner
    "flux_kontext_no_resize_control": "no_resize_control",
    "qwen_image_edit_no_resize_control": "no_resize_control",
    "qwen_image_edit_control_resolution": "control_resolution",
}
_RANDOM = ("shuffle_caption", "enable_wildcard", "caption_dropout_rate", "caption_tag_dropout_rate")
_SUBSET = {"num_repeats": 1, "flip_aug": False, "alpha_mask": False}
_BUCKETS = {"min_bucket_reso": 256, "max_bucket_reso": 1024}
_HINTS = {
    "general": "write it as [general]",
    "datasets": "write it as [[datasets]]",
    "subsets": "write it as [[datasets.subsets]]",
    "resolution": "it should be a number, or a width and a height such as [960, 544]",
}


class _Keys(BaseModel, extra="allow", strict=True):
    """Keys that are read of a folder or list; the others are in the tables above, or left out."""

    resolution: int | Annotated[list[int], Field(min_length=2, max_length=2)] | None = None
    batch_size: int = 1
    enable_bucket: bool = False
    bucket_no_upscale: bool = False
    caption_extension: str | None = None

    @property
    def sides(self) -> Sides | None:
        """Width and height in pixels."""
        match self.resolution:
            case [width, height]:
                return width, height
            case int(side):
                return side, side
        return None

    def take(self, defaults: Table) -> dict[str, Any]:
        """Remove some keys; return those that have another value than their default."""
        extra = self.model_extra or {}
        found = {key: extra.pop(key, default) for key, default in defaults.items()}
        return {key: value for key, value in found.items() if value != defaults[key]}


class _Musubi(_Keys):
    image_directory: str | None = None
    image_jsonl_file: str | None = None
    video_directory: str | None = None
    video_jsonl_file: str | None = None
    cache_directory: str | None = None
    control_directory: str | None = None
    target_frames: list[int] = []


class _SdScripts(_Keys):
    image_dir: str | None = None
    metadata_file: str | None = None
    class_tokens: str | None = None
    bucket_reso_steps: int | None = None
    conditioning_data_dir: str | None = None
    cache_info: bool = False


class _File(BaseModel, extra="allow"):
    general: Table = {}
    datasets: list[Table] = []


class _Subsets(BaseModel, extra="allow"):
    subsets: list[Table] = []


_AnyKeys = TypeVar("_AnyKeys", bound=BaseModel)


class Block(NamedTuple):
    """A folder or list at one resolution.

    Attributes:
        values: keys of our dataset section.
        resolution: width and height in pixels; None where the file names none.
        batch_size: items a step.
        caches: folder that has caches of it, if one has.
    """

    values: dict[str, Any]
    resolution: Sides | None
    batch_size: int
    caches: str | None


@dataclass
class Imported:
    """A configuration of ours, made of a dataset file.

    Attributes:
        path: of the file.
        run: name of its run.
        values: of the configuration.
        notes: what differs from the file, a line each.
        left: keys that are left out.
        written: lists that the configuration names: path -> content.
    """

    path: Path
    run: str
    values: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    left: dict[str, None] = field(default_factory=dict)
    written: dict[str, bytes] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The configuration as YAML, with the notes as comments."""
        head = [
            f"Made of {self.path}.",
            "Weights and folders of programs are placeholders: name yours under models.",
            *(f"- {note}" for note in self.notes),
        ]
        comments = "".join(f"# {' '.join(line.split())}\n" for line in head)
        dumped = yaml.safe_dump(
            self.values, sort_keys=False, default_flow_style=None, width=100, allow_unicode=True
        )
        return f"{comments}\n{dumped}"

    def note(self, line: str) -> None:
        """Note a difference, once."""
        self.notes += [line] if line not in self.notes else []

    def keys(self, model: type[_AnyKeys], table: Table, where: str = "") -> _AnyKeys:
        """Return the keys of a table.

        Raises:
            ConfigError: a value is of another kind than its key's.
        """
        try:
            return model.model_validate({_OLD.get(key, key): table[key] for key in table})
        except ValidationError as error:
            first, *_ = error.errors(include_url=False)
            key = str(first["loc"][0])
            hint = _HINTS.get(key, first["msg"].replace("Input", "it"))
            place = f"{self.path}: {where}{key}"
            raise ConfigError("cannot be read", where=place, hint=hint) from None

    def leave(self, keys: BaseModel) -> None:
        """Note the keys that nothing here takes; false, 0 and 0.0 ask for nothing."""
        values = keys.model_extra or {}
        self.left |= dict.fromkeys(filter(values.get, values))

    def find(self, path: str) -> Path:
        """Return the place of a path: as it is, or beside the file."""
        beside = self.path.parent / path
        return beside if beside.exists() and not Path(path).exists() else Path(path)

    def write(self, source: Path, text: str) -> str:
        """Have a list written; return its path."""
        data = text.encode()
        names = (f"{source.stem}_{n}" if n > 1 else source.stem for n in count(1))
        paths = (f"runs/{self.run}/{name}.jsonl" for name in names)
        return next(path for path in paths if self.written.setdefault(path, data) == data)


def imported(
    path: Path, run: str, architecture: str | None = None, task: str | None = None
) -> Imported:
    """Return the configuration that a dataset file stands for; nothing is written.

    Raises:
        ConfigError: the file is damaged, or cannot be taken over.
    """
    found = Imported(path, run)
    file = found.keys(_File, _read(path))
    found.leave(file)
    musubi = not any("subsets" in each for each in file.datasets)
    blocks = [*(_blocks_of_musubi if musubi else _blocks_of_sdscripts)(found, file)]
    if not blocks:
        what = "names no dataset that can be taken over"
        raise ConfigError(what, where=path, hint="name a file of musubi-tuner or sd-scripts")
    if found.left:
        found.note(f"left out, without effect here: {', '.join(found.left)}")
    spec = _architecture(found, architecture, blocks, musubi=musubi)
    found.values = _fitting(found, blocks, spec, task)
    return found


def write(path: Path, data: bytes) -> None:
    """Write a file of an import.

    Raises:
        ConfigError: another file is there, which its user may have edited.
    """
    if path.exists() and path.read_bytes() != data:
        raise ConfigError("is there already", where=path, hint="rename or remove it")
    atomic.write(path, data)


def _read(path: Path) -> dict[str, Any]:
    hint = "name a dataset file of musubi-tuner or sd-scripts"
    if path.suffix.lower() != ".toml":
        raise ConfigError("is no .toml file", where=path, hint=hint)
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise unreadable(error, path) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"is not TOML: {error}", where=path, hint="correct it") from None


def _as_path(path: Path) -> str:
    """Return a path for our configuration, which replaces `~` and `$NAME`."""
    text = str(path).replace("$", "$$")
    return f"./{text}" if text.startswith("~") else text


def _dotted(ending: str) -> str:
    return f".{ending.removeprefix('.')}"


def _blocks_of_musubi(found: Imported, file: _File) -> Iterator[Block]:
    for number, own in enumerate(file.datasets):
        where = f"datasets[{number}]"
        keys = found.keys(_Musubi, {**file.general, **own}, f"{where}.")
        # Images come first there, and a folder before a list.
        key = next((key for key in _SOURCES if getattr(keys, key)), None)
        if key is None:
            found.note(f"{where}: left out, it names no images or videos")
            continue
        path = found.find(getattr(keys, key))
        video, listed = key.startswith("video"), key.endswith("file")
        yield _block_of_musubi(found, keys, path, video=video, listed=listed)
        found.leave(keys)


def _block_of_musubi(
    found: Imported, keys: _Musubi, path: Path, *, video: bool, listed: bool
) -> Block:
    values: dict[str, Any] = {"path": _as_path(path), "flat": True, "empty_caption": "allow"}
    if listed:
        values["path"] = _list(found, path, "video_path" if video else "image_path")
    else:
        values["caption_extension"] = _dotted(keys.caption_extension or "txt")
        values |= {} if video else {"on_error": "skip"}
    if keys.control_directory:
        values["control_directory"] = _as_path(found.find(keys.control_directory))
    if video:
        lengths = {(frames - 1) // 4 * 4 + 1 for frames in keys.target_frames if frames > 0}
        values["target_frames"] = sorted(lengths) or [1]
    else:
        values |= _fit(keys)
    values |= keys.take(_VIDEOS if video else _IMAGES)
    folder = found.find(keys.cache_directory) if keys.cache_directory else path
    caches = _as_path(folder) if any(folder.glob("*.safetensors")) else None
    return Block(values, keys.sides or (960, 544), keys.batch_size, caches)


def _fit(keys: _Keys) -> dict[str, Any]:
    if not keys.enable_bucket:
        return {"fit": "crop"}
    return {"fit": "bucket"} | ({"bucket_no_upscale": True} if keys.bucket_no_upscale else {})


def _list(found: Imported, path: Path, kind: str) -> str:
    """Return the path of a list for our configuration.

    Relative paths in it begin at the folder in which musubi-tuner's scripts start, and columns that
    mean something here mean nothing there: a list that has some is written anew.
    """

    def entries(row: Table) -> Iterator[tuple[str, Any]]:
        for key, value in row.items():
            if key == "caption":
                yield key, value
            elif key.startswith((kind, "control_path")) and isinstance(value, str):
                yield kind if key == f"{kind}_0" else key, str(found.find(value).absolute())

    try:
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
        made = [dict(entries(row)) for row in rows]
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return _as_path(path)  # the plan says what is wrong with it
    if made == rows:
        return _as_path(path)
    lines = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in made)
    written = found.write(path, lines)
    found.note(f"{path} is read otherwise here, and is written anew as {written}")
    return written


def _blocks_of_sdscripts(found: Imported, file: _File) -> Iterator[Block]:
    for number, table in enumerate(file.datasets):
        dataset = found.keys(_Subsets, {**file.general, **table}, f"datasets[{number}].")
        seen: set[str | None] = {None}
        for place, own in enumerate(dataset.subsets):
            where = f"datasets[{number}].subsets[{place}]"
            keys = found.keys(_SdScripts, {**(dataset.model_extra or {}), **own}, f"{where}.")
            source = keys.metadata_file or keys.image_dir
            if source in seen:  # of two of one folder the first counts there
                why = "an earlier one is the same" if source else "it names no image_dir"
                found.note(f"{where}: left out, {why}")
                continue
            seen.add(source)
            yield _block_of_sdscripts(found, keys, where)
            found.leave(keys)


def _block_of_sdscripts(found: Imported, keys: _SdScripts, where: str) -> Block:
    place = f"{found.path}: {where}"
    if keys.conditioning_data_dir is not None:
        hint = "take the block out of a copy of the file"
        raise ConfigError("is a ControlNet dataset, which has no use here", where=place, hint=hint)
    if keys.image_dir is None:
        hint = "add image_dir, the folder that holds all of its images"
        raise ConfigError("names no image_dir beside its metadata_file", where=place, hint=hint)
    folder = found.find(keys.image_dir)
    values: dict[str, Any] = {"path": _as_path(folder)}
    if keys.metadata_file:
        values |= {"metadata_file": _as_path(found.find(keys.metadata_file))}
        values |= {"caption_extension": ".none", "empty_caption": "allow", "on_error": "skip"}
    else:
        ending, tokens = _dotted(keys.caption_extension or "caption"), keys.class_tokens
        values |= {"flat": True, "caption_extension": ending}
        values |= {"class_tokens": tokens} if tokens else {"missing_caption": "empty"}
    captions = keys.take(_CAPTIONS)
    if asked := ", ".join(key for key in _RANDOM if key in captions):
        captions = {"variants": _VARIANTS, **captions}
        found.note(
            f"{asked}: sd-scripts draws anew in each step; here each item has {_VARIANTS} texts "
            "that are drawn once and cached: raise captions.variants for more"
        )
    values |= {"captions": captions} if captions else {}
    values |= _fit(keys) | keys.take(_SUBSET)
    if keys.enable_bucket:
        values |= {"bucket_reso_steps": keys.bucket_reso_steps or 64, **keys.take(_BUCKETS)}
    caches = values["path"] if any(folder.rglob("*.npz")) else None
    return Block(values, keys.sides, keys.batch_size, caches)


def _architecture(
    found: Imported, name: str | None, blocks: Sequence[Block], *, musubi: bool
) -> Architecture:
    """Return the architecture of a name, or of the caches of some blocks.

    Raises:
        ConfigError: the trainer of the file does not train it.
    """
    usual = WAN if musubi else ARCHITECTURES["sdxl"]
    rows = [row for row in ARCHITECTURES.values() if (row.scripts is not None) == musubi]
    named = {row.name: row for row in [usual, *rows]}
    if name in named:
        return named[name]
    if name is not None:
        trainer = "musubi-tuner" if musubi else "sd-scripts"
        what = f"{name} is no architecture of {trainer}, whose file this is"
        guess = nearest(name.replace("-", "_"), [WAN.name, *ARCHITECTURES])
        hint = f"did you mean {guess}?" if guess in named else f"use one of {', '.join(named)}"
        raise ConfigError(what, where="--architecture", hint=hint)
    for folder in dict.fromkeys(filter(None, (block.caches for block in blocks))):
        for row in named.values():
            if any(Path(folder.replace("$$", "$")).rglob(f"*{_ending(row)}")):
                known = f"as the caches in {folder} are"
                found.note(f"models: the architecture is {row.name}, {known}")
                return row
    found.note(f"models: the architecture is {usual.name}, the usual one; else use --architecture")
    return usual


def _ending(row: Architecture) -> str:
    """Return the end of the names of an architecture's caches of latents."""
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


def _name(path: str) -> str:
    """Return a dataset's name, from the name of its folder or list."""
    place = Path(path.replace("\\", "/"))
    last = place.stem if place.suffix.lower() in (".jsonl", ".json") else place.name
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", last).lstrip("_.-") or "dataset"


def _fitting(
    found: Imported, blocks: Sequence[Block], spec: Architecture, task: str | None
) -> dict[str, Any]:
    """Return the values of the first configuration that loads, over the tasks of the model.

    Raises:
        ConfigError: none does.
    """
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
    runs: dict[frozenset[Sides], dict[str, Any]] = {}
    batches: dict[str, set[int]] = {}
    for several in alike.values():
        base = _name(several[0].values["path"])
        numbered = (f"{base}_{number}" if number > 1 else base for number in count(1))
        name = next(each for each in numbered if each not in datasets)
        caches = list(dict.fromkeys(block.caches for block in several if block.caches))
        datasets[name] = several[0].values | ({"adopt_from": caches} if caches else {})
        sizes = list(dict.fromkeys(_size(found, block, spec) for block in several))
        run: dict[str, Any] = {"datasets": [], "model": spec.name}
        run["resolutions"] = [w if w == h else [w, h] for w, h in sizes]
        run["trainer"] = {"kind": "musubi" if musubi else "sdscripts"}
        runs.setdefault(frozenset(sizes), run)["datasets"].append(name)
        batches[name] = {block.batch_size for block in several}
    named = {f"{found.run}_{n}" if n > 1 else found.run: x for n, x in enumerate(runs.values(), 1)}
    if len(named) > 1:
        found.note(
            "resolution: datasets of other resolutions are runs of their own "
            f"({', '.join(named)}), which train one after the other; to train all together, give "
            "one run all datasets"
        )
    for name, run in named.items():
        several_sizes = set().union(*(batches[dataset] for dataset in run["datasets"]))
        if len(several_sizes) > 1:
            asked = sorted(several_sizes)
            found.note(f"batch_size: the run {name} has one, the smallest of {asked}")
        if (least := min(several_sizes)) > 1:
            run["trainer"]["batch_size" if musubi else "train_batch_size"] = least
    program = "musubi_tuner" if musubi else "sd_scripts"
    path = f"../{program.replace('_', '-')}"
    return {"datasets": datasets, "models": {}, "runs": named, program: {"path": path}}


def _weights(spec: Architecture, task: str | None) -> dict[str, Any]:
    """Return the keys of a model that name its layout, task and files."""
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
