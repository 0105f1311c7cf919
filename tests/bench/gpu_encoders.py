"""Speed of encoders on a GPU: whole jobs and bare loops.

    python tests/bench/gpu_encoders.py STEP [--cpu] [--json FILE]

Steps: `vae512` and `vae1024` (Stable Diffusion's), `wan` (pictures and clips), `t5` (XXL's size),
`clip`. gpu.sh runs them all. A job reads files with 8 threads and writes cache files;
its start, until the first batch is ready, is left out. The bare loop runs the same encoder in
the same dtype over pixels or tokens that lie in memory, at the fastest of some batch sizes, and
copies what it makes to the CPU. `busy` is the share of a job's time in which the device was at work
on batches, by its own clock.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import gpu_world as world
from latentmake.config.models import Model
from latentmake.encode.encoders.device import DTYPES, encoder, pick_device
from latentmake.encode.encoders.wan import WanVae
from latentmake.encode.job import Say
from latentmake.encode.reading import Encoded, Loaded, Sample
from latentmake.encode.runner import carry_out, load_encoder
from latentmake.plan.orders import Order
from latentmake.plan.receipts import read_receipt

Row = dict[str, object]
SIZES = (1, 2, 4, 8, 16, 32)
THREADS = 8


class Busy:
    """Marks of the device before and after each batch, and the batch sizes in use."""

    def __init__(self, say: Say) -> None:
        self.say = say
        self.marks: list[tuple[Any, Any]] = []
        self.sizes: list[int] = []

    @property
    def seconds(self) -> float:
        """Seconds in which the device was at work on batches."""
        return sum(began.elapsed_time(ended) for began, ended in self.marks) / 1000

    def load(self, order: Order) -> Loaded:
        """Load an encoder whose batches are watched."""
        loaded = load_encoder(order, THREADS, self.say)

        def encode(samples: list[Sample]) -> Encoded:
            self.sizes.append(len(samples))
            if not loaded.queues:
                return loaded.encode(samples)
            event: Any = torch.cuda.Event
            began, ended = event(enable_timing=True), event(enable_timing=True)
            began.record()
            encoded = loaded.encode(samples)
            ended.record()
            self.marks.append((began, ended))
            return encoded

        return loaded._replace(encode=encode)


def job(order: Order) -> Row:
    """Carry out an order twice; the second time libraries have chosen their kernels."""
    row: Row = {}
    for known in (False, True):
        for made in ("cache", ".latentmake/store"):
            shutil.rmtree(made, ignore_errors=True)
        lines = list[str]()
        busy = Busy(lines.append)
        carry_out([order], say=lines.append, threads=THREADS, load=busy.load)
        receipt = read_receipt(order.receipt)
        count = len(order.items)
        if receipt.counts["encoded"] != count:
            raise RuntimeError(f"{receipt.counts}: {lines[-1]}")
        starting = receipt.starting or 0.0
        seconds = receipt.seconds - starting
        row |= {f"job{' again' * known} /s": count / seconds, "start [s]": starting}
        if busy.marks:
            row |= {"busy": busy.seconds / seconds, "batch": statistics.mode(busy.sizes)}
    return row


def compared(row: Row, bare: dict[int, float]) -> Row:
    """Add the fastest bare loop to a row, and its ratio to the job."""
    size = max(bare, key=lambda each: bare[each])
    ratio = bare[size] / float(str(row["job again /s"]))
    return row | {"bare /s": bare[size], "bare batch": size, "bare / job": ratio}


def rates(
    work: Callable[[int], Callable[[], object]], device: torch.device, cpu: bool
) -> dict[int, float]:
    """Return samples per second by batch size, as far as memory goes."""
    found: dict[int, float] = {}
    for size in SIZES[:2] if cpu else SIZES:
        try:
            found[size] = world.rate(work(size), size, device, 0.02 if cpu else 0.7)
        except torch.OutOfMemoryError:
            break
        if size > 4 and found[size] < 1.02 * found[size // 2]:
            break
    world.free_memory()
    return found


def images(side: int, cpu: bool, device: torch.device) -> Iterator[Row]:
    """Yield rows of Stable Diffusion's VAE at a number of pixels a side."""
    vae = world.sd_vae(device, tiny=cpu)
    vae.save_pretrained("vae")
    names = ("bfloat16", "float16", "float32") if side <= 512 else ("bfloat16",)
    for name in ("float32",) if cpu else names:
        network = torch.nn.Module.to(vae, device, DTYPES[name])  # diffusers' own warns of nothing

        def bare(size: int, network: Any = network, name: str = name) -> Callable[[], object]:
            made = world.pixels(size, side, side)
            given = made.pin_memory() if device.type == "cuda" else made

            @torch.inference_mode()
            def run() -> torch.Tensor:
                signal = given.to(device, non_blocking=True).permute(0, 3, 1, 2).float()
                signal = (signal / 127.5 - 1.0).contiguous().to(DTYPES[name])
                mean: torch.Tensor = network.encode(signal).latent_dist.mean
                return mean.to("cpu", non_blocking=True)

            return run

        found = rates(bare, device, cpu)
        count = 6 if cpu else max(64, min(int(3 * max(found.values())), 4096))
        sources = world.write_pictures(Path("data"), count, (side, side))
        model = Model(vae="vae", text=["text"], dtype=name)  # type: ignore[arg-type, list-item]
        row = compared(job(world.order_of("latents", model, sources, str(side))), found)
        yield {"encoder": f"SD VAE, {side} px", "dtype": name, "unit": "images", **row}


