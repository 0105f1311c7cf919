"""How fast verify_{run} reads cache files, beside `cat`.

    python tests/bench/verify.py [--gigabytes 1] [--rounds 5]

Files of several kinds are written: latents of SDXL at 1024 x 1024, embeddings of CLIP-L, clips of
Wan at 480 x 832. Both read them in turns, from the system's cache. Printed: the speed of `cat` by
processor time and the ratios of both times, medians of the rounds.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

KINDS = {
    "latents of SDXL": ("float32", (4, 128, 128)),
    "embeddings of CLIP-L": ("float32", (77, 768)),
    "clips of Wan": ("bfloat16", (16, 21, 60, 104)),
    "the same in float16": ("float16", (16, 21, 60, 104)),
    "half as long in float32": ("float32", (16, 11, 60, 104)),
}


def make(folder: Path, dtype: str, shape: tuple[int, ...], gigabytes: float) -> list[tuple]:  # type: ignore[type-arg]
    """Write files; return path, size and key of each."""
    import torch
    from latentmake import digest
    from latentmake.files import atomic, cachefile

    recipe = {"kind": "latents", "dtype": dtype, "vae": digest.of_bytes(b"weights")}
    dice = torch.Generator().manual_seed(0)
    tensor = torch.randn(shape, generator=dice).to(getattr(torch, dtype))
    size = tensor.numel() * tensor.element_size()
    files = []
    for number in range(max(1, round(gigabytes * 1e9 / size))):
        key = digest.of_bytes(str(number).encode())
        stamp = cachefile.stamp(key=key, source=key, recipe=recipe)
        path = folder / f"{number}.latents.safetensors"
        stat = atomic.write(path, *cachefile.pieces({"latents": tensor}, stamp))
        files.append((str(path), stat.st_size, key))
    return files


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Return the processor and wall time of some work with all its processes."""

    def used() -> float:
        several = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(each.ru_utime + each.ru_stime for each in several)

    before, began = used(), time.monotonic()
    work()
    return used() - before, time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--gigabytes", type=float, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    from latentmake.reports.verify_files import Reading, read_all

    rows = []
    for name, (dtype, shape) in KINDS.items():
        with tempfile.TemporaryDirectory() as place:
            files = [
                Reading(path, size, key)
                for path, size, key in make(Path(place), dtype, shape, arguments.gigabytes)
            ]
            names = "\0".join(each.path for each in files).encode()

            def cat(names: bytes = names) -> None:
                command = ["xargs", "-0", "cat"]
                subprocess.run(command, input=names, stdout=subprocess.DEVNULL, check=True)

            def ours(files: list[Reading] = files) -> None:
                if any(content.fault for _, content in read_all(files, 2)):
                    raise SystemExit("a file is damaged")

            ours()
            rounds = [(seconds(cat), seconds(ours)) for _ in range(arguments.rounds)]
            size = sum(each.size for each in files)
            rows.append(
                [
                    name,
                    f"{len(files)} x {files[0].size / 1e6:.2f} MB",
                    f"{size / 1e9 / statistics.median(theirs[0] for theirs, _ in rounds):.1f} GB/s",
                    *(
                        f"{statistics.median(x[which] / y[which] for x, y in rounds):.2f}"
                        for which in (0, 1)
                    ),
                ]
            )
    headers = ["files", "size", "cat", "processor time: cat / verify", "wall time: cat / verify"]
    print(tabulate(rows, headers, disable_numparse=True))


if __name__ == "__main__":
    main()
