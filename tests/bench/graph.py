"""Cost of the whole graph and of batches, by the number of cache files.

    python tests/bench/graph.py [--files 0 100 300 1000 3000] [--folder FOLDER]

For each number: processor time of a cold build (its encoder does nothing), of the command again,
and of a dry run after one caption was edited, each as seconds more than a Snakemake run that does
nothing, measured beside it; and the most memory of the second. The bound of `graph: auto` is where
nothing to do costs a second more.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from plan import bare, cost, make_idle_project
from tabulate import tabulate


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, nargs="+", default=[100, 300, 1000, 3000])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    arguments = parser.parse_args()
    rows = []
    for files in arguments.files:
        for graph in ("batches", "whole"):
            with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
                (empty := Path(name, "bare")).mkdir()
                folder = Path(name, "project")
                folder.mkdir()
                make_idle_project(folder, files // 2, [64], graph=graph)
                none = bare(empty)
                cold = cost(folder, "caches_generated", times=1, expect="100%")
                cost(folder, "caches_generated", times=1, expect="Nothing to be done")
                nothing = cost(folder, "caches_generated", expect="Nothing to be done")
                (folder / "data/generated/000000.txt").write_text("another caption")
                edited = cost(folder, "-n", "caches_generated", expect="1 target to make")
                seconds = (f"{each.seconds - none:.2f}" for each in (cold, nothing, edited))
                rows.append((files, graph, *seconds, f"{nothing.memory:.0f}", f"{none:.2f}"))
                print(*rows[-1], flush=True)
                shutil.rmtree(folder)
    heads = ("files", "graph", "cold", "nothing", "edited", "MB", "a bare Snakemake")
    print(tabulate(rows, headers=heads, disable_numparse=True))


if __name__ == "__main__":
    main()