def wan(cpu: bool, device: torch.device) -> Iterator[Row]:
    """Yield rows of Wan's VAE: a job over pictures, and clips that lie in memory."""
    width, height = (64, 48) if cpu else (832, 480)
    vae = world.wan_vae(device, tiny=cpu)
    vae.save_pretrained("vae")
    vae.decoder = vae.post_quant_conv = None
    name = "float32" if cpu else "bfloat16"
    torch.nn.Module.to(vae, dtype=DTYPES[name])
    ours = WanVae(vae)
    model = Model(vae="vae", text=["text"], task="t2v-1.3B", dtype=name)  # type: ignore[arg-type, list-item]

    def bare(frames: int) -> Callable[[int], Callable[[], object]]:
        def of(size: int) -> Callable[[], object]:
            made = world.pixels(size, frames, height, width)
            signal = made.to(device).permute(0, 4, 1, 2, 3).to(DTYPES[name]) / 127.5 - 1.0
            signal = signal.contiguous()

            @torch.inference_mode()
            def run() -> torch.Tensor:
                return vae.encode(signal).latent_dist.mode().to("cpu", non_blocking=True)

            return run

        return of

    found = rates(bare(1), device, cpu)
    count = 4 if cpu else max(64, min(int(3 * max(found.values())), 2048))
    sources = world.write_pictures(Path("data"), count, (width, height))
    order = world.order_of("latents", model, sources, f"{width}x{height}")
    unit = f"pictures of {width} x {height}"
    yield {"encoder": "Wan VAE", "dtype": name, "unit": unit, **compared(job(order), found)}
    frames = 5 if cpu else 33
    clip = world.pixels(1, frames, height, width)
    mine = world.rate(lambda: ours.encode(clip, DTYPES[name]), 1, device, 0.02 if cpu else 4.0)
    found = {1: world.rate(bare(frames)(1), 1, device, 0.02 if cpu else 4.0)}
    row = compared({"job again /s": mine}, found)
    yield {"encoder": "Wan VAE", "dtype": name, "unit": f"clips of {frames} frames", **row}


def text(kind: str, cpu: bool, device: torch.device) -> Iterator[Row]:
    """Yield a row of a text encoder, in tokens without padding."""
    from transformers import AutoTokenizer

    (world.save_t5 if kind == "t5" else world.save_clip)(Path(kind), device, tiny=cpu)
    world.free_memory()
    name = "float32" if cpu else "bfloat16"
    count = 12 if cpu else 3000
    given = world.captions(count)
    tokenizer = AutoTokenizer.from_pretrained(f"{kind}/tokenizer")
    limit = {"truncation": True, "max_length": 512 if kind == "t5" else 77}
    lengths = [len(ids) for ids in tokenizer(given, **limit).input_ids]
    tokens = sum(lengths)
    places: Any = [f"{kind}/text_encoder"]
    model = Model(vae="vae", text=places, dtype=name)  # type: ignore[arg-type]
    order = world.order_of("text", model, given, "text")
    row = job(order)
    loaded = encoder(order, threads=THREADS, say=lambda line: None)
    network = _network_of(loaded.encode)
    width = 77 if kind == "clip" else int(statistics.median(lengths))

    def bare(size: int) -> Callable[[], object]:
        ids = torch.randint(5, 90, (size, width), device=device)

        @torch.inference_mode()
        def run() -> torch.Tensor:
            state: torch.Tensor = network(input_ids=ids).last_hidden_state
            return state.to("cpu", non_blocking=True)

        return run

    found = rates(bare, device, cpu)
    scale = tokens / count  # of captions, and in the bare loop of rows
    found = {size: each * (width if kind == "t5" else scale) for size, each in found.items()}
    shown = {key: float(str(v)) * scale if key.endswith("/s") else v for key, v in row.items()}
    yield {"encoder": kind, "dtype": name, "unit": "tokens", **compared(shown, found)}


def _network_of(encode: Callable[..., Any]) -> Any:
    """Return the first network among what an encoder's function has at hand."""
    waiting, seen = [encode], set[int]()
    while waiting:
        each: Any = waiting.pop(0)
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, torch.nn.Module):
            return each
        cells = [cell.cell_contents for cell in getattr(each, "__closure__", None) or ()]
        inner = each.values() if isinstance(each, dict) else getattr(each, "__dict__", {}).values()
        waiting += [*cells, *getattr(each, "args", ()), *inner]
    raise LookupError("the encoder holds no network")


STEPS: dict[str, Callable[[bool, torch.device], Iterator[Row]]] = {
    "vae512": lambda cpu, device: images(64 if cpu else 512, cpu, device),
    "vae1024": lambda cpu, device: images(96 if cpu else 1024, cpu, device),
    "wan": wan,
    "t5": lambda cpu, device: text("t5", cpu, device),
    "clip": lambda cpu, device: text("clip", cpu, device),
}


def run(step: str, *, cpu: bool, path: Path | None) -> None:
    """Run a step in a folder of its own."""
    device = torch.device("cpu") if cpu else pick_device()
    with world.folder():
        world.tell(STEPS[step](cpu, device), path)


def main() -> None:
    """Run a step."""
    parser = argparse.ArgumentParser(description="Measure encoders.")
    parser.add_argument("step", choices=list(STEPS))
    parser.add_argument("--cpu", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    options = parser.parse_args()
    run(options.step, cpu=options.cpu, path=options.json and options.json.absolute())


if __name__ == "__main__":
    main()
