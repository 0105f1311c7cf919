"""Tiny networks and caches for the tests of the trainer: random weights, a few kilobytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tiny_networks
import torch
from diffusers import DDPMScheduler, UNet2DConditionModel
from latentmake.config.models import Model
from latentmake.config.trainers import SdTrainer
from latentmake.runs.order import RunFiles
from latentmake.runs.results import Metrics
from latentmake.trainers.loop import draw
from latentmake.trainers.loop.generation import GenerationOrder
from latentmake.trainers.loop.launch import read
from latentmake.trainers.loop.order import Prompt
from latentmake.trainers.loop.recipe import BatchOrder, Painter
from latentmake.trainers.loop.train import Training
from latentmake.trainers.sd.plan import Sd
from latentmake.trainers.sd.recipe import Objective, SdRecipe
from latentmake.trainers.sd.unet import SdOrder
from safetensors.torch import save_file

train = Sd().train
TEXT_WIDTH = 16
SCALING = 0.5
SHIFT = 0.25


def make_unet(folder: Path, **changes: Any) -> Path:
    torch.manual_seed(1)
    settings: dict[str, Any] = {
        "sample_size": 8,
        "in_channels": 4,
        "out_channels": 4,
        "layers_per_block": 1,
        "block_out_channels": (16, 32),
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "cross_attention_dim": TEXT_WIDTH,
        "attention_head_dim": 8,
        "norm_num_groups": 8,
    }
    UNet2DConditionModel(**{**settings, **changes}).save_pretrained(folder)
    return folder


def unet_inputs(count: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw what a UNet is called with: latents, timesteps, text."""
    random = torch.Generator().manual_seed(4)
    return (
        torch.randn(count, 4, 8, 8, generator=random),
        torch.tensor([700, 3][:count]),
        torch.randn(count, 7, TEXT_WIDTH, generator=random),
    )


def make_vae(folder: Path) -> Path:
    torch.manual_seed(2)
    tiny_networks.vae((8, 8), sample_size=16).save_pretrained(folder)
    return folder


def make_scheduler(folder: Path, **changes: Any) -> Path:
    DDPMScheduler(beta_schedule="scaled_linear", **changes).save_pretrained(folder)
    return folder


def objective_in(folder: Path, **settings: Any) -> Objective:
    """Return the objective of the noise schedule in a folder; `settings` are the trainer's."""
    places = {"unet": str(folder / "unet"), "scheduler": str(folder)}
    model = Model.model_validate({**places, "vae": "vae", "text": "text"})
    return Objective(SdOrder.model_construct(model=model, trainer=SdTrainer(kind="sd", **settings)))


def batch_order(
    shapes: Sequence[tuple[int, ...]], repeats: Sequence[int], processes: int = 1, **settings: Any
) -> BatchOrder:
    """Return the batches of examples of these shapes; `settings` are the trainer's."""
    examples = [
        SimpleNamespace(latents=SimpleNamespace(shape=shape), repeats=count)
        for shape, count in zip(shapes, repeats, strict=True)
    ]
    caches: Any = SimpleNamespace(examples=examples, rows=examples, variants={})
    trainer = SdTrainer(**{"kind": "sd", "train_batch_size": 2, **settings})
    return BatchOrder(caches, trainer, processes)


