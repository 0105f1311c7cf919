"""What many short videos and one long film cost, as ratios to what must be paid anyway.

    python tests/bench/videos.py [--videos 1000] [--frames 49] [--size 320x192] [--threads 2]
        [--items 1024] [--film 6000] [--encode-seconds 0] [--folder FOLDER]

Generated videos (H.264) with one clip each, of all their frames; latents are made by the project's
own code with an encoder that takes no time, or `--encode-seconds` a clip. Printed:

- planning: milliseconds of processor time a video for a quarter, a half and all of them, when no
  video is known yet (each is probed) and again when all are;
- disk: the most that lay on it besides sources and caches, over the latents of one batch of
  `--items` videos;
- memory: the growth of the process while clips were made, over two clips a thread; the most that a
  reading process held, in MB;
- speed: clips a second over those of a bare loop that decodes the same files one after the other;
- film: the same for a film of `--film` frames cut into clips one after the other, and for eight
  clips spread over it: time over that of decoding it from its beginning to its end.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

os.environ["TQDM_DISABLE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import av
import numpy as np
import psutil
from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts")]

from latentmake.config.root import parse  # noqa: E402
from latentmake.data.memo import MEMO, Memo  # noqa: E402
from latentmake.encode.reading import Loaded, Sample  # noqa: E402
from latentmake.encode.runner import carry_out  # noqa: E402
from latentmake.plan.facts import Facts  # noqa: E402
from latentmake.plan.orders import Order  # noqa: E402
from latentmake.plan.planner import make_plan  # noqa: E402

# -- sources --------------------------------------------------------------------------------------


def write_video(path: Path, frames: int, size: tuple[int, int], seed: int) -> None:
    """Write moving noise, other for each seed."""
    width, height = size
    dice = np.random.default_rng(seed)
    picture = dice.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    picture = picture.repeat(8, axis=0).repeat(8, axis=1)
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate=16, options={"preset": "ultrafast", "g": "48"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(frames):
            moved = np.ascontiguousarray(np.roll(picture, 2 * number, axis=1))
            file.mux(stream.encode(av.VideoFrame.from_ndarray(moved, format="rgb24")))
        file.mux(stream.encode())
    path.with_suffix(".txt").write_text(f"video {seed}")


def make_model(folder: Path) -> None:
    """Write a tiny model, whose weights nobody reads but to digest them."""
    from demo.text import t5_tokenizer
    from diffusers import AutoencoderKLWan
    from transformers import UMT5Config, UMT5EncoderModel

    AutoencoderKLWan(base_dim=8).save_pretrained(folder / "vae")
    small = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    tokenizer = t5_tokenizer(["a video"])
    config = UMT5Config(vocab_size=len(tokenizer), **small)
    UMT5EncoderModel(config).save_pretrained(folder / "text_encoder")
    tokenizer.save_pretrained(folder / "text_encoder")


def settings(data: str, frames: int, size: tuple[int, int], items: int, **more: Any) -> Any:
    """Return a configuration with clips of all frames, of exactly one size."""
    dataset = {"path": data, "target_frames": [frames], "fit": "crop", **more}
    return {
        "datasets": {"videos": dataset},
        "models": {
            "nothing": {"task": "t2v-1.3B", "vae": "models/vae", "text": "models/text_encoder"}
        },
        "runs": {"videos": {"datasets": ["videos"], "model": "nothing", "resolutions": [[*size]]}},
        "batch": {"items": items},
    }


def processor_time() -> float:
    """Return the seconds of processor time that this process and its ended children have had."""
    return sum(os.times()[:4])


# -- planning -------------------------------------------------------------------------------------


def planned(config: Any) -> tuple[float, list[Order]]:
    """Plan in this process; return its seconds of processor time, and the orders for latents."""
    began = processor_time()
    with Memo(MEMO) as memo:
        plan = make_plan(Facts(parse(config), memo), ["videos"])
    seconds = processor_time() - began
    return seconds, [order for order in plan.orders if order.kind == "latents"]


def measure_planning(videos: int, options: argparse.Namespace) -> list[list[Any]]:
    """Plan for growing parts of the dataset."""
    rows: list[list[Any]] = []
    for count in sorted({max(1, videos // 4), max(1, videos // 2), videos}):
        part = Path(f"part{count}")
        part.mkdir()
        for path in sorted(Path("data").iterdir()):
            if int(path.stem) < count:  # videos and captions
                os.link(path, part / path.name)
        config = settings(str(part), options.frames, options.size, options.items)
        cold, warm = planned(config)[0], planned(config)[0]
        each = [1000 * cold / count, 1000 * warm / count]
        first = rows[0][1:3] if rows else each
        rows.append([count, *each, each[0] / first[0], each[1] / first[1]])
        shutil.rmtree(part)
    return rows


# -- a job ----------------------------------------------------------------------------------------


def carry(path: Path, seconds: float, threads: int) -> None:
    """Carry out an order in this process, and print what it took."""
    import torch

    order = Order.read(path)
    values = torch.rand(1 << 20).to(torch.bfloat16)

    def encode(samples: list[Sample]) -> Any:
        time.sleep(seconds * len(samples))
        found = []
        for sample in samples:
            frames, height, width, _ = sample.shape
            shape = (16, (frames - 1) // 4 + 1, height // 8, width // 8)
            number = int(np.prod(shape))
            repeated = values.repeat(-(-number // len(values)))[:number]
            name = f"latents_{shape[1]}x{shape[2]}x{shape[3]}_bfloat16"
            found.append(({name: repeated.view(shape).clone()}, {}))
        return found

    def carried(work: Order) -> float:
        began = time.monotonic()
        carry_out([work], say=lambda _: None, threads=threads, load=lambda _: loaded)
        return time.monotonic() - began

    loaded = Loaded(encode, 1)
    first = order.items[0]
    first = first._replace(targets=first.targets[:1])
    carried(dataclasses.replace(order, items=(first,)))  # imports
    process, stopped = psutil.Process(), threading.Event()
    beginning = process.memory_info().rss
    own, readers = [beginning], [0]

    def watch() -> None:
        while not stopped.wait(0.02):
            own.append(process.memory_info().rss)
            if len(own) % 50 == 0:
                for child in process.children():
                    with contextlib.suppress(psutil.Error):
                        readers.append(child.memory_info().rss)

    watching = threading.Thread(target=watch)
    watching.start()
    used = processor_time()
    took = carried(order)
    used = processor_time() - used
    stopped.set()
    watching.join()
    print(json.dumps([took, used, max(own) - beginning, max(readers)]))


def occupied(folder: Path, but: set[Path]) -> int:
    """Return the bytes of all files below a folder, each counted once, but for some folders."""
    seen: dict[int, int] = {}
    left: set[int] = set()
    for root, folders, names in os.walk(folder):
        is_left = any(Path(root).is_relative_to(each) for each in but)
        for name in [*names, *folders]:
            try:
                stat = (Path(root) / name).stat(follow_symlinks=False)
            except OSError:
                continue
            if is_left:
                left.add(stat.st_ino)
            seen[stat.st_ino] = stat.st_blocks * 512
    return sum(size for inode, size in seen.items() if inode not in left)


def run_job(order: Order, options: argparse.Namespace) -> tuple[list[float], int]:
    """Carry out an order in a process of its own; return what it printed, and the most disk."""
    order.write()
    command = [sys.executable, __file__, "--job", str(order.path)]
    command += ["--threads", str(options.threads), "--encode-seconds", str(options.encode_seconds)]
    here = Path.cwd()
    but, most = {here / "data", here / "cache", here / "models", here / "film"}, 0
    before = occupied(here, but)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while process.poll() is None:
            most = max(most, occupied(here, but) - before)
            time.sleep(0.3)
        text = process.stdout.read()
    if process.returncode:
        sys.exit(f"a job failed: {text}")
    return json.loads(text), most


def forget() -> None:
    """Delete caches and all else that a job left."""
    for folder in ("cache", ".latentmake/store"):
        shutil.rmtree(folder, ignore_errors=True)


def decoded(paths: list[Path], frames: int) -> tuple[float, float]:
    """Decode files one after the other and put their frames into arrays.

    Returns:
        Seconds, and seconds of processor time.
    """
    began, used = time.monotonic(), processor_time()
    for path in paths:
        with av.open(str(path)) as file:
            file.streams.video[0].codec_context.thread_count = 1
            rows: list[Any] = []
            for frame in file.decode(video=0):
                rows.append(frame.to_ndarray(format="rgb24"))
                if len(rows) == frames:
                    np.stack(rows)
                    rows.clear()
    return time.monotonic() - began, processor_time() - used


def measure_job(videos: int, options: argparse.Namespace) -> list[list[Any]]:
    """Make the latents of all videos, batch by batch."""
    config = settings("data", options.frames, options.size, options.items)
    _, orders = planned(config)
    clip = options.frames * options.size[0] * options.size[1] * 3
    bound = 2 * clip * options.threads
    took = used = grown = reader = most = 0.0
    for order in orders:
        (seconds, processor, growth, child), disk = run_job(order, options)
        took, used = took + seconds, used + processor
        grown, reader, most = max(grown, growth), max(reader, child), max(most, disk)
    latents = sum(path.stat().st_size for path in Path("cache").rglob("*.safetensors"))
    batch = latents / videos * min(options.items, videos)
    forget()
    plain, bare = decoded(sorted(Path("data").glob("*.mp4")), options.frames)
    return [
        ["peak disk besides sources and caches / latents of one batch", most / batch],
        ["growth of the process / two clips a thread", grown / bound],
        ["most memory of a reading process [MB]", reader / 1e6],
        ["clips a second", videos / took],
        ["clips a second / bare sequential decode", plain / took],
        ["processor time / bare sequential decode", used / bare],
    ]


def measure_film(options: argparse.Namespace) -> list[list[Any]]:
    """Cut one film into clips, all of it and eight places of it."""
    Path("film").mkdir()
    path = Path("film/film.mp4")
    write_video(path, options.film, options.size, 0)
    plain, bare = decoded([path], options.frames)
    clip = options.frames * options.size[0] * options.size[1] * 3
    rows: list[list[Any]] = []
    for name, more in (
        ("chunk", {"frame_extraction": "chunk"}),
        ("eight clips", {"frame_extraction": "uniform", "frame_sample": 8}),
    ):
        config = settings("film", options.frames, options.size, options.items, **more)
        _, orders = planned(config)
        clips = sum(len(item.targets) for order in orders for item in order.items) - 1
        (order,) = orders
        took, used, grown, _ = run_job(order, options)[0]
        forget()
        rows += [
            [f"film, {name}: clips", clips],
            [f"film, {name}: time / decoding all of it", took / plain],
            [f"film, {name}: processor time / decoding all of it", used / bare],
            [f"film, {name}: growth of the process / two clips", grown / (2 * clip)],
        ]
    return rows


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--videos", type=int, default=1000)
    parser.add_argument("--frames", type=int, default=49, help="of a video; 4 n + 1")
    parser.add_argument("--size", default="320x192", help="width x height, multiples of 16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--items", type=int, default=1024, help="videos in a batch")
    parser.add_argument("--film", type=int, default=6000, help="frames of the film; 0: no film")
    parser.add_argument("--encode-seconds", type=float, default=0.0)
    parser.add_argument("--folder", type=Path, default=None, help="where to work")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        carry(options.job, options.encode_seconds, options.threads)
        return
    options.size = tuple(map(int, options.size.split("x")))
    folder = Path(tempfile.mkdtemp(prefix="latentmake-bench-", dir=options.folder))
    before = Path.cwd()
    os.chdir(folder)
    try:
        make_model(Path("models"))
        Path("data").mkdir()
        for number in range(options.videos):
            write_video(Path(f"data/{number:06d}.mp4"), options.frames, options.size, number)
        head = ["videos", "cold [ms]", "again [ms]", "cold / first", "again / first"]
        rows = measure_planning(options.videos, options)
        print(tabulate(rows, headers=head, floatfmt=".2f"), flush=True)
        print(tabulate(measure_job(options.videos, options), floatfmt=".2f"), flush=True)
        if options.film:
            print(tabulate(measure_film(options), floatfmt=".2f"))
    finally:
        os.chdir(before)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
