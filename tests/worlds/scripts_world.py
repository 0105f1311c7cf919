"""A musubi-tuner whose caching scripts go wrong as they are told, and orders for it.

Only what its own scripts do not do at will: they fail at an item, write nothing, hang. Loops, names
and messages are those of its cache_latents.py, cache_text_encoder_outputs.py and cache_io.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from item_world import work_of
from latentmake.config.datasets import Dataset
from latentmake.config.machines import MusubiTuner
from latentmake.config.models import Model
from latentmake.geometry.clips import Media
from latentmake.layouts.layout import layout_of, resolution_of
from latentmake.plan.orders import Order, Target
from PIL import Image

STEMS = ("ant", "bee", "cat", "dog", "eel", "fox")
SIZE = (64, 64)
LATENTS, TEXT, TWICE = (
    *("zimage_cache_latents.py", "zimage_cache_text_encoder_outputs.py"),
    "cache_text_encoder_outputs.py",
)

# What goes wrong stands in moods.json: of an item by its stem, of all at "".
_LOOPS = """
import glob, json, os, time
from types import SimpleNamespace

HERE = os.path.dirname(os.path.abspath(__file__))
MOODS = json.load(open(os.path.join(HERE, "moods.json")))
encoded = []


class Datasource:
    def __init__(self, lines):
        self.data = lines

    def __iter__(self):
        self.current = 0
        return self

    def __next__(self):
        if self.current >= len(self.data):
            raise StopIteration
        line = self.data[self.current]
        self.current += 1
        return lambda: (line["image_path"], line["caption"])


class Dataset:
    def __init__(self, block, lines, suffix):
        self.block, self.suffix, self.datasource = block, suffix, Datasource(lines)

    def batches(self, num_workers):
        batch = []
        for fetch in self.datasource:
            while encoded and "until" in MOODS and not glob.glob(MOODS["until"], recursive=True):
                time.sleep(0.01)
            path, caption = fetch()
            place = os.path.join(
                self.block["cache_directory"], os.path.splitext(os.path.basename(path))[0]
            )
            item = SimpleNamespace(item_key=path, caption=caption, frame_count=None)
            item.resolution = self.block["resolution"]
            item.latent_cache_path = f"{place}_0080x0064_{self.suffix}.safetensors"
            item.text_encoder_output_cache_path = f"{place}_{self.suffix}_te.safetensors"
            batch.append(item)
            if len(batch) == self.block["batch_size"]:
                yield batch
                batch = []
        if batch:
            yield batch


def encode_datasets(datasets, encode, args):
    for dataset in datasets:
        for batch in dataset.batches(args.num_workers):
            encode(batch)


def process_text_encoder_batches(num_workers, skip_existing, batch_size, datasets, encode):
    for dataset in datasets:
        for batch in dataset.batches(num_workers):
            encode(batch)
"""
_CODE = """
import argparse, json, logging, os, signal, struct, sys, time, tomllib
from musubi_tuner import cache_loops
from musubi_tuner.cache_loops import HERE, MOODS, encoded

PASSES = {passes!r}
HEADER = {header!r}
OutOfMemoryError = type("OutOfMemoryError", (RuntimeError,), {{"__module__": "torch"}})
SHORT = OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
lost = []


def header_of(path):
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(length)), file.read()


def save(path, names, metadata, fill):
    header, data = {{"__metadata__": metadata}}, b""
    if os.path.exists(path) and len(PASSES) > 1:  # the passes of a script share a file
        old, data = header_of(path)
        header = old | header
    os.makedirs(os.path.dirname(path), exist_ok=True)
    for name in names:
        shape = [int(x) for x in name.split("_")[1].split("x")] if "latents_" in name else [2, 2]
        count = 1
        for side in shape:
            count *= side
        values = struct.pack("<f", fill) * count
        offsets = [len(data), len(data) + len(values)]
        header[name] = {{"dtype": "F32", "shape": shape, "data_offsets": offsets}}
        data += values
    text = json.dumps(header).encode()
    open(path, "wb").write(struct.pack("<Q", len(text)) + text + data)


