"""musubi-tuner's dataset files, in the words of our configuration.

Keys, defaults and inheritance from [general] are those of its dataset/config_utils.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from latentmake.exchange.datasets_toml.document import Block, Document, Table, as_path

TITLE = "musubi-tuner"
_SOURCES = ("image_directory", "image_jsonl_file", "video_directory", "video_jsonl_file")
_OLD = {
    "flux_kontext_no_resize_control": "no_resize_control",
    "qwen_image_edit_no_resize_control": "no_resize_control",
    "qwen_image_edit_control_resolution": "control_resolution",
}
# Keys of the same name here -> their defaults there, which are left out.
_IMAGES = {
    "multiple_target": False,
    "no_resize_control": False,
    "control_resolution": None,
    "fp_latent_window_size": 9,
    "fp_1f_clean_indices": None,
    "fp_1f_target_index": None,
    "fp_1f_no_post": False,
}
_VIDEOS = {
    "frame_extraction": "head",
    "frame_stride": 1,
    "frame_sample": 1,
    "max_frames": 129,
    "source_fps": None,
    "fp_latent_window_size": 9,
}
_GENERAL = {
    *("resolution", "caption_extension", "batch_size", "num_repeats", "enable_bucket"),
    "bucket_no_upscale",
}
_KEYS = {
    *_GENERAL,
    *_SOURCES,
    *_IMAGES,
    *_VIDEOS,
    *("cache_directory", "control_directory", "target_frames"),
}
_RESOLUTION = (960, 544)


def blocks_of(document: Document) -> list[Block]:
    """Return the blocks of a file.

    Raises:
        ConfigError: a value is of another kind than its key's.
    """
    general = _present(document.general())
    document.unknown("general", general, _GENERAL, TITLE)
    found: list[Block] = []
    for where, table in document.tables(document.values, "datasets"):
        own = _present(table)
        document.unknown(where, own, _KEYS, TITLE)
        inherited = {key: value for key, value in general.items() if key in _GENERAL}
        block = {**inherited, **own}
        sources = [key for key in _SOURCES if block.get(key) is not None]
        if not sources:
            document.note(f"{where}: left out, it names no images or videos")
            continue
        # Images come first there, and a folder before a list.
        for other in sources[1:]:
            document.note(f"{where}.{other}: left out, {TITLE} takes {sources[0]} alone")
        found.append(_block(document, block, sources[0], where))
    return found


def _present(table: Table) -> dict[str, Any]:
    """Return a table under the present names of its keys, without JSON's null."""
    return {_OLD.get(key, key): value for key, value in table.items() if value is not None}


def _block(document: Document, block: Table, key: str, where: str) -> Block:
    video, listed = key.startswith("video"), key.endswith("_jsonl_file")
    path = document.find(document.value(block, key, str, "", where))
    values: dict[str, Any] = {"path": as_path(path), "flat": True, "empty_caption": "allow"}
    if listed:
        values["path"] = _list(document, path, where, "video_path" if video else "image_path")
    else:
        values["caption_extension"] = _ending(document, block, where)
        if not video:
            values["on_error"] = "skip"
            document.note(
                f"{where}: on_error is skip: {TITLE} leaves out images without a caption; "
                "remove this to get an error for each"
            )
    if block.get("num_repeats", 1) != 1:
        values["num_repeats"] = block["num_repeats"]
    if control := document.value(block, "control_directory", str, None, where):
        values["control_directory"] = as_path(document.find(control))
    bucket = document.value(block, "enable_bucket", bool, False, where)
    if video:
        values["target_frames"] = _frames(document, block, where)
    else:
        values["fit"] = "bucket" if bucket else "crop"
        if bucket and block.get("bucket_no_upscale"):
            values["bucket_no_upscale"] = True
    same = _VIDEOS if video else _IMAGES
    for name in (*_IMAGES, *_VIDEOS):
        if block.get(name) in (None, {**_IMAGES, **_VIDEOS}[name]):
            continue
        if name in same:
            values[name] = block[name]
        else:
            document.note(f"{where}.{name}: left out, it has no effect on these items")
    resolution = document.resolution(block, where)
    if resolution is None:
        document.note(f"{where}.resolution: missing, {TITLE} takes 960 x 544")
    caches = block.get("cache_directory") or (None if listed else block[key])
    folders = [] if caches is None else _caches(document.find(str(caches)))
    batch_size = document.value(block, "batch_size", int, 1, where)
    return Block(values, resolution or _RESOLUTION, batch_size, folders)


def _ending(document: Document, block: Table, where: str) -> str:
    ending: str | None = document.value(block, "caption_extension", str, None, where)
    if ending is None:
        document.note(f"{where}.caption_extension: missing, .txt is used here")
    return ".txt" if ending is None else f".{ending.removeprefix('.')}"


def _frames(document: Document, block: Table, where: str) -> list[int]:
    asked = document.value(block, "target_frames", list, [1], where)
    lengths = sorted({(int(frames) - 1) // 4 * 4 + 1 for frames in asked if int(frames) > 0})
    if lengths != sorted(set(asked)):
        document.note(f"{where}.target_frames: rounded to 4 n + 1, as {TITLE} does: {lengths}")
    return lengths or [1]


def _caches(folder: Path) -> list[str]:
    """Return a folder if there are caches in it."""
    patterns = ("*_te.safetensors", "*x*_*.safetensors")
    return [as_path(folder)] if any(any(folder.glob(each)) for each in patterns) else []


def _list(document: Document, path: Path, where: str, kind: str) -> str:
    """Return the path of a list for our configuration.

    Relative paths in it are those of the folder in which musubi-tuner's scripts start, and columns
    that mean something here mean nothing there: such a list is written anew.
    """
    rows, same = [], True
    for values in _objects(path):
        row = {key: value for key, value in values.items() if key == "caption"}
        for key, value in values.items():
            if key.startswith((kind, "control_path")) and isinstance(value, str):
                name = kind if key == f"{kind}_0" else key
                row[name] = str(document.find(value).absolute())
        rows.append(row)
        same &= row == values
    if same:
        return as_path(path)
    lines = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
    written = document.write(path, ".jsonl", lines)
    document.note(f"{where}: {path} is read otherwise here, and is written anew as {written}")
    return written


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a list; the plan names lines that are none."""
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    for line in filter(str.strip, lines):
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(values, dict):
            yield values
