"""musubi-tuner's dataset files, in the words of our configuration.

Keys, defaults and how values of [general] are inherited are those of its dataset/config_utils.py;
what it makes of them is in dataset/image_video_dataset.py and dataset/datasources.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from latentmake import config
from latentmake.exchange.datasets_toml.document import (
    Keys,
    Resolution,
    checked,
    general_of,
    tables,
)
from latentmake.exchange.datasets_toml.folders import look_into
from latentmake.exchange.datasets_toml.lists import read_list
from latentmake.exchange.datasets_toml.reader import Reader
from latentmake.exchange.datasets_toml.sections import Block

__all__ = ["SOURCES", "blocks_of"]

_TRAINER = "musubi-tuner"
SOURCES = ("image_directory", "image_jsonl_file", "video_directory", "video_jsonl_file")
"""Keys that name a block's images or videos."""
_OLD = {
    "flux_kontext_no_resize_control": "no_resize_control",
    "qwen_image_edit_no_resize_control": "no_resize_control",
    "qwen_image_edit_control_resolution": "control_resolution",
}
_OF_IMAGES = (
    *("no_resize_control", "control_resolution", "multiple_target", "fp_latent_window_size"),
    *("fp_1f_clean_indices", "fp_1f_target_index", "fp_1f_no_post"),
)
_FRAMES = ("frame_extraction", "frame_stride", "frame_sample", "max_frames", "source_fps")


class _General(Keys):
    """Keys of [general], which blocks inherit."""

    resolution: Resolution | None = None
    caption_extension: str | None = None
    batch_size: int | None = Field(None, ge=1)
    num_repeats: int | None = None
    enable_bucket: bool | None = None
    bucket_no_upscale: bool | None = None


class _Block(_General):
    """Keys of [[datasets]]."""

    image_directory: str | None = None
    image_jsonl_file: str | None = None
    video_directory: str | None = None
    video_jsonl_file: str | None = None
    cache_directory: str | None = None
    control_directory: str | None = None
    multiple_target: bool = False
    no_resize_control: bool = False
    control_resolution: Resolution | None = None
    fp_latent_window_size: int = 9
    fp_1f_clean_indices: list[int] | None = None
    fp_1f_target_index: int | None = None
    fp_1f_no_post: bool = False
    target_frames: list[int] = Field([1], min_length=1)
    frame_extraction: Literal["head", "chunk", "slide", "uniform", "full"] = "head"
    frame_stride: int = Field(1, ge=1)
    frame_sample: int = Field(1, ge=1)
    max_frames: int = Field(129, ge=1)
    source_fps: float | None = Field(None, gt=0)


def blocks_of(values: Mapping[str, Any], reader: Reader) -> list[Block]:
    """Return the blocks of a file.

    Raises:
        ConfigError: a value is of another type, or a folder cannot be read.
    """
    reader.unknown("file", [x for x in values if x not in ("general", "datasets")], _TRAINER)
    general = _known(_General, general_of(values, reader.file), reader, "general")
    found: list[Block] = []
    for where, table in tables(values, "datasets", f"{reader.file}: "):
        own = _known(_Block, table, reader, where)
        shared = general.keys() - own.keys()
        block = checked(_Block, {**general, **own}, file=reader.file, where=where, inherited=shared)
        if (made := _block(block, where, reader)) is not None:
            found.append(made)
    return found


def _known(
    kind: type[_General], table: Mapping[str, Any], reader: Reader, where: str
) -> dict[str, Any]:
    """Return a table's known keys under their present names."""
    present = {_OLD.get(key, key): value for key, value in table.items() if key in _OLD}
    present |= {key: value for key, value in table.items() if key not in _OLD}
    reader.unknown(where, [key for key in present if key not in kind.model_fields], _TRAINER)
    return {
        key: value
        for key, value in present.items()
        if key in kind.model_fields and value is not None  # JSON's null falls back on [general]
    }


