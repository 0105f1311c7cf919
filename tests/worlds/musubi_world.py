"""A Wan run with real cache files, and stand-ins for musubi-tuner: whole programs, no torch."""

from __future__ import annotations

import json
import os
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from latentmake.base import digest
from latentmake.config.datasets import Dataset
from latentmake.config.machines import ExternalProgram
from latentmake.trainers.musubi.order import MusubiOrder
from PIL import Image
from publish_world import order_of
from safetensors.torch import save_file

RUN = "cats"
COLOURS = {"red": (250, 10, 10), "blue": (10, 10, 250), "green": (10, 250, 10)}
WAN_DIT = ("patch_embedding.weight", "blocks.0.self_attn.q.weight", "head.head.weight")
SWITCHES = (
    *("sdpa", "flash_attn", "flash3", "xformers", "sage_attn", "fp8_base", "save_state"),
    *("gradient_checkpointing", "sample_at_first"),
)
VALUES = (
    *("task", "dataset_config", "dit", "dit_high_noise", "timestep_boundary", "network_module"),
    *("network_dim", "network_alpha", "mixed_precision", "learning_rate", "optimizer_type"),
    *("max_train_epochs", "max_train_steps", "gradient_accumulation_steps"),
    "max_data_loader_n_workers",
    *("output_dir", "output_name", "logging_dir", "timestep_sampling", "discrete_flow_shift"),
    *("save_every_n_epochs", "resume", "blocks_to_swap", "seed", "lr_scheduler"),
    *("vae", "t5", "sample_prompts", "sample_every_n_epochs", "sample_every_n_steps"),
)

# Finds caches by their names, as the trainer does. STAND_IN says what goes wrong; it writes its
# arguments and variables down, and how many epochs went into the weights.
_BODY = """
    args = parser.parse_args()
    mood = os.environ.get("STAND_IN", "")
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "called.json"), "w") as file:
        json.dump({"argv": sys.argv[1:], "cwd": os.getcwd(), "environment": dict(os.environ)}, file)
    print("INFO:trainer:\\u5b66\\u7fd2\\u958b\\u59cb", flush=True)
    config = tomllib.load(open(args.dataset_config, "rb"))
    items = 0
    for block in config["datasets"]:
        assert os.path.isdir(block.get("image_directory") or block["video_directory"])
        for path in sorted(glob.glob(os.path.join(block["cache_directory"], "*_wan.safetensors"))):
            pattern = r"(.+?)(_\\d{5}-\\d{3})?_(\\d{4})x(\\d{4})_wan.safetensors"
            match = re.fullmatch(pattern, os.path.basename(path))
            text = os.path.join(block["cache_directory"], match[1] + "_wan_te.safetensors")
            assert os.path.isfile(text), text
            items += 1
    if not items:
        raise ValueError("No training items found in the dataset.")
    assert args.network_module.startswith("networks.") and os.path.isfile(args.dit)
    assert args.sdpa + args.flash_attn + args.sage_attn + args.xformers == 1
    if mood == "broken":
        raise RuntimeError("the loss has gone its own way")
    if mood == "silent":
        print("No training items, leaving.")
        return
    done = 0
    first = 0
    if args.resume:
        done = int(open(os.path.join(args.resume, "optimizer.bin")).read())
        first = done if COUNTS else 0
    os.makedirs(args.output_dir, exist_ok=True)
    epochs = int(args.max_train_epochs or 1)
    for epoch in range(first, epochs):
        done += 1
        print(f"\\repoch {epoch + 1}", end="", flush=True)
        if args.save_every_n_epochs and args.save_state and epoch + 1 < epochs:
            state = os.path.join(args.output_dir, f"{args.output_name}-{epoch + 1:06d}-state")
            os.makedirs(state, exist_ok=True)
            open(os.path.join(state, "optimizer.bin"), "w").write(str(done))
            if COUNTS:
                note = os.path.join(state, "training_state.json")
                json.dump({"epoch": epoch + 1}, open(note, "w"))
            if mood != f"cut {epoch + 1}":
                open(os.path.join(state, "random_states_0.pkl"), "w").write("random")
            write(state.removesuffix("-state") + ".safetensors", done, mood)
        if mood in (f"killed {epoch + 1}", f"cut {epoch + 1}"):
            os._exit(9)
    if args.save_state:
        state = os.path.join(args.output_dir, f"{args.output_name}-state")
        os.makedirs(state, exist_ok=True)
        open(os.path.join(state, "optimizer.bin"), "w").write(str(done))
        open(os.path.join(state, "random_states_0.pkl"), "w").write("random")
    if mood == "killed at the end":
        os._exit(9)
    path = os.path.join(args.output_dir, args.output_name + ".safetensors")
    write(path, done, mood)
    os.chmod(path, 0o600)
"""
_HEAD = """
import argparse, glob, json, os, re, struct, sys, tomllib

COUNTS = {counts}


def write(path, done, mood):
    tensor = {{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    header = {{"__metadata__": {{"epochs": str(done)}}}}
    header["lora_unet_blocks_0.lora_down.weight"] = tensor
    if mood == "merged":
        header["blocks.0.weight"] = header.pop("lora_unet_blocks_0.lora_down.weight")
    if mood == "empty":
        del header["lora_unet_blocks_0.lora_down.weight"]
    text = json.dumps(header).encode()
    data = struct.pack("<Q", len(text)) + text + (b"" if mood in ("empty", "short") else bytes(4))
    open(path, "wb").write(data)


def main():
    parser = argparse.ArgumentParser()
"""


