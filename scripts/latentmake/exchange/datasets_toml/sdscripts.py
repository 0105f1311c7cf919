"""sd-scripts' dataset files, in the words of our configuration.

Keys, defaults and how they are inherited are those of its library/config_util.py; what it makes of
them is in `DreamBoothDataset` and `FineTuningDataset` of its library/train_util.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from latentmake.errors import ConfigError
from latentmake.exchange.datasets_toml.document import (
    Keys,
    Resolution,
    checked,
    general_of,
    tables,
)
from latentmake.exchange.datasets_toml.folders import look_into
from latentmake.exchange.datasets_toml.metadata import read_metadata
from latentmake.exchange.datasets_toml.reader import Reader
from latentmake.exchange.datasets_toml.sections import Block

__all__ = ["RESOLUTION", "SUBSETS", "VARIANTS", "blocks_of"]

_TRAINER = "sd-scripts"
SUBSETS = "subsets"
"""Key of a dataset's folders, which tells its files from musubi-tuner's."""
RESOLUTION = (0, 0)
"""Stands for a missing one: sd-scripts takes that of its command line."""
VARIANTS = 4
"""Texts of each item where a file asks for random ones, which sd-scripts draws anew each time."""

_CAPTION_KEYS = (
    *("shuffle_caption", "caption_separator", "keep_tokens", "keep_tokens_separator"),
    *("secondary_separator", "enable_wildcard", "caption_prefix", "caption_suffix"),
    *("caption_dropout_rate", "caption_tag_dropout_rate"),
)
# Keys without a counterpart: why, and what to do.
_LEFT_OUT = {
    "color_aug": ("changes pixels anew in each step, which cached latents cannot", "leave it out"),
    "random_crop": ("cuts anew in each step, which cached latents cannot", "leave it out"),
    "face_crop_aug_range": ("cuts anew in each step, which cached latents cannot", "leave it out"),
    "resize_interpolation": ("images are scaled by area and by Lanczos here", "leave it out"),
    "custom_attributes": ("has no counterpart here", "give it to the trainer otherwise"),
    "network_multiplier": ("has no counterpart here", "give it to the trainer otherwise"),
    "validation_split": ("this trainer can hold out nothing here", "make a dataset of its own"),
    "validation_seed": ("this trainer can hold out nothing here", "make a dataset of its own"),
    "caption_dropout_every_n_epochs": (
        "its trainer chooses no text by epoch where text is cached",
        "use caption_dropout_rate",
    ),
    "token_warmup_step": (
        "its trainer chooses no text by step where text is cached",
        "use caption_tag_dropout_rate",
    ),
    "token_warmup_min": ("means nothing without token_warmup_step", "leave it out"),
}
_SILENT = ("cache_info",)  # it saves time there and changes nothing


class _Subset(Keys):
    """Keys that a subset may have, inherit from its dataset, or from [general]."""

    num_repeats: int = 1
    shuffle_caption: bool = False
    caption_separator: str = Field(",", min_length=1)
    keep_tokens: int = Field(0, ge=0)
    keep_tokens_separator: str | None = None
    secondary_separator: str | None = None
    enable_wildcard: bool = False
    caption_prefix: str | None = None
    caption_suffix: str | None = None
    caption_dropout_rate: float = 0.0
    caption_tag_dropout_rate: float = 0.0
    flip_aug: bool = False
    alpha_mask: bool = False
    caption_extension: str = ".caption"
    class_tokens: str | None = None
    image_dir: str | None = None
    metadata_file: str | None = None
    is_reg: bool = False


class _Dataset(Keys):
    """Keys of [[datasets]], or inherited from [general]."""

    resolution: Resolution | None = None
    batch_size: int = Field(1, ge=1)
    enable_bucket: bool = False
    min_bucket_reso: int = 256
    max_bucket_reso: int = 1024
    bucket_reso_steps: int = Field(64, ge=8)
    bucket_no_upscale: bool = False


_OWN = {"image_dir", "metadata_file", "is_reg"}  # of a subset alone


def blocks_of(values: Mapping[str, Any], reader: Reader) -> list[Block]:
    """Return the blocks of a file.

    Raises:
        ConfigError: a value is of another type, or a folder cannot be read.
    """
    reader.unknown("file", [x for x in values if x not in ("general", "datasets")], _TRAINER)
    general = general_of(values, reader.file)
    _sort_out(general, reader, "general", subset=False)
    found: list[Block] = []
    for where, table in tables(values, "datasets", f"{reader.file}: "):
        own = {key: value for key, value in table.items() if key != SUBSETS}
        _sort_out(own, reader, where, subset=False)
        shared = general.keys() - own.keys()
        kept = _kept(_Dataset, general, own)
        dataset = checked(_Dataset, kept, file=reader.file, where=where, inherited=shared)
        made: list[tuple[_Subset, Block]] = []
        seen: set[str] = set()
        for place, each in tables(table, SUBSETS, f"{reader.file}: {where}."):
            whole = f"{where}.{place}"
            if "conditioning_data_dir" in each:
                raise ConfigError(
                    "is a ControlNet dataset, whose training is not known here",
                    where=f"{reader.file}: {whole}.conditioning_data_dir",
                    hint="take the block out of a copy of the file",
                )
            _sort_out(each, reader, whole, subset=True)
            subset = checked(
                _Subset, _kept(_Subset, general, own, each), file=reader.file, where=whole
            )
            block = _block(subset, dataset, whole, reader, seen)
            if block is not None:
                made.append((subset, block))
        _balance(made, reader)
        found += [block for _, block in made]
    return found


def _sort_out(table: Mapping[str, Any], reader: Reader, where: str, *, subset: bool) -> None:
    """Note the keys of a table that are left out."""
    known = {*_Subset.model_fields} if subset else {*_Subset.model_fields} - _OWN
    known |= set() if subset else {*_Dataset.model_fields}
    for key, value in table.items():
        if key in _LEFT_OUT:
            if value:  # false, 0 and 0.0 ask for nothing
                reader.note(f"{where}.{key}", *_LEFT_OUT[key])
        elif key not in known and key not in _SILENT:
            reader.unknown(where, [key], _TRAINER)


def _kept(kind: type[Keys], *levels: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a section, of the lowest level that has each."""
    found: dict[str, Any] = {}
    for number, level in enumerate(levels):
        for key, value in level.items():
            inherited = number < len(levels) - 1 and key in _OWN
            if key in kind.model_fields and value is not None and not inherited:
                number_needed = kind.model_fields[key].annotation is float
                found[key] = float(value) if number_needed and type(value) is int else value
    return found


