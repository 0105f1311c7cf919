"""Loops over the same pictures or captions, each in a process of its own; see encode.py.

    python tests/bench/encode_loops.py LOOP FOLDER [--threads N] [--out FOLDER]

`bare`: the encoder alone, one sample after the other, from memory to memory. `plain`: reads,
encodes and saves one file after the other. `ours`: carries out the orders of a plan, with a loaded
encoder. The process loads, and then runs once for each line that it reads, and answers with
seconds, processor time and targets.
"""

from __future__ import annotations

import argparse
import atexit
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
Loop = Callable[[], int]


def of_size(image: Any, side: int) -> Any:
    """Scale a picture by Lanczos to cover a square, and cut that around the centre."""
    from PIL import Image

    ratio = side / min(image.size)
    width, height = (max(side, round(length * ratio)) for length in image.size)
    image = image.resize((width, height), Image.Resampling.LANCZOS)
    left, top = (width - side) // 2, (height - side) // 2
    return image.crop((left, top, left + side, top + side))


def to_tensor(image: Any) -> Any:
    """Return a picture as [1, 3, height, width] in -1 to 1."""
    import numpy as np
    import torch

    values = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
    return (values.float() / 127.5 - 1.0).contiguous()


def load_vae(case: dict[str, Any]) -> Callable[[Any], Any]:
    """Return what encodes one picture."""
    import torch
    from diffusers import AutoencoderKL

    vae = AutoencoderKL.from_pretrained(case["models"] + "/vae").eval().requires_grad_(False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    vae = vae.to(device)

    @torch.inference_mode()
    def encode(pixels: Any) -> Any:
        return vae.encode(pixels.to(device)).latent_dist.mean.cpu()

    return encode


def load_text(case: dict[str, Any]) -> tuple[Callable[[str], Any], Callable[[Any], Any]]:
    """Return what tokenizes one caption, and what encodes its tokens."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(case["models"] + "/tokenizer")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = getattr(transformers, case["text"])
    model = network.from_pretrained(case["models"] + "/text_encoder").eval().to(device)
    padding = "max_length" if network is transformers.CLIPTextModel else "do_not_pad"
    tokens = partial(tokenizer, return_tensors="pt", truncation=True, padding=padding)

    @torch.inference_mode()
    def encode(found: Any) -> Any:
        return model(**found.to(device)).last_hidden_state.cpu()

    return tokens, encode


def bare(case: dict[str, Any], folder: Path, _: Path) -> tuple[Loop, Loop]:
    """Return the encoder alone, and what warms it up; nothing else is in the loop."""
    from PIL import Image

    samples: list[Any] = []
    if case["kind"] == "text":
        tokens, encode = load_text(case)
        samples = [tokens(caption) for caption in case["captions"]]
    else:
        encode = load_vae(case)
        for path in sorted((folder / "data").glob("*.jpg")):
            with Image.open(path) as image:
                image = image.convert("RGB")
            samples += [to_tensor(of_size(image, side)) for side in case["sides"]]

    def loop(limit: int | None = None) -> int:
        for sample in samples[:limit]:
            encode(sample)
        return len(samples)

    return loop, lambda: loop(2)


def plain(case: dict[str, Any], folder: Path, out: Path) -> tuple[Loop, Loop]:
    """Return the loop that a user writes, and what warms it up."""
    from PIL import Image
    from safetensors.torch import save_file

    def save_text(limit: int | None) -> int:
        for number, caption in enumerate(case["captions"][:limit]):
            embedding = encode(tokens(caption))[0].clone()
            save_file({"text": embedding}, out / f"{number}.safetensors")
        return len(case["captions"])

    def save_latents(limit: int | None) -> int:
        paths = sorted((folder / "data").glob("*.jpg"))
        for path in paths[:limit]:
            for side in case["sides"]:
                with Image.open(path) as image:
                    pixels = to_tensor(of_size(image.convert("RGB"), side))
                save_file({"latents": encode(pixels)[0]}, out / f"{path.stem}_{side}.safetensors")
        return len(paths) * len(case["sides"])

    if case["kind"] == "text":
        tokens, encode = load_text(case)
        save = save_text
    else:
        encode = load_vae(case)
        save = save_latents

    def loop(limit: int | None = None) -> int:
        out.mkdir(exist_ok=True)
        return save(limit)

    return loop, lambda: loop(1)


def ours(case: dict[str, Any], folder: Path, threads: int) -> tuple[Loop, Loop]:
    """Return what carries out all orders, and what warms the encoder up."""
    sys.path.insert(0, str(ROOT / "scripts"))
    os.chdir(folder)
    from latentmake.config.root import parse
    from latentmake.data.memo import MEMO, Memo
    from latentmake.encode.runner import carry_out, load_encoder
    from latentmake.plan.facts import Facts
    from latentmake.plan.planner import make_plan

    def say(line: str) -> None:
        if os.environ.get("BENCH_SAYS"):
            print(line, file=sys.stderr)

    with Memo(MEMO) as memo:
        orders = make_plan(Facts(parse(case["config"]), memo), ["bench"]).orders
    orders = [order for order in orders if order.kind == case["kind"]]
    encoder = load_encoder(orders[0], threads, say)

    def loop(limit: int | None = None) -> int:
        carry_out(  # as a job does: what one order made is linked by the next
            (replace(order, items=order.items[:limit]) for order in orders),
            say=say,
            threads=threads,
            load=lambda _: encoder,
        )
        return sum(len(order.paths) for order in orders)

    return loop, lambda: loop(1)


def serve(loop: Loop, warm_up: Loop, places: list[Path]) -> None:
    """Run once for each line of the standard input, without the files of the last time.

    These are put aside: where ext4 has just deleted files, new ones take several times as long.
    """
    aside = places[0].parent / "aside"
    numbers = itertools.count()
    atexit.register(shutil.rmtree, aside, ignore_errors=True)

    def clear() -> None:
        for place in filter(Path.exists, places):
            aside.mkdir(exist_ok=True)
            place.rename(aside / f"{os.getpid()}-{next(numbers)}")

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    clear()
    warm_up()
    clear()
    print("ready", file=answers, flush=True)
    for _ in sys.stdin:
        began, used = time.perf_counter(), time.process_time()
        targets = loop()
        found = [time.perf_counter() - began, time.process_time() - used, targets]
        clear()
        print(json.dumps(found), file=answers, flush=True)


def main() -> None:
    """Serve a loop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("loop", choices=["bare", "plain", "ours"])
    parser.add_argument("folder", type=Path, help="that encode.py made")
    parser.add_argument("--threads", type=int, help="of torch and of ours; torch's own by default")
    parser.add_argument("--out", type=Path, default=Path("plain"), help="where `plain` saves")
    options = parser.parse_args()
    os.environ["TQDM_DISABLE"] = "1"
    import torch

    folder, out = options.folder.resolve(), options.out.resolve()
    case = json.loads((folder / "case.json").read_text())
    if options.threads and options.loop != "ours":
        torch.set_num_threads(options.threads)
    if options.loop == "ours":
        threads = options.threads or len(os.sched_getaffinity(0))
        loop, warm_up = ours(case, folder, threads)
        out = folder
    else:
        loop, warm_up = (bare if options.loop == "bare" else plain)(case, folder, out)
    written = ["cache", ".latentmake/store"]
    serve(loop, warm_up, [out / name for name in written] if out == folder else [out])


if __name__ == "__main__":
    main()
