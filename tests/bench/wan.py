"""Time and memory of training Wan's network and of encoding clips, with random weights.

    python tests/bench/wan.py [--model 1.3B] [--frames 81] [--height 480] [--width 832]
        [--steps 5] [--batch-size 1] [--rank 32] [--optimizer adamw] [--precision bf16]
        [--only train encode] [--json FILE]

Real sizes on a GPU: the network is made on it of its configuration, so that nothing is downloaded.
A step draws noise, does forward and backward over 512 text tokens by the objective of the trainer
`wan`, clips and steps the optimizer; once with gradient checkpointing and once without. Clips are
encoded one at a time from uint8 pixels in the CPU's memory by Wan's VAE of real size in bfloat16.
`--model A14B` is the two networks of Wan 2.2, of which each step takes one at random, with gradient
checkpointing alone. `--model tiny` makes all of it small, for a CPU.

Printed: seconds of a step (median, least and most), its peak memory in GB and what
`trainers/wan/estimate.py` says of it; clips a minute. On a CPU memory is the most that the process
held.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts")]

from latentmake.config.trainers import WanTrainer  # noqa: E402
from latentmake.encode.encoders.device import pick_device  # noqa: E402
from latentmake.encode.encoders.wan import WanVae  # noqa: E402
from latentmake.trainers.loop.caches import Batch  # noqa: E402
from latentmake.trainers.loop.recipe import Painter  # noqa: E402
from latentmake.trainers.lora import add_adapter  # noqa: E402
from latentmake.trainers.wan.dit import check_targets  # noqa: E402
from latentmake.trainers.wan.estimate import training_memory  # noqa: E402
from latentmake.trainers.wan.recipe import Denoiser, Objective  # noqa: E402

MODELS = {
    "1.3B": {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30},
    "14B": {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40},
    "A14B": {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40},
    "tiny": {
        **{"num_attention_heads": 2, "attention_head_dim": 32, "ffn_dim": 256},
        **{"num_layers": 2, "text_dim": 64},
    },
}
TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
TEXT_TOKENS = 512
DTYPES = {"bf16": torch.bfloat16, "no": torch.float32}


def make_network(sizes: dict[str, int], device: torch.device, dtype: torch.dtype) -> Any:
    """Return a network of random weights, made on its device and in its dtype."""
    made: Any = WanTransformer3DModel
    torch.set_default_dtype(dtype)
    try:
        with device:
            network = made(**sizes)
    finally:
        torch.set_default_dtype(torch.float32)
    exact = set(made._keep_in_fp32_modules)
    for name, parameter in network.named_parameters():
        if exact & set(name.split(".")):
            parameter.data = parameter.data.float()
    return network


def make_optimizer(name: str, parameters: list[Any]) -> Any:
    if name == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit  # type: ignore[import-not-found, unused-ignore]

        return AdamW8bit(parameters, lr=1e-4)
    return torch.optim.AdamW(parameters, lr=1e-4)


@contextmanager
def fresh(device: torch.device) -> Iterator[None]:
    """Measure memory from here; what is in the cycle of a network is freed first."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    yield


