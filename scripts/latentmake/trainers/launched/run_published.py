"""Program that makes the missing caches of a published folder and trains on it.

`publish_{run}` copies this file as `train_{run}.py` and writes `train_{run}.json` beside it, with
the calls for each system. `train_{run}.sh` and `.bat` run it with the Python (3.10 or newer) of the
trainer's environment. It needs no package there. Each program gets its arguments as a list, so no
shell reads them.
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
"""This file; the file of calls has the same name, but ends in `.json`."""


def main() -> None:
    """Run all steps, or with `--only-caches` all but the training; stop at the first failure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only-caches", action="store_true", help="stop before the training")
    given = parser.parse_args()
    published = json.loads(_OWN.with_suffix(".json").read_text(encoding="utf-8"))
    here = published["windows" if os.name == "nt" else "linux"]
    folder, program = Path(here["folder"]), published["program"]
    training, arguments = here["calls"][-1]
    scripts = [*folder.glob(training), *folder.glob(f"src/*/{training}")]
    if not scripts:
        sys.exit(f"{_OWN.stem}: the folder of {program}, {folder}, has no {training}")
    if sys.prefix == sys.base_prefix:
        _say(f"warning: no virtual environment of {program}: it is {sys.executable}")
    # torch calls the program that compiles kernels by its bare name.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    # Ctrl+C reaches the running step, too, which ends and reports it; this program then ends.
    signal.signal(signal.SIGINT, lambda *_: None)
    _choose_attention(arguments, published["attention"], folder)
    calls = here["calls"][:-1] if given.only_caches else here["calls"]
    for script, arguments in calls:
        launcher = here["launcher"] if script == training else []
        call = [sys.executable, *launcher, str(scripts[0].with_name(script)), *arguments]
        if subprocess.run(call, cwd=folder, check=False).returncode:
            sys.exit(f"{_OWN.stem}: {script} failed")


def _choose_attention(arguments: list[str], modules: dict[str, str], folder: Path) -> None:
    """Replace `--sdpa` by the first attention whose module this Python can import, if any.

    Args:
        arguments: arguments of the training script, changed in place.
        modules: attention -> the module that it needs.
        folder: folder of the program.
    """
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