def losses_by(objective: Any, *part: Any, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Return the losses of a network and a micro-batch in float32, see `Painter.losses`."""
    place = {"device": torch.device(device), "dtype": torch.float32, "autocast": nullcontext}
    painter: Any = SimpleNamespace(objective=objective, **place)
    return Painter.losses(painter, *part)


def make_latents(path: Path, height: int, width: int, seed: int) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(seed)
    colour = torch.randn(4, 1, 1, generator=random).expand(4, height, width).contiguous()
    metadata = {
        "scaling_factor": str(SCALING),
        "shift_factor": str(SHIFT),
        "pixel_width": str(width * 2),
        "pixel_height": str(height * 2),
    }
    save_file({"latents": colour / SCALING + SHIFT}, path, metadata)
    return str(path)


def make_text(path: Path, seed: int, tokens: int = 7, width: int = TEXT_WIDTH) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(1000 + seed)
    embedding = torch.randn(tokens, width, generator=random)
    save_file({"text_encoder.hidden_state": embedding}, path)
    return str(path)


def make_manifest(root: Path, *, tokens: tuple[int, ...] = (7, 7, 7)) -> Path:
    """Write caches of some items at two resolutions, one skipped item, and their manifest."""
    lines: list[dict[str, Any]] = []
    for number, length in enumerate(tokens):
        lines.append(
            {
                "dataset": "shapes",
                "stem": f"item{number}",
                "source": f"data/shapes/item{number}.png",
                "repeats": 1 + number % 2,
                "latents": {
                    "16": make_latents(root / f"cache/16/{number}.safetensors", 8, 8, number),
                    "16x8": make_latents(root / f"cache/16x8/{number}.safetensors", 4, 8, number),
                },
                "text": make_text(root / f"cache/text/{number}.safetensors", number, length),
            }
        )
    lines.append({"dataset": "shapes", "stem": "bad", "source": "bad.png", "aside": "damaged"})
    manifest = root / "manifest.jsonl"
    manifest.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (root / "dataset.lock").write_text(json.dumps({"digest": "d" * 64}))
    return manifest


def make_order(
    root: Path, *, output: str = "output", prompts: bool = False, **settings: Any
) -> SdOrder:
    """Make what is not there yet and return an order; `settings` are the trainer's."""
    manifest = root / "manifest.jsonl"
    if not manifest.exists():
        make_manifest(root)
    for name, make in (("unet", make_unet), ("vae", make_vae), ("scheduler", make_scheduler)):
        if not (root / name).exists():
            make(root / name)
    texts = [
        Prompt(prompt=f"a shape {n}", text=str(root / f"cache/text/{n}.safetensors"))
        for n in (0, 1)
    ]
    return SdOrder(
        run="tiny",
        manifest=str(manifest),
        lock=str(root / "dataset.lock"),
        output=str(root / output),
        model=Model.model_validate(
            {**{each: str(root / each) for each in ("unet", "vae", "scheduler")}, "text": "text"}
        ),
        weights="w" * 64,
        prompts=texts if prompts else [],
        negative=make_text(root / "cache/text/negative.safetensors", 99) if prompts else None,
        sample_size=(16, 8),
        trainer=SdTrainer(
            **{"kind": "sd", "train_batch_size": 2, "mixed_precision": "no", **settings}
        ),
    )


def of_model(order: SdOrder, **changes: Any) -> SdOrder:
    """Return the order with some keys of its model changed."""
    return order.model_copy(update={"model": order.model.model_copy(update=changes)})


def make_training(order: SdOrder) -> Training:
    return Training(SdRecipe(order))


def trained(root: Path, **settings: Any) -> SdOrder:
    """Return the order of a finished training; see `make_order`."""
    order = make_order(root, **settings)
    make_training(order).run()
    return order


def weights(order: SdOrder) -> bytes:
    return RunFiles(order).weights.read_bytes()


def record(order: SdOrder) -> dict[str, Any]:
    """Return the values in a finished training's record."""
    found: dict[str, Any] = json.loads(RunFiles(order).record.read_text())
    return found


def edit_rows(manifest: Path, edit: Callable[[list[dict[str, Any]]], object]) -> None:
    """Edit the rows of a manifest."""
    rows = [json.loads(line) for line in manifest.read_text().splitlines()]
    edit(rows)
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_order(order: SdOrder, path: Path) -> Path:
    path.write_text(order.model_dump_json())
    return path


def make_generation(
    training: SdOrder, kind: type[GenerationOrder] = GenerationOrder, **changes: Any
) -> Any:
    """Return an order of pictures with the settings of a training's samples; it lies on the disk.

    `changes` are of the order and of its settings.
    """
    output, samples = Path(training.output), training.trainer.samples
    order = write_order(training, output.parent / "train.json")
    width, height = training.sample_size
    settings: dict[str, Any] = {
        "width": width,
        "height": height,
        "num_inference_steps": samples.num_inference_steps,
        "guidance_scale": samples.guidance_scale,
    }
    settings |= {key: changes.pop(key) for key in settings.keys() & changes.keys()}
    model = {"vae": str(output.parent / "vae"), "text": "text", "unet": "unet"}
    values: dict[str, Any] = {
        "kind": "sd",
        "run": "tiny",
        "training": str(order),
        "output": str(output / kind.word),
        "adapters": [str(output / name) for name in training.results],
        "manifest": training.manifest,
        "model": Model.model_validate(model),
        "weights": "w",
        "prompts": training.prompts,
        "captions": 0,
        "negative": training.negative,
        "seeds": [samples.seed],
        "settings": settings,
        "base": True,
    }
    return kind.model_validate(values | changes)


def follow(order: GenerationOrder) -> Metrics | None:
    """Bring pictures, or the results of an evaluation, up to date."""
    return draw.follow(order, SdRecipe(read(Path(order.training), SdOrder)))
