"""A musubi-tuner of one architecture whose scripts write right files in no time, without torch.

What they write depends on all that the real ones' files depend on: picture or caption, controls,
arguments, and the content of the weights that they are given.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from latentmake.config.makers import Script, Scripts
from PIL import Image

PACKAGE = "src/musubi_tuner"
VAE_MODULE, TEXT_MODULE, OTHER_MODULE = (
    f"{PACKAGE}/{name}.py" for name in ("fast/vae", "fast/text_encoder", "fast/sampling")
)

_COMMON = """
import argparse, glob, hashlib, json, os, struct, sys, tomllib


def parsed(flags, switches):
    parser = argparse.ArgumentParser()
    for flag in flags:
        parser.add_argument(flag)
    for flag in switches:
        parser.add_argument(flag, action="store_true")
    return parser.parse_args()


def digest_of(args):
    found = hashlib.sha256()
    for name, value in sorted(vars(args).items()):
        if name in ("dataset_config", "num_workers", "batch_size", "skip_existing", "keep_cache"):
            continue
        found.update(f"{name}={None if os.path.exists(str(value)) else value}".encode())
        if value and os.path.isfile(str(value)):
            found.update(open(value, "rb").read())
    return found


def write(path, tensors, metadata):
    header, data = {"__metadata__": metadata}, b""
    for name, (shape, content) in tensors.items():
        count = 1
        for side in shape:
            count *= side
        values = struct.pack("<f", 1 + content) * count
        offsets = [len(data), len(data) + len(values)]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
        data += values
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


def size_of(path):
    with open(path, "rb") as file:
        head = file.read(24)
    assert head[:8] == b"\\x89PNG\\r\\n\\x1a\\n", path
    return struct.unpack(">II", head[16:24])