def _block(
    subset: _Subset, dataset: _Dataset, where: str, reader: Reader, seen: set[str]
) -> Block | None:
    source = subset.metadata_file or subset.image_dir
    if source is None:
        reader.note(where, "names no image_dir, and is left out", "name it there")
        return None
    if source in seen:
        what = "is the same as one before, which counts alone"
        reader.note(where, what, "take it out")
        return None
    seen.add(source)
    if subset.num_repeats < 1:
        what = "trains on nothing, and the subset is left out"
        reader.note(f"{where}.num_repeats", what, "set it to 1 or more")
        return None
    values: dict[str, Any] = {}
    captions = _captions(subset, where, reader)
    if subset.metadata_file is None:
        _folder(subset, where, reader, values, captions)
    else:
        _listed(subset, where, reader, values)
    if captions:
        values["captions"] = captions
    values |= _sizes(dataset)
    for key in ("flip_aug", "alpha_mask"):
        if getattr(subset, key):
            values[key] = True
    if subset.num_repeats != 1:
        values["num_repeats"] = subset.num_repeats
    folder = values["path"].replace("$$", "$")
    caches = [values["path"]] if any(Path(folder).rglob("*.npz")) else []
    return Block(where, values, dataset.resolution or RESOLUTION, dataset.batch_size, caches)


def _sizes(dataset: _Dataset) -> dict[str, Any]:
    """Return the keys that say how images are brought to size."""
    if not dataset.enable_bucket:
        return {"fit": "crop"}
    found: dict[str, Any] = {"fit": "bucket", "bucket_reso_steps": dataset.bucket_reso_steps}
    for key in ("min_bucket_reso", "max_bucket_reso", "bucket_no_upscale"):
        if getattr(dataset, key) != _Dataset.model_fields[key].default:
            found[key] = getattr(dataset, key)
    return found


def _captions(subset: _Subset, where: str, reader: Reader) -> dict[str, Any]:
    """Return the section of captions."""
    found: dict[str, Any] = {}
    for key in _CAPTION_KEYS:
        value = getattr(subset, key)
        if value not in (None, "") and value != _Subset.model_fields[key].default:
            found[key] = value
    for key in ("caption_dropout_rate", "caption_tag_dropout_rate"):
        if found.get(key, 0) >= 1:
            del found[key]
            what = "leaves nothing of any caption, and is left out"
            reader.note(f"{where}.{key}", what, "set a share below 1")
    random = ("shuffle_caption", "enable_wildcard", *_CAPTION_KEYS[-2:])
    if asked := [key for key in random if found.get(key)]:
        found = {"variants": VARIANTS, **found}
        what = f"{', '.join(asked)}: {_TRAINER} draws anew each time an item is seen, here each "
        what += f"item has {VARIANTS} texts that are drawn once and cached"
        reader.note(where, what, "raise captions.variants for more")
    return found