def peak(device: torch.device) -> float:
    """Return the peak memory in GB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def seconds(work: Callable[[], object], device: torch.device, rounds: int) -> list[float]:
    """Return the times of some work, sorted, after one round that warms up."""
    found = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - began)
    return sorted(found[1:])


def train(options: argparse.Namespace, device: torch.device) -> Iterator[dict[str, object]]:
    """Yield a row with gradient checkpointing, and one without."""
    sizes, dtype = MODELS[options.model], DTYPES[options.precision]
    latent = ((options.frames - 1) // 4 + 1, options.height // 8, options.width // 8)
    with torch.device("meta"):
        made: Any = WanTransformer3DModel(**sizes)
    shapes = {name: tuple(value.shape) for name, value in made.state_dict().items()}
    layers = check_targets(TARGETS, shapes, "targets")
    for checkpointing in (True,) if options.model == "A14B" else (True, False):
        trainer = WanTrainer(
            kind="wan",
            rank=options.rank,
            train_batch_size=options.batch_size,
            mixed_precision="bf16" if dtype == torch.bfloat16 else "no",
            gradient_checkpointing=checkpointing,
            optimizer=options.optimizer,
        )
        taken = training_memory(shapes, made.config, layers, latent, trainer)
        row: dict[str, object] = {
            "gradient checkpointing": "yes" if checkpointing else "no",
            "a step [s]": None,
            "peak [GB]": None,
            "estimate [GB]": sum(taken.values()) / 1e9,
        }
        with fresh(device):
            try:
                row |= steps(options, sizes, latent, device, dtype, checkpointing)
            except torch.cuda.OutOfMemoryError:
                row["a step [s]"] = "out of memory"
        yield row


def steps(
    options: argparse.Namespace,
    sizes: dict[str, int],
    latent: tuple[int, int, int],
    device: torch.device,
    dtype: torch.dtype,
    checkpointing: bool,
) -> dict[str, object]:
    """Measure steps of one network."""
    torch.manual_seed(0)
    half, two = dtype != torch.float32, options.model == "A14B"
    networks = []
    for _ in range(1 + two):
        made = make_network(sizes, device, dtype)
        add_adapter(made, rank=options.rank, target_modules=TARGETS, autocast=half)
        if checkpointing:
            made.enable_gradient_checkpointing()
        networks.append(made.train().to("cpu") if two else made.train())
    network = Denoiser(networks[0], networks[1] if two else None, 0.875 if two else 1.0)
    if two:
        network.lend(device)
    parameters = [each for each in network.parameters() if each.requires_grad]
    optimizer = make_optimizer(options.optimizer, parameters)
    batch = options.batch_size
    order: Any = SimpleNamespace(
        flow_shift=3.0,
        boundary=0.875 if two else None,
        model=SimpleNamespace(dit="low", dit_high_noise="high" if two else None),
        trainer=SimpleNamespace(timestep_sampling="logit_normal"),
    )
    objective = Objective(order)
    painter: Any = SimpleNamespace(
        objective=objective,
        device=device,
        dtype=dtype,
        autocast=lambda: torch.autocast(device.type, dtype, enabled=dtype != torch.float32),
    )
    random = torch.Generator().manual_seed(0)
    items = Batch(  # in the CPU's memory, as those of a training
        latents=torch.randn(batch, 16, *latent),
        text=torch.randn(batch, TEXT_TOKENS, sizes.get("text_dim", 4096), dtype=torch.bfloat16),
        mask=None,
    )

    def step() -> None:
        noise, timesteps = objective.draw(items.latents.shape, random)
        _, losses = Painter.losses(painter, network, items, noise, timesteps)
        losses.mean().backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    trained = sum(each.numel() for each in parameters)
    total = sum(each.numel() for each in network.parameters())
    print(f"{trained:,} of {total:,} parameters are trained")
    found = seconds(step, device, options.steps)
    return {
        "a step [s]": statistics.median(found),
        "least [s]": found[0],
        "most [s]": found[-1],
        "peak [GB]": peak(device),
    }


def encode(options: argparse.Namespace, device: torch.device) -> dict[str, object]:
    """Return a row of the speed of encoding."""
    torch.manual_seed(0)
    settings = {"base_dim": 8} if options.model == "tiny" else {}
    made: Any = AutoencoderKLWan
    network = made(**settings)
    network.decoder = network.post_quant_conv = None
    dtype = DTYPES[options.precision]
    torch.nn.Module.to(network, device=device, dtype=dtype)
    vae = WanVae(network.eval().requires_grad_(False))
    shape = (1, options.frames, options.height, options.width, 3)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8)
    with fresh(device):
        times = seconds(lambda: vae.encode(pixels, torch.bfloat16), device, options.steps)
        found = statistics.median(times)
    return {"a clip [s]": found, "clips a minute": 60 / found, "peak [GB]": peak(device)}


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=list(MODELS), default="1.3B")
    parser.add_argument("--frames", type=int, default=81)
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--width", type=int, default=832)
    parser.add_argument("--steps", type=int, default=5, help="that are measured, after the first")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--optimizer", choices=["adamw", "adamw8bit"], default="adamw")
    parser.add_argument("--precision", choices=list(DTYPES), default="bf16")
    parser.add_argument("--only", choices=["train", "encode"], help="one half")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    options = parser.parse_args()
    device = pick_device()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    clip = f"{options.frames} x {options.height} x {options.width}"
    print(f"Wan {options.model}, {clip}, batch of {options.batch_size}, {name}")
    tables: dict[str, list[dict[str, object]]] = {}
    if options.only != "encode":
        tables["training"] = list(train(options, device))
    if options.only != "train":
        tables["encoding"] = [encode(options, device)]
    for rows in tables.values():
        print(tabulate(rows, headers="keys", floatfmt=".3g"))
    if options.json:
        options.json.write_text(json.dumps({"device": name, "clip": clip, **tables}))


if __name__ == "__main__":
    main()