def bucket_of(size, block, step):
    if not block.get("enable_bucket"):
        return block["resolution"]
    width, height = block["resolution"]
    area = width * height
    side = int(area ** 0.5)
    if block.get("bucket_no_upscale") and size[0] * size[1] <= area:
        return [x // step * step for x in size]
    sides = range(side // 2 // step * step, side + step, step)
    buckets = {(w, area // w // step * step) for w in sides if w}
    buckets |= {(h, w) for w, h in buckets}
    return min(sorted(buckets), key=lambda x: abs(x[0] / x[1] - size[0] / size[1]))


def items(args):
    for block in tomllib.load(open(args.dataset_config, "rb"))["datasets"]:
        os.makedirs(block["cache_directory"], exist_ok=True)
        for line in open(block["image_jsonl_file"]):
            item = json.loads(line)
            stem = os.path.splitext(os.path.basename(item["image_path"]))[0]
            yield block, item, os.path.join(block["cache_directory"], stem)


def called(args):
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "calls.jsonl"), "a") as file:
        file.write(json.dumps(sys.argv) + "\\n")
"""
_LATENTS = """
from musubi_tuner import fast_common as common
from musubi_tuner.fast import vae

args = common.parsed(FLAGS, SWITCHES)
common.called(args)
for block, item, place in common.items(args):
    found = common.digest_of(args)
    paths = [value for name, value in sorted(item.items()) if name.endswith(("path", "_0", "_1"))]
    for path in paths:
        found.update(open(path, "rb").read())
    width, height = common.size_of(item["image_path"])
    bucket = common.bucket_of((width, height), block, STEP)
    shape = [vae.CHANNELS, 1, bucket[1] // PIXELS, bucket[0] // PIXELS]
    content = found.digest()[0] / 256
    name = "x".join(map(str, shape[1:]))
    tensors = {f"latents_{name}_float32": (shape, content)}
    tensors |= {f"{each}{name}_float32": (shape, content) for each in FURTHER}
    controls = sum(each.startswith("control_path") for each in item) if CONTROLS else 0
    tensors |= {f"latents_control_{n}_{name}_float32": (shape, content) for n in range(controls)}
    metadata = {"architecture": HEADER, "format_version": "1.0.1"}
    metadata |= {"width": str(width), "height": str(height)}
    path = f"{place}_{width:04d}x{height:04d}_{SUFFIX}.safetensors"
    common.write(path, tensors, metadata)
"""
_TEXT = """
import os
from musubi_tuner import fast_common as common
from musubi_tuner.fast import text_encoder

args = common.parsed(FLAGS, SWITCHES)
common.called(args)
for block, item, place in common.items(args):
    found = common.digest_of(args)
    found.update(item["caption"].encode())
    if READS_CONTROLS:
        for name, path in sorted(item.items()):
            if name.startswith("control_path"):
                found.update(open(path, "rb").read())
        bucket = common.bucket_of(common.size_of(item["image_path"]), block, STEP)
        found.update(str(bucket).encode())
    tensors = {
        f"{each}float32": ([2, text_encoder.WIDTH], found.digest()[0] / 256) for each in TENSORS
    }
    metadata = {"architecture": HEADER, "caption1": item["caption"], "format_version": "1.0.1"}
    common.write(f"{place}_{SUFFIX}_te.safetensors", tensors, metadata)
"""
# Takes any argument, and trains on whatever lies in its cache folders.
_TRAINING = """
import argparse, glob, os, tomllib
from musubi_tuner import fast_common as common
from musubi_tuner.fast import sampling

parser = argparse.ArgumentParser()
for flag in ("--dataset_config", "--dit", "--output_dir", "--output_name", "--network_module"):
    parser.add_argument(flag, required=True)
args, others = parser.parse_known_args()
assert args.network_module == NETWORK and os.path.exists(args.dit)
count = 0
for block in tomllib.load(open(args.dataset_config, "rb"))["datasets"]:
    for path in glob.glob(os.path.join(block["cache_directory"], f"*_{SUFFIX}.safetensors")):
        base = "_".join(path.split("_")[:-2])
        assert os.path.exists(f"{base}_{SUFFIX}_te.safetensors")
        count += 1
assert count
os.makedirs(args.output_dir, exist_ok=True)
names = [f"lora_unet_blocks_0.{each}.weight" for each in ("lora_down", "lora_up")]
path = os.path.join(args.output_dir, f"{args.output_name}.safetensors")
common.write(path, {name: ([2, 2], count / 256) for name in names}, {"items": str(count)})
"""


def install(folder: Path, scripts: Scripts) -> dict[str, str]:
    """Write the folder; return the section `musubi_tuner` of a configuration."""
    place = folder / PACKAGE
    (place / "fast").mkdir(parents=True, exist_ok=True)
    (place / "__init__.py").write_text("")
    (place / "fast/__init__.py").write_text("")
    (folder / VAE_MODULE).write_text("CHANNELS = 16\n")
    (folder / TEXT_MODULE).write_text("WIDTH = 8\n")
    (folder / OTHER_MODULE).write_text("STEPS = 20\n")
    (place / "fast_common.py").write_text(_COMMON)
    further = sorted({name for each in scripts.versions.values() for name in each.tensors})
    facts = {
        "SUFFIX": scripts.suffix,
        "HEADER": scripts.header,
        "PIXELS": scripts.pixels,
        "TENSORS": scripts.tensors,
        "NETWORK": scripts.network,
        "FURTHER": further,
        "KNOWN": sorted(
            {word for x in scripts.versions.values() for word in (*x.latents, *x.text, *x.training)}
        ),
        "CONTROLS": scripts.latents.reads_controls and scripts.control_latents,
    }
    for script, code in ((scripts.latents, _LATENTS), (scripts.text, _TEXT)):
        _write(place, script, code, facts)
    _write(place, scripts.training, _TRAINING, facts)
    return {"path": folder.name, "venv": sys.prefix}


def _write(place: Path, script: Script, code: str, facts: Mapping[str, object]) -> None:
    flags = ["--dataset_config", "--batch_size", "--num_workers", "--task", "--model_version"]
    flags += [file.flag for file in script.files]
    flags += [script.dtype_flag] if script.dtype_flag else []
    switches = ["--skip_existing", "--keep_cache", "--disable_cudnn_backend", "--fp8_vl"]
    switches += [flag for flag, _ in script.switches]
    own = {
        **facts,
        "STEP": max(16, int(str(facts["PIXELS"]))),
        "READS_CONTROLS": script.reads_controls,
    }
    own |= {"FLAGS": flags, "SWITCHES": switches}
    # As literals: what a script knows is told by its sources.
    head = "".join(f"{name} = {value!r}\n" for name, value in own.items())
    (place / script.name).write_text(f"{head}{code}", encoding="utf-8")


def calls(folder: Path) -> list[list[str]]:
    """Return the arguments of all calls of caching scripts, each with the script first."""
    listed = folder / PACKAGE / "calls.jsonl"
    return [json.loads(x) for x in listed.read_text().splitlines()] if listed.exists() else []


def write_weights(folder: Path, **tensors: str) -> None:
    """Write files that stand for weights, each with the name of a tensor that tells what it is."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    for number, (name, tensor) in enumerate(tensors.items()):
        value = torch.full((2, 2), 1.0 + number, dtype=torch.bfloat16)
        save_file({tensor: value}, folder / f"{name}.safetensors")


def write_pictures(folder: Path, captions: Mapping[str, str], size: tuple[int, int]) -> None:
    """Write a picture and a caption for each stem."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (stem, caption) in enumerate(captions.items()):
        colour = (20 * number, 250 - 30 * number, 10)
        Image.new("RGB", size, colour).save(folder / f"{stem}.png")
        (folder / f"{stem}.txt").write_text(f"{caption}\n", encoding="utf-8")


def config(architecture: str, **model: Any) -> dict[str, Any]:
    """Return a configuration of two resolutions; the trainer's folder is `musubi-tuner`."""
    return {
        "datasets": {"shapes": {"path": "data/shapes", "fit": "bucket"}},
        "models": {"tiny": {"architecture": architecture, **model}},
        "runs": {"tiny": {"datasets": ["shapes"], "model": "tiny", "resolutions": [64, 96]}},
        "musubi_tuner": {"path": "musubi-tuner", "venv": sys.prefix},
    }
