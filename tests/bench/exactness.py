"""How far each encoder is from a run in float64, and how fast, by number format and memory layout.

    python tests/bench/exactness.py [--side 512]

Whole but narrow networks with random weights, on the CPU with one thread, in one run. Printed: the
largest difference from the same network in float64, as a share of the largest value, for a white
picture, noise and a gradient (of text encoders: for captions); and the time as a ratio to float32
with contiguous pictures, the median of the three. A layout is how the picture lies in
memory: `contiguous`, a channel after the other, or `channels last`, as a decoded picture lies.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests/worlds"), str(ROOT / "tests/unit/encode")]

import test_encoders  # noqa: E402
from demo.text import clip_tokenizer  # noqa: E402
from exact_world import error, narrow_vae, pictures  # noqa: E402
from transformers import CLIPVisionConfig, CLIPVisionModel  # noqa: E402
from wan_world import shuffled, tiny_wan_vae  # noqa: E402

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INPUTS = ("white", "noise", "gradient", "captions")
CAPTION = " ".join(test_encoders.CAPTIONS)
Run = Callable[[Any, Any], torch.Tensor]


class Encoder(NamedTuple):
    """What is measured.

    Attributes:
        name: in the table.
        network: in float32.
        inputs: what it is given, by name.
        run: encodes an input, in the network's format.
        of_pictures: whether inputs lie in memory in one way or another.
    """

    name: str
    network: torch.nn.Module
    inputs: dict[str, torch.Tensor]
    run: Run
    of_pictures: bool = True


def _signal(picture: torch.Tensor) -> torch.Tensor:
    return picture.permute(0, 3, 1, 2).to(torch.float32) / 127.5 - 1.0


def _encoders(side: int) -> Iterator[Encoder]:
    signals = {name: _signal(each) for name, each in pictures(side).items()}
    latents: Run = lambda network, signal: network.encode(signal).latent_dist.mean  # noqa: E731
    yield Encoder("AutoencoderKL (plain)", narrow_vae(), signals, latents)
    flipped = {name: _signal(each.flip(2)) for name, each in pictures(side).items()}
    yield Encoder("AutoencoderKL (sdscripts, flipped)", narrow_vae(), flipped, latents)
    yield Encoder("AutoencoderKL of Flux (sdscripts)", narrow_vae(flux=True), signals, latents)
    frames = {name: each[:, :, None] for name, each in signals.items()}
    wan: Run = lambda network, signal: network.encode(signal).latent_dist.mode()  # noqa: E731
    yield Encoder("Wan's VAE", tiny_wan_vae(4), frames, wan)
    torch.manual_seed(0)
    vision = CLIPVisionModel(
        CLIPVisionConfig(
            hidden_size=160, intermediate_size=320, num_hidden_layers=4, num_attention_heads=2,
            patch_size=14, image_size=224,
        )
    ).eval()  # fmt: skip
    yield Encoder("CLIP vision", shuffled(vision, 0.02), signals, _seen)
    ids = {"captions": torch.randint(0, 90, (1, 77), generator=torch.Generator().manual_seed(0))}
    text: Run = lambda network, ids: network(input_ids=ids).last_hidden_state  # noqa: E731
    for kind, name in (("clip", "CLIP text"), ("t5", "T5"), ("umt5", "umT5")):
        words = 100 if kind != "clip" else len(clip_tokenizer([CAPTION]))
        yield Encoder(name, test_encoders.tiny(kind, words), ids, text, of_pictures=False)


def _seen(network: Any, signal: torch.Tensor) -> torch.Tensor:
    side = network.config.image_size
    signal = torch.nn.functional.interpolate(
        signal, size=(side, side), mode="bicubic", align_corners=False
    )
    return network(signal).last_hidden_state  # type: ignore[no-any-return]


def _lies(value: torch.Tensor, layout: str, dtype: torch.dtype) -> torch.Tensor:
    """Return an input in a layout and a format; token ids as they are."""
    if not layout:
        return value
    return (value.contiguous() if layout == "contiguous" else value).to(dtype)


@torch.inference_mode()
def _rows(encoder: Encoder) -> Iterator[list[str]]:
    layouts = ("contiguous", "channels last") if encoder.of_pictures else ("",)
    double = copy.deepcopy(encoder.network).double()
    exact = {
        name: encoder.run(double, _lies(each, layouts[0], torch.float64))
        for name, each in encoder.inputs.items()
    }
    bare: dict[str, float] = {}  # seconds in float32, contiguous
    for dtype in DTYPES:
        network = copy.deepcopy(encoder.network)
        torch.nn.Module.to(network, dtype)  # diffusers' own warns of nothing
        for layout in layouts:
            errors: dict[str, str] = {}
            seconds: dict[str, float] = {}
            for name, each in encoder.inputs.items():
                value = _lies(each, layout, dtype)
                began = time.perf_counter()
                found = encoder.run(network, value)
                seconds[name] = time.perf_counter() - began
                errors[name] = f"{error(found, exact[name]):.1e}"
            bare = bare or seconds
            ratio = statistics.median(seconds[name] / bare[name] for name in seconds)
            shown = [errors.get(name, "") for name in INPUTS]
            yield [encoder.name, str(dtype)[6:], layout, *shown, f"{ratio:.2f}"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Measure errors against float64.")
    parser.add_argument("--side", type=int, default=512)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for each in _encoders(arguments.side):
        sys.stderr.write(f"{each.name}\n")
        rows += list(_rows(each))
    header = ["encoder", "format", "layout", *INPUTS, "time"]
    sys.stdout.write(f"{tabulate(rows, header, disable_numparse=True)}\n")


if __name__ == "__main__":
    main()
