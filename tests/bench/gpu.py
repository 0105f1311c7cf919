"""Steps of gpu.sh: each a program with a time limit, whose failure stops no other.

python tests/bench/gpu.py [--cpu] [--minutes 9] [--out FOLDER] [STEP...]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parents[1]
LEFT = 3  # seconds for what is printed at the end


class Step(NamedTuple):
    """A step.

    Attributes:
        name: on the command line.
        limit: seconds that it may take.
        command: arguments of Python, of whether it runs on the CPU, and where its rows go.
        rows: whether it writes rows.
    """

    name: str
    limit: int
    command: Callable[[bool, str], list[str]]
    rows: bool = True


def _bench(name: str, *arguments: str) -> Callable[[bool, str], list[str]]:
    def command(cpu: bool, rows: str) -> list[str]:
        return [str(BENCH / name), *arguments, *(["--cpu"] if cpu else []), "--json", rows]

    return command


def _wan(cpu: bool, rows: str) -> list[str]:
    sizes = ["--frames", "17", "--steps", "3", "--only", "train"]
    if cpu:
        sizes = ["--model", "tiny", "--frames", "5", "--height", "32", "--width", "48"]
    return [str(BENCH / "wan.py"), *sizes, "--json", rows]


def _loader(cpu: bool, rows: str) -> list[str]:
    sizes = ["400", "--threads", "1"] if cpu else ["4000", "--threads", "1", "4"]
    return [str(BENCH / "loader.py"), "--items", *sizes, "--batch-size", "8", "--rounds", "1"]


def _tests(cpu: bool, rows: str) -> list[str]:
    return ["-m", "pytest", "-n", "0", "-v", "-rs", "--durations=5", str(ROOT / "tests/gpu")]


STEPS = (
    Step("tests", 180, _tests, rows=False),
    Step("vae512", 90, _bench("gpu_encoders.py", "vae512")),
    Step("vae1024", 90, _bench("gpu_encoders.py", "vae1024")),
    Step("t5", 120, _bench("gpu_encoders.py", "t5")),
    Step("wan", 90, _bench("gpu_encoders.py", "wan")),
    Step("sd_trainer", 120, _bench("gpu_trainers.py")),
    Step("wan_trainer", 90, _wan),
    Step("exactness", 120, _bench("gpu_encoders.py", "exactness")),
    Step("clip", 60, _bench("gpu_encoders.py", "clip")),
    Step("loader", 60, _loader, rows=False),
)


def machine() -> dict[str, object]:
    """Return what figures depend on besides the code."""
    import torch

    found: dict[str, object] = {
        "device": None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
    }
    for name in ("diffusers", "transformers", "bitsandbytes"):
        try:
            found[name] = __import__("importlib.metadata").metadata.version(name)
        except ImportError:
            found[name] = None
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
        found["memory [GB]"] = round(torch.cuda.get_device_properties(0).total_memory / 1e9, 1)
        found["cuda"] = torch.version.cuda or torch.version.hip
        found["cudnn"] = torch.backends.cudnn.version()
    return found


def run(step: Step, *, cpu: bool, seconds: float) -> dict[str, object]:
    """Run a step; return its status, seconds, rows and the end of what it printed."""
    environment = dict(os.environ, PYTHONPATH=str(ROOT / "scripts"), HF_HUB_OFFLINE="1")
    if cpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory() as folder:
        rows, log = Path(folder) / "rows.json", Path(folder) / "log"
        began = time.monotonic()
        with log.open("wb") as output:
            child = subprocess.Popen(
                [sys.executable, *step.command(cpu, str(rows))],
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = "ok" if child.wait(seconds) == 0 else f"failed ({child.returncode})"
            except subprocess.TimeoutExpired:
                status = f"stopped after {seconds:.0f} s"
            finally:
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)  # and all that it started
                    child.wait()
        text = log.read_text(errors="replace")
        if "No module named" in text and status != "ok":
            status += f": {re.findall(r'No module named [^ ]+', text)[-1].strip()}"
        return {
            "step": step.name,
            "status": status,
            "seconds": round(time.monotonic() - began, 1),
            "rows": json.loads(rows.read_text()) if rows.exists() else [],
            "output": text.splitlines()[-60:],
        }


def main() -> int:
    """Run steps and print what they found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", nargs="*", metavar="STEP", help=", ".join(x.name for x in STEPS))
    parser.add_argument("--cpu", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all steps together")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of gpu.json and gpu.txt")
    options = parser.parse_args()
    if unknown := set(options.steps) - {step.name for step in STEPS}:
        parser.error(f"no step is called {min(unknown)}: {', '.join(x.name for x in STEPS)}")
    end = time.monotonic() + 60 * options.minutes - LEFT
    try:
        found = machine()
    except ImportError as error:
        sys.stderr.write(f"{error}; `--install FOLDER` installs what is missing\n")
        return 2
    if found["device"] is None and not options.cpu:
        hint = "`--cpu` runs every step at tiny sizes"
        sys.stderr.write(f"no GPU: torch {found['torch']} sees none; {hint}\n")
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []

    def say(text: str) -> None:
        lines.append(text)
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
        (options.out / "gpu.txt").write_text("\n".join(lines) + "\n")
        summary = {"machine": found, "cpu": options.cpu, "steps": done}
        (options.out / "gpu.json").write_text(json.dumps(summary, indent=1))

    done: list[dict[str, object]] = []
    say(", ".join(f"{name} {value}" for name, value in found.items()))
    for step in STEPS:
        if options.steps and step.name not in options.steps:
            continue
        left = min(step.limit, end - time.monotonic())
        if left < 1:
            done.append({"step": step.name, "status": "left out: no time", "seconds": 0.0})
        else:
            done.append(run(step, cpu=options.cpu, seconds=left))
        last = done[-1]
        say(f"\n== {step.name}: {last['status']}, {last['seconds']} s")
        for line in last.get("output", []):  # type: ignore[attr-defined]
            say(line)
    faulty = [f"{each['step']} ({each['status']})" for each in done if each["status"] != "ok"]
    say(f"\n{len(done) - len(faulty)} of {len(done)} steps done" + "; ".join(["", *faulty]))
    return 1 if faulty else 0


if __name__ == "__main__":
    sys.exit(main())