def _block(block: _Block, where: str, reader: Reader) -> Block | None:
    sources = [key for key in SOURCES if getattr(block, key) is not None]
    if not sources:
        hint = f"add {', '.join(SOURCES[:-1])} or {SOURCES[-1]} there"
        reader.note(where, "names no images or videos, and is left out", hint)
        return None
    # Images come first there, and a folder before a list.
    key = sources[0]
    for other in sources[1:]:
        reader.note(f"{where}.{other}", f"does not count beside {key}", "leave it out there")
    if block.num_repeats is not None and block.num_repeats < 1:
        what = "trains on nothing, and the block is left out"
        reader.note(f"{where}.num_repeats", what, "set it to 1 or more")
        return None
    video = key.startswith("video")
    path = reader.places.find(getattr(block, key))
    values: dict[str, Any] = {"path": reader.places.written(path)}
    if key.endswith("_directory"):
        _folder(block, where, reader, values, path, video)
    else:
        found = read_list(path, reader.places, video=video)
        if found.rows:
            values["path"] = reader.rows(path, found.rows)
            what = f"its list is read otherwise here, and is written anew as {values['path']}"
            hint = "edit that one, or the old one and import again"
            reader.note(f"{where}.{key}", what, hint)
        if found.flat:
            values["flat"] = True
        if found.blank:
            values["empty_caption"] = "allow"
    if block.num_repeats not in (None, 1):
        values["num_repeats"] = block.num_repeats
    if block.control_directory is not None:
        control = reader.places.find(block.control_directory)
        values["control_directory"] = reader.places.written(control)
    if video:
        _frames(block, where, reader, values)
    else:
        _images(block, where, reader, values)
    caches = block.cache_directory
    if caches is None and key.endswith("_directory"):
        caches = getattr(block, key)
    return Block(
        where,
        values,
        _resolution(block.resolution, where, reader),
        block.batch_size or 1,
        _caches(caches, reader),
    )


def _folder(
    block: _Block, where: str, reader: Reader, values: dict[str, Any], path: str, video: bool
) -> None:
    ending = block.caption_extension
    if ending is None:
        what = f"is missing, so that {_TRAINER} finds no captions; .txt is used here"
        reader.note(f"{where}.caption_extension", what, "set it in the YAML where it is another")
    elif not ending.startswith("."):
        what = f"{ending!r} has no dot, so that {_TRAINER} looks for names like a{ending}"
        ending = f".{ending}"
        reader.note(f"{where}.caption_extension", what, f"{ending} is used here")
    values["caption_extension"] = ending or ".txt"
    folder = look_into(path, values["caption_extension"], video=video)
    reader.differences(where, values, folder, _TRAINER)
    reader.twins(where, folder)
    if folder.without and not video and not block.multiple_target:
        values["on_error"] = "skip"
        first = folder.without[0]
        what = f"{len(folder.without)} of {len(folder.items)} images have no caption ({first}), "
        what += f"and {_TRAINER} leaves them out: on_error is skip here, which lists them"
        reader.note(where, what, "write their captions, or take out on_error to be told of them")


def _frames(block: _Block, where: str, reader: Reader, values: dict[str, Any]) -> None:
    lengths = sorted({(frames - 1) // 4 * 4 + 1 for frames in block.target_frames})
    lengths = [frames for frames in lengths if frames > 0]
    if lengths != sorted(set(block.target_frames)):
        what = f"{block.target_frames} are rounded to 4 n + 1, as {_TRAINER} does"
        reader.note(f"{where}.target_frames", what, f"{lengths} are used here")
    values["target_frames"] = lengths or [1]
    for key in _FRAMES:
        if getattr(block, key) != _Block.model_fields[key].default:
            values[key] = getattr(block, key)
    for key in ("multiple_target", "no_resize_control", "control_resolution"):
        if getattr(block, key) != _Block.model_fields[key].default:
            reader.note(f"{where}.{key}", "is about images, and has no effect", "leave it out")
    if block.fp_latent_window_size != _Block.model_fields["fp_latent_window_size"].default:
        values["fp_latent_window_size"] = block.fp_latent_window_size
    if not block.enable_bucket:
        what = "its caching puts clips into buckets whatever this says, and so does this program"
        hint = "set enable_bucket = true there, else clips of several shapes end its training"
        reader.note(f"{where}.enable_bucket", what, hint)


def _images(block: _Block, where: str, reader: Reader, values: dict[str, Any]) -> None:
    values["fit"] = "bucket" if block.enable_bucket else "crop"
    if block.enable_bucket and block.bucket_no_upscale:
        values["bucket_no_upscale"] = True
    for key in _OF_IMAGES:
        value, default = getattr(block, key), _Block.model_fields[key].default
        if value == default:
            continue
        if key in config.Dataset.model_fields:
            values[key] = list(value) if isinstance(value, tuple) else value
        else:
            reader.note(f"{where}.{key}", "is not known here", "it is left out")
    for key in _FRAMES[:-1]:
        if getattr(block, key) != _Block.model_fields[key].default:
            reader.note(f"{where}.{key}", "is about videos, and has no effect", "leave it out")


def _resolution(given: tuple[int, int] | None, where: str, reader: Reader) -> tuple[int, int]:
    if given is None:
        what = f"is missing, and {_TRAINER} takes 960 x 544"
        reader.note(f"{where}.resolution", what, "correct it in the YAML where that is not meant")
        return 960, 544
    return given


def _caches(path: str | None, reader: Reader) -> list[str]:
    """Return the folder of a block's caches, if there are some."""
    if path is None:
        return []
    found = Path(reader.places.find(path))
    if not any(found.glob("*_te.safetensors")) and not any(found.glob("*x*_*.safetensors")):
        return []
    return [reader.places.written(str(found))]