def _folder(
    subset: _Subset, where: str, reader: Reader, values: dict[str, Any], captions: dict[str, Any]
) -> None:
    """Set the keys of a DreamBooth subset: a folder with caption files or class tokens."""
    path = reader.places.find(subset.image_dir or "")
    ending = subset.caption_extension
    ending = ending if ending.startswith(".") else f".{ending}"
    values |= {"path": reader.places.written(path), "caption_extension": ending}
    folder = look_into(path, ending, video=False)
    reader.differences(where, values, folder, _TRAINER)
    reader.twins(where, folder)
    if folder.blank:
        what = f"{folder.blank[0]} is empty, and {_TRAINER} would stop there"
        reader.note(where, what, "empty_caption is allow here; write a caption or take it out")
    if not folder.without and Path(path).is_dir():
        return
    if subset.class_tokens is None:
        values["missing_caption"] = "empty"
        if folder.without:
            what = f"{len(folder.without)} of {len(folder.items)} images have no caption "
            what += f"({folder.without[0]}): they get the empty one, as from {_TRAINER}"
            reader.note(where, what, f"write a{ending} beside a.png, or set class_tokens")
    elif len(folder.without) == len(folder.items):
        values["missing_caption"] = "empty"
        captions["replacements"] = {"": subset.class_tokens}
    else:
        texts = dict.fromkeys(folder.without, subset.class_tokens)
        values["metadata_file"] = reader.captions(path, texts)
        what = f"its {len(texts)} images without a caption have it from {values['metadata_file']}"
        hint = "add an entry there, or a caption file, for each new image"
        reader.note(f"{where}.class_tokens", what, hint)


def _listed(subset: _Subset, where: str, reader: Reader, values: dict[str, Any]) -> None:
    """Set the keys of a fine-tuning subset: a folder with a metadata file."""
    file = reader.places.find(subset.metadata_file or "")
    folder = None if subset.image_dir is None else reader.places.find(subset.image_dir)
    found = read_metadata(file, folder)
    values |= {
        "path": reader.places.written(found.root),
        "metadata_file": reader.places.written(file),
    }
    if found.captioned:
        values["caption_extension"] = found.unused
        what = f"caption files lie beside the images, which {_TRAINER} does not read here"
        hint = f"caption_extension is {found.unused} here, which none has"
        reader.note(where, what, hint)
    if found.nested:
        values["flat"] = True
    if found.blank:
        values["empty_caption"] = "allow"
    if found.others:
        values["on_error"] = "skip"
        what = f"{found.others} images have no entry in {file}, and do not count there: on_error "
        what += "is skip here, which lists them"
        reader.note(where, what, "move them away, and take out on_error")
    if found.strangers:
        values["on_error"] = "skip"
        what = f"{found.strangers} entries of {file} name no image"
        reader.note(where, what, "correct them, and take out on_error")


def _balance(made: Sequence[tuple[_Subset, Block]], reader: Reader) -> None:
    """Set the repeats of regularisation images, which that trainer counts up to the others.

    Source: the end of `DreamBoothDataset.__init__`.
    """
    counts = {id(block): _count(block) for _, block in made}
    train = sum(each.num_repeats * counts[id(block)] for each, block in made if not each.is_reg)
    regular = [(each, block) for each, block in made if each.is_reg]
    once = sum(counts[id(block)] * each.num_repeats for each, block in regular)
    images = sum(counts[id(block)] for _, block in regular)
    for subset, block in regular:
        key = f"{block.where}.is_reg"
        what = "they train like others here, with prior_loss_weight 1"
        hint = "set num_repeats to weigh them"
        if images and once < train:
            more = round((train - once) / images)
            if subset.num_repeats + more > 1:
                block.values["num_repeats"] = subset.num_repeats + more
            what += f", as often as {_TRAINER} repeats them"
        elif images and once > train:
            hint = f"{_TRAINER} takes {train} of the {once} alone: remove some to train on the same"
        reader.note(key, what, hint)


def _count(block: Block) -> int:
    path = str(block.values["path"]).replace("$$", "$")
    return len(look_into(path, None, video=False).items)
