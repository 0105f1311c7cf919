"""A tiny Wan network and caches of images and clips for the tests of the trainer `wan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from dit_world import image_dit, tiny_dit
from latentmake.config.models import Model
from latentmake.config.trainers import WanTrainer
from latentmake.layouts.names import latents_key
from latentmake.trainers.loop.order import Prompt
from latentmake.trainers.loop.train import Training
from latentmake.trainers.wan.dit import WanOrder
from latentmake.trainers.wan.plan import Wan
from latentmake.trainers.wan.recipe import WanRecipe
from safetensors.torch import save_file

train = Wan().train
TEXT_WIDTH = 24
IMAGE_WIDTH = 20
SHAPES = {"image": (1, 4, 6), "clip": (3, 4, 4)}  # frames, height, width of the latents
TWO: dict[str, Any] = {
    "networks": ("dit", "dit_high_noise"), "task": "t2v-A14B", "boundary": 0.875, "shift": 5.0,
}  # fmt: skip
"""Arguments of `make_order` for the two networks of Wan 2.2."""


def make_latents(path: Path, kind: str, seed: int, *, i2v: bool = False) -> str:
    """Write the cache file of one item: a colour of its own, which the network can learn."""
    path.parent.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(seed)
    shape = SHAPES[kind]
    colour = torch.randn(16, 1, 1, 1, generator=random).expand(16, *shape)
    tensors = {latents_key("latents", colour.shape, "bfloat16"): colour}
    if i2v:
        frame = torch.randn(20, *shape, generator=random)
        tensors |= {
            latents_key("latents_image", frame.shape, "bfloat16"): frame,
            "clip_bfloat16": torch.randn(5, IMAGE_WIDTH, generator=random),
        }
    whole = {name: value.bfloat16().contiguous() for name, value in tensors.items()}
    save_file(whole, path, {"architecture": "wan"})
    return str(path)


def make_text(path: Path, seed: int, tokens: int) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(1000 + seed)
    embedding = torch.randn(tokens, TEXT_WIDTH, generator=random)
    save_file({"varlen_t5_bfloat16": embedding.bfloat16()}, path)
    return str(path)


def make_manifest(root: Path, *, i2v: bool = False) -> Path:
    """Write caches of two images, of a video with two clips, and of a held-out one."""
    rows: list[dict[str, Any]] = []
    for number, kinds in enumerate((["image"], ["image"], ["clip", "clip"], ["clip"])):
        paths = [
            make_latents(root / f"cache/{number}_{place}_wan.safetensors", kind, number, i2v=i2v)
            for place, kind in enumerate(kinds)
        ]
        text = make_text(root / f"cache/{number}_te.safetensors", number, 5 + number)
        row = {
            "dataset": "shapes",
            "stem": f"item{number}",
            "source": f"data/item{number}",
            "repeats": 1,
            "latents": {"48x32": paths},
            "text": {"48x32": text},
            "caption": None,
            "control": None,
            "span": [0, 9, 1, False],
            "row": {"source": "a list", "length": 9},
        }
        rows.append(row | ({"validation": True} if number == 3 else {}))
    manifest = root / "manifest.jsonl"
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "dataset.lock").write_text(json.dumps({"digest": "d" * 64}))
    return manifest


def make_order(
    root: Path,
    *,
    output: str = "output",
    prompts: bool = False,
    networks: tuple[str, ...] = ("dit",),
    task: str = "t2v-1.3B",
    boundary: float | None = None,
    shift: float = 3.0,
    **settings: Any,
) -> WanOrder:
    """Make what is not there yet and return an order; `settings` are the trainer's."""
    i2v = task.startswith("i2v")
    if not (root / "manifest.jsonl").exists():
        make_manifest(root, i2v=i2v)
    for number, name in enumerate(networks):
        if not (root / name).exists():
            dit = image_dit() if i2v else tiny_dit()
            with torch.no_grad():
                dit.proj_out.bias += number  # so that two networks differ
            dit.save_pretrained(root / name)
    usual = {"kind": "wan", "rank": 4, "mixed_precision": "no", "learning_rate": 1e-2}
    texts = [Prompt(prompt="a clip", text=str(root / "cache/0_te.safetensors"))]
    model = {name: str(root / name) for name in ("dit", "dit_high_noise") if name in networks}
    model |= {"task": task, "text": "t5", "vae": str(root / "vae")}
    model |= {"clip": "clip"} if i2v else {}
    return WanOrder(
        run="tiny",
        manifest=str(root / "manifest.jsonl"),
        lock=str(root / "dataset.lock"),
        output=str(root / output),
        weights="w" * 64,
        model=Model.model_validate(model),
        flow_shift=shift,
        boundary=boundary,
        prompts=texts if prompts else [],
        negative=make_text(root / "cache/negative.safetensors", 99, 2) if prompts else None,
        sample_size=(48, 32),
        trainer=WanTrainer(**{**usual, **settings}),
    )


def make_training(order: WanOrder) -> Training:
    AcceleratorState._reset_state(True)  # accelerate keeps the number format of a process
    return Training(WanRecipe(order))


def configuration(
    model: dict[str, Any],
    trainer: dict[str, Any] | None = None,
    dataset: dict[str, Any] | None = None,
    **run: Any,
) -> dict[str, Any]:
    """Return the configuration of the run `r`; a key of its model that is None is left out."""
    values = {"vae": "vae", "text": "text", "task": "t2v-1.3B", "dit": "dit", **model}
    usual = {"datasets": ["films"], "model": "m", "resolutions": [[64, 48]]}
    return {
        "datasets": {"films": {"path": "films", "target_frames": [5], **(dataset or {})}},
        "models": {"m": {key: value for key, value in values.items() if value is not None}},
        "runs": {"r": {**usual, "trainer": {"kind": "wan", **(trainer or {})}, **run}},
    }
