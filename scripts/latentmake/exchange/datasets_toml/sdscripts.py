"""sd-scripts' dataset files, in the words of our configuration.

Keys, defaults and inheritance are those of its library/config_util.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from posixpath import commonpath, dirname
from typing import Any

from latentmake.errors import ConfigError
from latentmake.exchange.datasets_toml.document import Block, Document, Table, as_path

TITLE = "sd-scripts"
SUBSETS = "subsets"
"""Key of a dataset's folders, which tells its files from musubi-tuner's."""
_VARIANTS = 4  # texts of each item, where a file asks for random ones
# Keys of the same name here -> their defaults there, which are left out.
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
_RANDOM = ("shuffle_caption", "enable_wildcard", "caption_dropout_rate", "caption_tag_dropout_rate")
_SUBSET = {"num_repeats": 1, "flip_aug": False, "alpha_mask": False}
_BUCKETS = {"min_bucket_reso": 256, "max_bucket_reso": 1024, "bucket_no_upscale": False}
_DATASET = {"resolution", "batch_size", "enable_bucket", "bucket_reso_steps", *_BUCKETS}
_OWN = {"image_dir", "metadata_file", "is_reg"}  # of a subset alone
_INHERITED = {*_CAPTIONS, *_SUBSET, "caption_extension", "class_tokens"}
_NEVER_CACHED = "left out, cached latents cannot be varied while training"
_LEFT_OUT = {
    "color_aug": _NEVER_CACHED,
    "random_crop": _NEVER_CACHED,
    "face_crop_aug_range": _NEVER_CACHED,
    "resize_interpolation": "left out, images are scaled by area and by Lanczos here",
    "custom_attributes": "left out, it has no counterpart here",
    "network_multiplier": "left out, it has no counterpart here",
    "validation_split": "left out, make a dataset of its own",
    "validation_seed": "left out, make a dataset of its own",
    "caption_dropout_every_n_epochs": "left out, use caption_dropout_rate",
    "token_warmup_step": "left out, use caption_tag_dropout_rate",
    "token_warmup_min": "left out, use caption_tag_dropout_rate",
    "cache_info": "",
}
_LARGEST = 1 << 30  # bytes of a metadata file that names the images


def blocks_of(document: Document) -> list[Block]:
    """Return the blocks of a file.

    Raises:
        ConfigError: a value is of another kind than its key's, or it is a ControlNet dataset.
    """
    general = document.general()
    _sort_out(document, general, "general", {*_DATASET, *_INHERITED})
    found: list[Block] = []
    for where, table in document.tables(document.values, "datasets"):
        own = {key: value for key, value in table.items() if key != SUBSETS}
        _sort_out(document, own, where, {*_DATASET, *_INHERITED})
        dataset = {**general, **own}
        seen: set[str] = set()
        for place, subset in document.tables(table, SUBSETS, f"{where}."):
            _sort_out(document, subset, place, {*_OWN, *_INHERITED})
            merged = {key: dataset[key] for key in dataset if key not in _OWN} | {**subset}
            merged = {key: value for key, value in merged.items() if value is not None}
            source = merged.get("metadata_file") or merged.get("image_dir")
            if source is None or source in seen:
                why = "it names no image_dir" if source is None else "an earlier one is the same"
                document.note(f"{place}: left out, {why}")
                continue
            seen.add(str(source))
            values = _values(document, merged, place)
            folder = Path(values["path"].replace("$$", "$"))
            caches = [values["path"]] if any(folder.rglob("*.npz")) else []
            batch_size = document.value(dataset, "batch_size", int, 1, where)
            found.append(Block(values, document.resolution(dataset, where), batch_size, caches))
    return found


def _sort_out(document: Document, table: Table, where: str, known: set[str]) -> None:
    """Note the keys of a table that are left out."""
    document.unknown(where, table, {*known, *_LEFT_OUT, "conditioning_data_dir"}, TITLE)
    if "conditioning_data_dir" in table:
        place, hint = f"{document.path}: {where}", "take the block out of a copy of the file"
        raise ConfigError("is a ControlNet dataset, which has no use here", where=place, hint=hint)
    for key, why in _LEFT_OUT.items():
        if table.get(key) and why:  # false, 0 and 0.0 ask for nothing
            document.note(f"{where}.{key}: {why}")


def _values(document: Document, subset: Table, where: str) -> dict[str, Any]:
    """Return the section of a dataset."""
    image_dir = document.value(subset, "image_dir", str, None, where)
    folder = None if image_dir is None else document.find(image_dir)
    if listed := document.value(subset, "metadata_file", str, None, where):
        file = document.find(listed)
        values: dict[str, Any] = {
            "path": as_path(folder or _root(file)),
            "metadata_file": as_path(file),
            "caption_extension": ".none",
            "empty_caption": "allow",
            "on_error": "skip",
        }
        document.note(
            f"{where}: on_error is skip: {TITLE} takes only the images of {file}, and no caption "
            "files; remove this to get an error for each of the others"
        )
    else:
        assert folder is not None
        ending = document.value(subset, "caption_extension", str, ".caption", where)
        ending = f".{ending.removeprefix('.')}"
        values = {
            "path": as_path(folder),
            "flat": True,
            "caption_extension": ending,
        }
        tokens = document.value(subset, "class_tokens", str, None, where)
        values |= {"class_tokens": tokens} if tokens else {"missing_caption": "empty"}
    if captions := _captions(document, subset, where):
        values["captions"] = captions
    if document.value(subset, "enable_bucket", bool, False, where):
        steps = document.value(subset, "bucket_reso_steps", int, 64, where)
        values |= {"fit": "bucket", "bucket_reso_steps": steps, **_set(subset, _BUCKETS)}
    else:
        values["fit"] = "crop"
    if subset.get("is_reg"):
        document.note(
            f"{where}.is_reg: its images train like others here; {TITLE} repeats them up to the "
            "number of the others: set num_repeats"
        )
    return values | _set(subset, _SUBSET)


def _set(table: Table, defaults: Table) -> dict[str, Any]:
    """Return the keys of a table that have another value than their default."""
    return {key: table[key] for key in defaults if table.get(key, defaults[key]) != defaults[key]}


def _captions(document: Document, subset: Table, where: str) -> dict[str, Any]:
    found = _set(subset, _CAPTIONS)
    if asked := [key for key in _RANDOM if key in found]:
        found = {"variants": _VARIANTS, **found}
        document.note(
            f"{where}: {', '.join(asked)}: {TITLE} draws anew in each step; here each item has "
            f"{_VARIANTS} texts that are drawn once and cached: raise captions.variants for more"
        )
    return found


def _root(file: Path) -> Path:
    """Return the folder of the images that a metadata file names by absolute paths.

    Raises:
        ConfigError: it cannot be read, or is too large to be read as a whole.
    """
    hint = "name image_dir beside it"
    try:
        if file.stat().st_size > _LARGEST:
            raise ConfigError("is too large to look for its folder", where=file, hint=hint)
        text = file.read_bytes().decode("utf-8-sig")
        if file.suffix.lower() == ".jsonl":
            names = [json.loads(line)["image_path"] for line in text.splitlines() if line.strip()]
        else:
            names = [*json.loads(text)]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        raise ConfigError("cannot be read as a metadata file", where=file, hint=hint) from None
    folders = {dirname(Path(name).absolute()) for name in names}
    return Path(commonpath(folders)) if folders else Path()