_LAUNCH = """
import runpy, sys
del sys.argv[: next(n for n, each in enumerate(sys.argv) if n and each.endswith(".py"))]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def stand_in(
    folder: Path,
    *,
    scripts: str = ".",
    without: tuple[str, ...] = (),
    counts: bool = False,
    own_venv: bool = True,
) -> Path:
    """Write a trainer's folder.

    Args:
        folder: gets it.
        scripts: where in it the scripts lie.
        without: flags that it does not know.
        counts: its states say how far they came, and it goes on counting from there.
        own_venv: it has an environment of its own; see `make_venv`.
    """
    place = folder / scripts
    place.mkdir(parents=True, exist_ok=True)
    declared = declarations(SWITCHES, VALUES, without)
    program = _HEAD.format(counts=counts) + declared + _BODY + "\n\nmain()\n"
    (place / "wan_train_network.py").write_text(program, encoding="utf-8")
    write_network(place / "networks/loha.py")
    if own_venv and not (folder / "venv").exists():
        make_venv(folder / "venv")
    return folder


def declarations(switches: Sequence[str], values: Sequence[str], without: Sequence[str]) -> str:
    """Return the lines of a program that declare its flags but some."""
    lines = [f'    parser.add_argument("--{name}", action="store_true")' for name in switches]
    lines += [f'    parser.add_argument("--{name}")' for name in values]
    lines = [line for line in lines if line.split('"')[1][2:] not in without]
    return "\n".join([*lines, '    parser.add_argument("--network_args", nargs="*")'])


def write_network(path: Path) -> None:
    """Write the module of a network, by its name; a stand-in imports it as little as we do."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("def create_network(): ...\nraise RuntimeError('it was imported')\n")


def make_venv(folder: Path) -> None:
    """Make an environment that has no package but an accelerate that runs a script."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "accelerate/commands").mkdir(parents=True)
    (site / "accelerate/commands/launch.py").write_text(_LAUNCH)


def called(folder: Path) -> dict[str, Any]:
    """Return what a stand-in was called with."""
    found: dict[str, Any] = json.loads((folder / "called.json").read_text())
    return found


def install(folder: Path, package: str, code: str = "") -> None:
    """Put a package into a stand-in's environment."""
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    (site / package).mkdir()
    (site / package / "__init__.py").write_text(code)


