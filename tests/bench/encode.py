"""Speed of encoding, as ratios to a bare loop and to the loop that a user writes.

    python tests/bench/encode.py [CASE ...] [--share 0.1] [--rounds 3] [--json FILE]
        [--folder FOLDER]

Cases: `large`, 300 JPEGs of 1536 x 1152 to 64 and 96 pixels with the sample's tiny VAE; `small`,
400 JPEGs of 256 to 64 and 96; `one`, the same to 64 alone; `sd`, 6 JPEGs of 768 x 576 to 256 and
512 with a VAE of Stable Diffusion's size; `text`, 5,000 captions, a third of them equal, with a T5
of 6 layers and 512 channels. Weights are random. `--share` takes that share of the items, and 0.05
answers in half a minute.

`bare` is the encoder alone: the same weights, tensors in memory, one sample after the other,
nothing saved, with torch's own number of threads (what a user has) and with one. `plain` opens each
picture for each resolution, scales it with Pillow, encodes and saves it. Both keep their network
and do what this tool does, in one run: processes that have loaded take turns. Printed: medians over
rounds of milliseconds a target, and of the ratios within a round, in time and in processor time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[2]
LOOPS = Path(__file__).with_name("encode_loops.py")
CORES = len(os.sched_getaffinity(0))


class Case(NamedTuple):
    """Sources and network of a measurement; without resolutions it is one of captions."""

    items: int
    size: tuple[int, int]
    sides: tuple[int, ...]
    network: str


CASES = {
    "large": Case(300, (1536, 1152), (64, 96), "tiny"),
    "small": Case(400, (256, 256), (64, 96), "tiny"),
    "one": Case(400, (256, 256), (64,), "tiny"),
    "sd": Case(6, (768, 576), (256, 512), "sd"),
    "text": Case(5000, (0, 0), (), "t5"),
}
WORDS = ["red", "blue", "small", "large", "cat", "dog", "house", "tree", "river", "street", "dark"]


# -- sources ----------------------------------------------------------------------------------


def photographs(folder: Path, count: int, size: tuple[int, int], seed: int = 0) -> None:
    """Write JPEGs of quality 90 that cost what photographs cost to decode: noise of 1/f, edges."""
    dice = np.random.default_rng(seed)
    width, height = size
    across, down = np.fft.rfftfreq(width), np.fft.fftfreq(height)
    falling = 1.0 / np.maximum(np.hypot(across[None], down[:, None]), 1.0 / width) ** 1.4
    fields = []
    for _ in range(6):
        noise = np.fft.rfft2(dice.standard_normal((height, width)))
        field = np.fft.irfft2(noise * falling, s=(height, width))
        fields.append((field / field.std()).astype(np.float32))
    for number in range(count):
        parts = dice.choice(len(fields), 3, replace=False)
        light, *colours = (
            np.roll(fields[part], (dice.integers(height), dice.integers(width)), (0, 1))
            for part in parts
        )
        y, x, side = (int(dice.integers(limit // 2)) for limit in (height, width, height))
        light[y : y + side + 8, x : x + side + 8] *= -0.8
        pixels = np.stack([light, light + 0.3 * colours[0], light + 0.3 * colours[1]], axis=2)
        image = Image.fromarray(np.clip(118 + 44 * pixels, 0, 255).astype(np.uint8))
        image.save(folder / f"{seed + number:06d}.jpg", quality=90)


def captions(count: int) -> list[str]:
    """Return captions of 4 to 40 words; each third one equals another."""
    dice = np.random.default_rng(0)
    found: list[str] = []
    for number in range(count):
        if number % 3 == 2:
            found.append(found[int(dice.integers(number))])
        else:
            words = dice.choice(WORDS, int(dice.integers(4, 40)))
            found.append(f"picture {number}, " + " ".join(words))
    return found


# -- the project ------------------------------------------------------------------------------


def write_networks(folder: Path, kind: str, texts: list[str]) -> None:
    """Write a VAE and a text encoder with random weights."""
    sys.path.insert(0, str(ROOT / "scripts"))
    import torch
    from demo.text import clip_encoder, clip_tokenizer, t5_tokenizer
    from demo.tiny_sd import make_autoencoder
    from diffusers import AutoencoderKL
    from transformers import T5Config, T5EncoderModel

    torch.manual_seed(0)
    vae = make_autoencoder()
    if kind == "sd":
        vae = AutoencoderKL(
            block_out_channels=(128, 256, 512, 512),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            layers_per_block=2,
            norm_num_groups=32,
        )
    vae.save_pretrained(folder / "vae")
    if kind == "t5":
        tokenizer = t5_tokenizer(texts)
        shape = {"d_model": 512, "d_kv": 64, "d_ff": 1024, "num_layers": 6, "num_heads": 8}
        config = T5Config(vocab_size=len(tokenizer), feed_forward_proj="gated-gelu", **shape)
        encoder = T5EncoderModel(config)
    else:
        tokenizer = clip_tokenizer(texts)
        encoder = clip_encoder(tokenizer)
    tokenizer.save_pretrained(folder / "tokenizer")
    encoder.save_pretrained(folder / "text_encoder")


def make_project(folder: Path, case: Case, items: int) -> None:
    """Write sources, networks, configuration, and `case.json` with what the loops must know."""
    for name in ("Snakefile", "rules", "scripts", "profiles", "envs"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "data").mkdir()
    (folder / "config").mkdir()
    texts = captions(items)
    write_networks(folder / "models", case.network, texts)
    if case.sides:
        photographs(folder / "data", items, case.size)
    for number, text in enumerate(texts):
        if not case.sides:  # a caption needs a picture beside it
            Image.new("RGB", (64, 64), (number % 256, number // 256, 9)).save(
                folder / f"data/{number:06d}.jpg"
            )
        (folder / f"data/{number:06d}.txt").write_text(text)
    text = {"path": "models/text_encoder", "tokenizer": "models/tokenizer"}
    run = {"datasets": ["bench"], "model": "bench", "resolutions": [*case.sides] or [64]}
    found = {
        "kind": "latents" if case.sides else "text",
        "sides": [*case.sides] or [64],
        "captions": texts,
        "models": str(folder / "models"),
        "text": "T5EncoderModel" if case.network == "t5" else "CLIPTextModel",
        "config": {
            "datasets": {"bench": {"path": "data"}},
            "models": {"bench": {"vae": "models/vae", "text": [text]}},
            "runs": {"bench": run},
        },
    }
    (folder / "config/config.yaml").write_text(json.dumps(found["config"]))
    (folder / "case.json").write_text(json.dumps(found))


# -- loops in loaded processes ----------------------------------------------------------------


class Loop:
    """A process that has loaded, and runs its loop when it is asked."""

    def __init__(self, folder: Path, name: str, threads: int | None, out: Path) -> None:
        command = [sys.executable, str(LOOPS), name, str(folder), "--out", str(out)]
        command += ["--threads", str(threads)] if threads else []
        pipe = subprocess.PIPE
        # As in the jobs of a build; the other loops have what a user has.
        more = {"OMP_WAIT_POLICY": "PASSIVE"} if name == "ours" else {}
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, cwd=folder, env={**os.environ, **more}
        )
        self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return line or sys.exit(f"{self._process.args} ended")

    def run(self) -> list[float]:
        """Return the milliseconds of time and of processor time that a target took."""
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        seconds, used, targets = json.loads(self._answer())
        return [1000 * seconds / targets, 1000 * used / targets]

    def end(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measure_loops(folder: Path, rounds: int) -> dict[str, list[list[float]]]:
    """Return time and processor time a target of each loop, of each round."""
    started: dict[str, Loop] = {}
    with contextlib.ExitStack() as stack:
        for name, loop, threads in (
            ("bare", "bare", None),
            ("bare, 1 thread", "bare", 1),
            ("plain", "plain", None),
            ("ours", "ours", CORES),
        ):
            started[name] = Loop(folder, loop, threads, folder / "plain")
            stack.callback(started[name].end)
        found: dict[str, list[list[float]]] = {name: [] for name in started}
        for _ in range(rounds):
            for name, each in started.items():
                found[name].append(each.run())
    return found


def ratio(found: dict[str, list[list[float]]], above: str, below: str, clock: int) -> float:
    """Return the median of the ratios within a round."""
    pairs = zip(found[above], found[below], strict=True)
    return statistics.median(a[clock] / b[clock] for a, b in pairs)


def loops_rows(name: str, found: dict[str, list[list[float]]]) -> list[list[Any]]:
    """Return the rows of a case: time, and processor time."""
    rows = []
    for clock, word in enumerate(("time", "processor time")):
        row: list[Any] = [name, word]
        row += [statistics.median(each[clock] for each in found[loop]) for loop in found]
        pairs = (("ours", "bare"), ("ours", "bare, 1 thread"), ("plain", "ours"))
        rows.append([*row, *(ratio(found, *pair, clock) for pair in pairs)])
    return rows


LOOPS_HEAD = ["case", "ms a target of", "bare", "bare, 1 thread", "plain", "ours"]
LOOPS_HEAD += ["ours / bare", "ours / bare, 1 thread", "plain / ours"]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", default=[*CASES], metavar="CASE")
    parser.add_argument("--share", type=float, default=1.0, help="of the items")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--folder", type=Path, default=None, help="where to work")
    options = parser.parse_args()
    rows, everything = [], {}
    for name in options.cases:
        case = CASES[name]
        folder = Path(tempfile.mkdtemp(prefix="latentmake-bench-", dir=options.folder))
        try:
            make_project(folder, case, max(4, round(case.items * options.share)))
            everything[name] = measure_loops(folder, options.rounds)
            rows += loops_rows(name, everything[name])
            print(tabulate(rows[-2:], tablefmt="plain", floatfmt=".2f"), flush=True)
        finally:
            shutil.rmtree(folder)
    print("\n" + tabulate(rows, headers=LOOPS_HEAD, floatfmt=".2f"))
    if options.json:
        options.json.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
