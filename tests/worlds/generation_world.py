"""A tiny Wan model with a LoRA, cached texts, and orders of clips."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from dit_world import tiny_dit
from latentmake.base import atomic, digest
from latentmake.config.models import Model
from latentmake.config.trainers import WanTrainer
from latentmake.formats import cachefile
from latentmake.layouts.names import text_metadata
from latentmake.runs.order import run_values
from latentmake.runs.results import Metrics
from latentmake.trainers.loop import draw
from latentmake.trainers.loop.generation import EvaluationOrder, GenerationOrder
from latentmake.trainers.loop.launch import read
from latentmake.trainers.loop.order import Prompt
from latentmake.trainers.lora import add_adapter, lora_tensors
from latentmake.trainers.wan.dit import WanOrder
from latentmake.trainers.wan.recipe import WanRecipe, write_lora
from wan_trainer_world import make_manifest
from wan_world import tiny_wan_vae

RUN = Path("runs/waves")


def generate(order: GenerationOrder) -> None:
    """Bring the clips of an order up to date."""
    model, settings = order.model, order.settings
    training = WanOrder(
        **run_values(order.run) | {"manifest": order.manifest},
        model=model,
        flow_shift=3.0,
        boundary=settings.timestep_boundary,
        weights="",
        prompts=[],
        negative=None,
        sample_size=(settings.width, settings.height),
        trainer=WanTrainer(kind="wan", mixed_precision="no"),
    )
    draw.generate(order, WanRecipe(training))


def evaluate(order: EvaluationOrder) -> Metrics | None:
    """Bring the results of an order up to date; None where they were."""
    return draw.follow(order, WanRecipe(read(Path(order.training), WanOrder)))


def write_lora_of(dit: Any, folder: Path, seed: int = 3, high_noise: bool = False) -> None:
    """Write a LoRA that changes what a network predicts."""
    add_adapter(dit, rank=2, target_modules=["to_q", "to_v"])
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in lora_tensors(dit).values():
            value.copy_(0.5 * torch.randn(value.shape, generator=generator))
    write_lora(dit, folder, high_noise=high_noise)


def text_file(text: str, width: int) -> str:
    """Write an embedding as the caches have it; return its path."""
    path = Path(f"cache/_prompts/wan/text/{digest.of_bytes(text.encode())[:20]}_wan_te.safetensors")
    seed = sum(text.encode())
    value = torch.randn(5, width, generator=torch.Generator().manual_seed(seed)).bfloat16()
    atomic.write(path, cachefile.serialize({"varlen_t5_bfloat16": value}, text_metadata(text)))
    return str(path)


def make_world(two: bool = False) -> None:
    """Write models, the run's LoRA and its first item into the working directory."""
    RUN.mkdir(parents=True, exist_ok=True)
    make_manifest(RUN, i2v=True)
    tiny_wan_vae(4).save_pretrained("models/vae")
    for number, name in enumerate(["dit", "high"][: 2 if two else 1]):
        dit = tiny_dit()
        with torch.no_grad():
            dit.proj_out.weight *= 1 + number
        dit.save_pretrained(f"models/{name}")
        write_lora_of(dit, RUN, high_noise=number == 1)


def order_of(*prompts: str, **changes: Any) -> GenerationOrder:
    """Return an order of the smallest clips; `changes` are of it and of its settings."""
    two = Path("models/high").is_dir()
    names = ["pytorch_lora_weights", *(["high_noise_pytorch_lora_weights"] if two else [])]
    model = Model.model_validate(
        {
            "task": "t2v-A14B" if two else "t2v-1.3B", "vae": "models/vae", "text": "models/text",
            "dit": "models/dit", **({"dit_high_noise": "models/high"} if two else {}),
        }
    )  # fmt: skip
    width = tiny_dit().config.text_dim
    settings: dict[str, Any] = {
        "frames": 5, "width": 48, "height": 32, "fps": 8, "num_inference_steps": 2,
        "guidance_scale": 2.0, "flow_shift": 3.0, "timestep_boundary": 0.875 if two else None,
    }  # fmt: skip
    settings |= {name: changes.pop(name) for name in settings.keys() & changes.keys()}
    if image := changes.get("image"):
        settings["image"] = digest.of_file(Path(image))
    values: dict[str, Any] = {
        "kind": "wan", "run": "waves", "output": str(RUN / "generated"), "model": model,
        "adapters": [str(RUN / f"{name}.safetensors") for name in names],
        "manifest": str(RUN / "manifest.jsonl"), "weights": "of the model", "captions": 0,
        "prompts": [Prompt(prompt=each, text=text_file(each, width)) for each in prompts],
        "negative": text_file("", width), "seeds": [0], "settings": settings, "base": True,
    }  # fmt: skip
    return GenerationOrder.model_validate({**values, **changes})