def put_latents(
    path: Path, *, size: tuple[int, int], latent: tuple[int, int, int], **tensors: Any
) -> str:
    frames, height, width = latent
    path.parent.mkdir(parents=True, exist_ok=True)
    key = f"latents_{frames}x{height}x{width}_bfloat16"
    content = {key: torch.ones(16, frames, height, width, dtype=torch.bfloat16), **tensors}
    metadata = {"architecture": "wan", "width": str(size[0]), "height": str(size[1])}
    save_file(content, path, {**metadata, "format_version": "1.0.1"})
    return os.fspath(path)


def put_text(path: Path, caption: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    embedding = torch.ones(3, 4096, dtype=torch.bfloat16)
    metadata = {"architecture": "wan", "caption1": caption, "format_version": "1.0.1"}
    save_file({"varlen_t5_bfloat16": embedding}, path, metadata)
    return os.fspath(path)


def put_weights(path: Path, *names: str, dtype: torch.dtype = torch.bfloat16) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: torch.ones(2, 2, dtype=dtype) for name in names}, path)
    return os.fspath(path)


def make_run(
    root: Path,
    *,
    resolutions: tuple[tuple[int, int], ...] = ((64, 64),),
    model: dict[str, Any] | None = None,
    tuner: Path | None = None,
    lock: str = "one",
    **trainer: Any,
) -> MusubiOrder:
    """Write images, captions, caches, manifest, lock and weights below the working directory.

    Args:
        root: the working directory, in which relative paths lie.
        resolutions: of the run.
        model: changes of the model's section.
        tuner: the trainer's folder.
        lock: what the lock's digest is made of.
        trainer: the trainer's section.
    """
    rows = []
    for stem, colour in COLOURS.items():
        source = root / f"data/{RUN}/{stem}.png"
        source.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (80, 64), colour).save(source)
        source.with_suffix(".txt").write_text(f"a {stem} square\n")
        latents, text = {}, {}
        for width, height in resolutions:
            name = str(width) if width == height else f"{width}x{height}"
            folder = Path(f"cache/{RUN}/wan/{name}")
            latent = (1, height // 8, width // 8)
            path = folder / f"{stem}_0080x0064_wan.safetensors"
            put_latents(root / path, size=(80, 64), latent=latent)
            latents[name] = [os.fspath(path)]
            text[name] = os.fspath(folder / f"{stem}_wan_te.safetensors")
            put_text(root / text[name], f"a {stem} square")
        files = {"source": f"data/{RUN}/{stem}.png", "caption": f"data/{RUN}/{stem}.txt"}
        row = {"dataset": RUN, "stem": stem, "control": None, "repeats": 1, **files}
        rows.append({**row, "latents": latents, "text": text})
    rows.append({"dataset": RUN, "stem": "bad", "source": "bad.png", "aside": "damaged"})
    output = root / f"runs/{RUN}"
    output.mkdir(parents=True, exist_ok=True)
    (output / "manifest.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (output / "dataset.lock").write_text(json.dumps({"digest": digest.of_value(lock)}))
    put_weights(root / "models/dit.safetensors", *WAN_DIT)
    put_weights(root / "models/vae.safetensors", "encoder.conv1.weight", "decoder.conv1.weight")
    put_weights(root / "models/t5.safetensors", "token_embedding.weight", "norm.weight")
    section = {"task": "t2v-1.3B", "text": "models/t5.safetensors", "dit": "models/dit.safetensors"}
    return order_of(
        run=RUN,
        manifest=f"runs/{RUN}/manifest.jsonl",
        lock=f"runs/{RUN}/dataset.lock",
        output=f"runs/{RUN}",
        datasets={RUN: Dataset(path=f"data/{RUN}")},
        resolutions=list(resolutions),
        model={**section, **(model or {})},
        trainer={"max_train_epochs": 4, **trainer},
        program=None if tuner is None else ExternalProgram(path=os.fspath(tuner)),
    )


def write_order(order: MusubiOrder, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(order.model_dump_json())
    return path