def encode(item, names):
    path, caption = item.item_key, item.caption
    stem = os.path.splitext(os.path.basename(path))[0]
    mood = MOODS.get(stem)
    if len(caption) > MOODS.get("room", 1000) or len(encoded) >= MOODS.get("crowded after", 1000):
        raise SHORT
    encoded.append(stem)
    if mood == "raise":
        raise RuntimeError("Kernel size can't be greater than actual input size")
    if mood == "lost" or lost:
        lost.append(stem)
        raise RuntimeError("CUDA error: unspecified launch failure")
    if mood == "second pass" and names == PASSES[-1]:
        raise RuntimeError("the second encoder has no room")
    if mood == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if mood == "hang":
        open(os.path.join(HERE, "hangs"), "w").close()
        time.sleep(600)
    if mood == "nothing" or MOODS.get("") == "nothing":
        return
    if mood == "tensor":
        names = ["of_another_kind"]
    for name in names if mood == "nan" else ():
        logging.getLogger("cache").warning(f"{{name}} tensor has NaN: {{path}}, replace NaN with 0")
    metadata = {{"architecture": "wan" if mood == "header" else HEADER, "format_version": "1.0.1"}}
    if PASSES == [["latents_"]]:
        shape = "1x" + "x".join(str(side // 8) for side in reversed(item.resolution))
        names = [f"latents_{{shape}}_float32"] if mood != "tensor" else names
        metadata |= {{"width": "80", "height": "64"}}
        target = item.latent_cache_path
    else:
        metadata["caption1"] = "another caption" if mood == "caption" else caption
        target = item.text_encoder_output_cache_path
    save(target, names, metadata, 0.0 if mood == "zeros" else 0.5)
    if mood == "cut":
        os.truncate(target, os.path.getsize(target) - 4)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(MOODS.get("seconds", 0))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dataset_config")
    parser.add_argument("--vae")
    parser.add_argument("--text_encoder")
    parser.add_argument("--text_encoder1")
    parser.add_argument("--text_encoder2")
    parser.add_argument("--text_encoder_dtype")
    parser.add_argument("--vae_tiling", action="store_true")
    parser.add_argument("--fp8_llm", action="store_true")
    parser.add_argument("--batch_size", type=int)
    parser.add_argument("--num_workers", type=int)
    parser.add_argument("--skip_existing", action="store_true")
    parser.add_argument("--keep_cache", action="store_true")
    args = parser.parse_args()
    blocks = tomllib.load(open(args.dataset_config, "rb"))["datasets"]
    lists = [[json.loads(x) for x in open(block["image_jsonl_file"])] for block in blocks]
    call = {{
        "script": os.path.basename(__file__),
        "argv": sys.argv[1:],
        "blocks": blocks,
        "lists": lists,
        "gpu": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "pid": os.getpid(),
    }}
    with open(os.path.join(HERE, "calls.jsonl"), "a") as file:
        file.write(json.dumps(call) + "\\n")
    time.sleep(MOODS.get("loading", 0))
    if MOODS.get("") == "hub":
        raise OSError(
            "We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find "
            "them in the cached files.\\nCheck your internet connection or see how to run offline."
        )
    if MOODS.get("") == "crowded":
        raise SHORT
    if MOODS.get("") == "load":
        raise KeyError("encoder.conv_in.weight")
    datasets = [cache_loops.Dataset(*each, {suffix!r}) for each in zip(blocks, lists)]
    for names in PASSES:
        def encode_batch(batch):
            for item in batch:
                encode(item, names)
        if PASSES == [["latents_"]]:
            cache_loops.encode_datasets(datasets, encode_batch, args)
        else:
            cache_loops.process_text_encoder_batches(
                args.num_workers, args.skip_existing, args.batch_size, datasets, encode_batch
            )


if __name__ == "__main__":
    main()
"""


def install(folder: Path, **moods: Any) -> MusubiTuner:
    """Write the folder of a musubi-tuner; `moods` are stem -> what goes wrong with it."""
    place = folder / "src/musubi_tuner"
    place.mkdir(parents=True, exist_ok=True)
    for name, suffix, header, passes in (
        (LATENTS, "zi", "z_image", [["latents_"]]),
        (TEXT, "zi", "z_image", [["varlen_llm_embed_float32"]]),
        (TWICE, "hv", "hunyuan_video", [["llm_float32", "llm_mask"], ["clipL_float32"]]),
    ):
        code = _CODE.format(suffix=suffix, header=header, passes=passes)
        (place / name).write_text(code, encoding="utf-8")
    (place / "cache_loops.py").write_text(_LOOPS)
    for name in ("zimage_train_network.py", "hv_train_network.py", "wan_train_network.py"):
        (place / name).write_text("import argparse\n")
    set_moods(folder, **moods)
    return MusubiTuner(path=str(folder), venv=sys.prefix)


def set_moods(folder: Path, **moods: Any) -> None:
    named = {"" if name == "all_of_them" else name: mood for name, mood in moods.items()}
    (folder / "src/musubi_tuner/moods.json").write_text(json.dumps(named))


def calls(folder: Path) -> list[dict[str, Any]]:
    """Return what the scripts were called with, in order."""
    listed = folder / "src/musubi_tuner/calls.jsonl"
    return [json.loads(x) for x in listed.read_text().splitlines()] if listed.exists() else []


def stems(call: Mapping[str, Any]) -> list[list[str]]:
    """Return the stems of each list that a script was called with."""
    return [[Path(line["image_path"]).stem for line in lines] for lines in call["lists"]]


def order(
    kind: str,
    tuner: MusubiTuner,
    *,
    architecture: str = "z_image",
    parts: Sequence[str] = ("64",),
    captions: Mapping[str, str] | None = None,
    stems: Sequence[str] = STEMS,
    **model: Any,
) -> Order:
    """Return an order for some pictures, or for their captions, below the working directory."""
    texts = ["models/text", "models/text2"] if architecture == "hunyuan_video" else "models/text"
    for name in ("vae", "text", "text2"):
        Path("models").mkdir(exist_ok=True)
        Path(f"models/{name}").write_bytes(b"weights")
    section = {"architecture": architecture, "vae": "models/vae", "text": texts, **model}
    settings = Model.model_validate(section)
    layout = layout_of(settings.layout_name)
    items = []
    for number, stem in enumerate(stems):
        source = Path(f"data/{stem}.png")
        source.parent.mkdir(exist_ok=True)
        if not source.exists():
            Image.new("RGB", (80, 64), (40 * number % 256, number, 10)).save(source)
        media = Media(80, 64, 0) if kind == "latents" else None
        named = [part if kind == "latents" else f"text@{part}" for part in parts]
        targets = tuple(
            Target(part, path, None, resolution_of(part) if kind == "latents" else None)
            for part in named
            for path, _ in layout.named(
                layout.folder("cats", "model", part), part, stem, media, Dataset(path="data")
            )
        )
        text = (captions or {}).get(stem, f"a {stem}")
        items.append(
            work_of(stem, str(source), None, targets, media=media)
            if kind == "latents"
            else work_of(stem, None, text, targets)
        )
    return Order(
        kind=kind,
        dataset="cats",
        model="model",
        dataset_settings=Dataset(path="data"),
        model_settings=settings,
        recipe={"kind": kind, "weights": "some"},
        items=tuple(items),
        musubi_tuner=tuner,
    )
