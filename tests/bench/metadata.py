"""What reading a metadata file of many captions costs.

    python tests/bench/metadata.py [--entries 1000000] [--length 900] [--kind json]

A generated file in sd-scripts' form, read by a process of its own. Printed: seconds, the file's
size, and the most memory that the process held.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))


def make(path: Path, entries: int, length: int) -> None:
    """Write a metadata file of captions of about so many characters."""
    source = random.Random(0)
    words = ["".join(source.choices("abcdefghij", k=6)) for _ in range(2000)]
    with path.open("w", encoding="utf-8") as file:
        for number in range(entries):
            values = {"caption": " ".join(source.choices(words, k=length // 7)), "tags": "a, b"}
            name = f"{number % 1000:03d}/{number:08d}.png"
            if path.suffix == ".jsonl":
                file.write(json.dumps({"image_path": name, **values}) + "\n")
            else:
                file.write(("{" if number == 0 else ",\n") + f"{json.dumps(name)}: ")
                json.dump(values, file)
        file.write("}" if path.suffix == ".json" else "")


def read(path: Path) -> None:
    """Read it as planning does, and print seconds, entries and memory."""
    from latentmake.data.lists import metadata_of

    began = time.monotonic()
    count = len(metadata_of("bench", str(path), "images"))
    seconds = time.monotonic() - began
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    sys.stdout.write(json.dumps([seconds, count, memory]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--length", type=int, default=900)
    parser.add_argument("--kind", choices=["json", "jsonl"], default="json")
    parser.add_argument("--read", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read:
        read(Path(arguments.read))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"meta.{arguments.kind}"
        make(path, arguments.entries, arguments.length)
        command = [sys.executable, __file__, "--read", str(path)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        seconds, count, memory = json.loads(done.stdout)
        row = [count, path.stat().st_size / 1e6, seconds, memory]
    headers = ["entries", "file [MB]", "seconds", "memory [MB]"]
    sys.stdout.write(tabulate([row], headers=headers, floatfmt=".2f") + "\n")


if __name__ == "__main__":
    main()
