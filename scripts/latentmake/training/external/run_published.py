"""Program that makes the caches that were not published with a folder, and trains on it.

`publish_{run}` copies this file as `train_{run}.py`, beside a `train_{run}.json` with the calls for
each system. `train_{run}.sh` and `.bat` run it by the Python of the trainer's environment, 3.10 or
newer, in which it needs no package. Each program gets its arguments as a list: no shell reads them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

_OWN = Path(__file__)
"""This file, whose name is that of the file of calls."""


def main() -> None:
    """Run all steps, or with `--only-caches` all but the training; the first that fails ends it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only-caches", action="store_true", help="stop before the training")
    given = parser.parse_args()
    published = json.loads(_OWN.with_suffix(".json").read_text(encoding="utf-8"))
    here = published["windows" if os.name == "nt" else "linux"]
    folder, program = Path(here["folder"]), published["program"]
    training, arguments = here["calls"][-1]
    found = [*folder.glob(training), *folder.glob(f"src/*/{training}")]
    if not found:
        sys.exit(f"{_OWN.stem}: the folder of {program}, {folder}, has no {training}")
    if sys.prefix == sys.base_prefix:
        _say(f"warning: no virtual environment of {program}: it is {sys.executable}")
    # What torch compiles kernels with is called by its bare name.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    signal.signal(signal.SIGINT, lambda *_: None)  # the step ends by it, and says so
    _choose_attention(arguments, published["attention"], folder)
    calls = here["calls"][:-1] if given.only_caches else here["calls"]
    for script, arguments in calls:
        launcher = here["launcher"] if script == training else []
        call = [sys.executable, *launcher, str(found[0].with_name(script)), *arguments]
        if subprocess.run(call, cwd=folder, check=False).returncode:
            sys.exit(f"{_OWN.stem}: {script} failed")


def _choose_attention(arguments: list[str], modules: dict[str, str], folder: Path) -> None:
    """Replace `--sdpa` by the first attention whose module this Python can import, if any."""
    for name, module in modules.items():
        call = [sys.executable, "-c", f"import {module}"]
        if not subprocess.run(call, cwd=folder, check=False, capture_output=True).returncode:
            arguments[arguments.index("--sdpa")] = f"--{name}"
            _say(f"attention: {name}")
            return


def _say(line: str) -> None:
    sys.stderr.write(f"{_OWN.stem}: {line}\n")


if __name__ == "__main__":
    main()
