"""Program that makes the missing caches of a published folder, and trains on it.

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
from typing import Any, NoReturn

_OWN = Path(__file__)


def main() -> None:
    """Run all steps, or with `--only-caches` all but the training; the first that fails ends it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only-caches", action="store_true", help="stop before the training")
    given = parser.parse_args()
    published = json.loads(_OWN.with_suffix(".json").read_text(encoding="utf-8"))
    here = published["windows" if os.name == "nt" else "linux"]
    folder, steps = Path(here["folder"]), here["steps"]
    scripts = _find_scripts(folder, published, steps[-1]["script"])
    if sys.prefix == sys.base_prefix:
        _say(f"warning: no virtual environment of {published['program']}: it is {sys.executable}")
    # What torch compiles kernels with is called by its bare name.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    signal.signal(signal.SIGINT, lambda *_: None)  # the step ends by it, and says so
    _choose_attention(steps[-1]["arguments"], published["attention"], folder)
    for step in steps[:-1] if given.only_caches else steps:
        program = [*step["launcher"], str(scripts / step["script"])]
        if _run([*program, *step["arguments"]], folder):
            _fail(f"{step['what']} failed")


def _find_scripts(folder: Path, published: dict[str, Any], script: str) -> Path:
    """Return the folder of the trainer's scripts, as its own folder names it."""
    if not folder.is_dir():
        _fail(f"the folder of {published['program']} is not there: {folder}")
    found = [place for place in published["places"] if (folder / place / script).is_file()]
    if not found:
        _fail(f"{folder} holds no {script}")
    return Path(found[0])


def _choose_attention(arguments: list[str], modules: dict[str, str], folder: Path) -> None:
    """Replace `--sdpa` by the first attention whose module this Python can import, if any."""
    for name, module in modules.items():
        if _run(["-c", f"import {module}"], folder, stderr=subprocess.DEVNULL) == 0:
            arguments[arguments.index("--sdpa")] = f"--{name}"
            _say(f"attention: {name}")
            return


def _run(arguments: list[str], folder: Path, **options: Any) -> int:
    """Run this Python in the trainer's folder, and return its exit status."""
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, check=False, **options
    ).returncode


def _say(line: str) -> None:
    sys.stderr.write(f"{_OWN.stem}: {line}\n")


def _fail(fault: str) -> NoReturn:
    sys.exit(f"{_OWN.stem}: {fault}")


if __name__ == "__main__":
    main()
