"""A copy of the project in a folder of its own, as a user would work in it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import preloaded
import psutil
import yaml
from latentmake.base.atomic import TEMPORARY_SUFFIX
from latentmake.base.workspace import OWNER
from latentmake.cli import app
from latentmake.formats.cachefile import read_header
from latentmake.request import VARIABLE
from latentmake.session import Session
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("Snakefile", "rules", "scripts", "profiles", "envs")

_COUNTS = re.compile(
    r"^(latents|text) of (\S+): (\d+) encoded(?:, (\d+) restored)?(?:, (\d+) linked)?"
    r"(?:, (\d+) kept)?(?:, (\d+) faulty)?(?:; device busy .*)?$",
    re.MULTILINE,
)
_TABLE = re.compile(r"^dataset\s+model\s+kind\s+fresh\s.*$", re.MULTILINE)
_JOB = re.compile(r"^(?:local)?(?:rule|checkpoint) (\S+):$", re.MULTILINE)

Snapshot = dict[str, tuple[str, int]]

# Stops a job, once, just before one more file comes to stand in a folder, so that a test need not
# be quick enough to meet it there.
_STOP = """
import itertools, os, signal, sys, time
NAMED, NUMBERS = {{}}, itertools.count()
def stop(event, arguments):
    if event == "os.rename" and os.path.dirname(os.fspath(arguments[1])).endswith({folder!r}):
        NAMED[number := next(NUMBERS)] = arguments[1]
        if number == {files} and not os.path.exists("stopped"):
            open("stopped", "x").close()
            while not all(os.path.exists(NAMED.get(each, "")) for each in range({files})):
                time.sleep(0.01)  # other threads put them there
            os.kill(os.getpid(), signal.SIGSTOP)
sys.addaudithook(stop)
"""

# Lets jobs write nothing until there are as many of them: so many have a GPU at the same time.
_MEET = """
import os, sys, time
def meet(event, arguments):
    if event == "os.rename" and os.path.dirname(os.fspath(arguments[1])).endswith({folder!r}):
        mine = f"met/{{os.getpid()}}"
        if not os.path.exists(mine):
            os.makedirs("met", exist_ok=True)
            open(mine, "w").write(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        while len(os.listdir("met")) < {jobs}:
            time.sleep(0.01)
sys.addaudithook(meet)
"""


class Counts(NamedTuple):
    """What encoding jobs said they did, added up."""

    encoded: int = 0
    spooled: int = 0
    linked: int = 0
    kept: int = 0
    faulty: int = 0


class Changes(NamedTuple):
    """What happened to the cache files since a snapshot."""

    added: set[str]
    removed: set[str]
    content: set[str]
    rewritten: set[str]  # the same bytes under a new mtime


NOTHING = Changes(set(), set(), set(), set())


@dataclass(frozen=True)
class Result:
    """What one command said, and how it ended."""

    returncode: int
    output: str

    def encoded(self, kind: str | None = None) -> Counts:
        lines = [match.groups() for match in _COUNTS.finditer(self.output)]
        if self.returncode:
            lines = list(dict.fromkeys(lines))  # a failed job's log is shown a second time
        rows = [
            [int(number or 0) for number in line[2:]] for line in lines if kind in (None, line[0])
        ]
        return Counts(*map(sum, zip(*rows, strict=True))) if rows else Counts()

    @property
    def jobs(self) -> list[str]:
        return _JOB.findall(self.output)

    @property
    def idle(self) -> bool:
        return "Nothing to be done" in self.output and not self.jobs

    @property
    def tables(self) -> int:
        return len(_TABLE.findall(self.output))

    def table(self) -> dict[tuple[str, str], Counter[str]]:
        """Return (dataset, kind) -> column -> count, of the plan's table."""
        lines = self.output.splitlines()
        start = next(index for index, line in enumerate(lines) if _TABLE.match(line))
        columns = [
            (match[0], match.start(), match.end()) for match in re.finditer(r"-+", lines[start + 1])
        ]
        header = [lines[start][begin:end].strip() for _, begin, end in columns]
        header = ["changed recipe" if head == "recipe" else head for head in header]
        rows: dict[tuple[str, str], Counter[str]] = {}
        for line in lines[start + 2 :]:
            if not line.strip():
                break
            cells = [line[begin:end].strip() for _, begin, end in columns]
            if len(cells) < len(header) or not re.fullmatch(r"\.|\d+", cells[-1]):
                break
            row = dict(zip(header, cells, strict=True))
            rows[row["dataset"], row["kind"]] = Counter(
                {name: 0 if row[name] == "." else int(row[name]) for name in header[3:]}
            )
        return rows

    def one_line(self, *words: str) -> str:
        """Return the one message that holds all these words; there must be such a line."""
        found = [line for line in self.output.splitlines() if all(word in line for word in words)]
        assert found, f"no line with {words} in:\n{self.output}"
        return found[0]


class Project:
    """A folder with Snakefile, rules, scripts and profiles, a configuration and data."""

    preloads = True
    """Whether scripts of a build that `run` starts find their libraries imported."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    # -- making -------------------------------------------------------------------------------

    @classmethod
    def make(cls, folder: Path, config: dict[str, Any], model: Path | None = None) -> Project:
        folder.mkdir(parents=True)
        for part in PARTS:
            if (ROOT / part).is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
                shutil.copytree(ROOT / part, folder / part, ignore=ignored)
            elif (ROOT / part).exists():
                shutil.copy2(ROOT / part, folder / part)
        if model is not None:
            shutil.copytree(model, folder / "models" / model.name)
        project = cls(folder)
        project.config = config
        return project

    def copy(self, folder: Path) -> Project:
        """Copy everything as `cp -a` does: mtimes and hard links stay."""
        subprocess.run(["cp", "-a", str(self.folder), str(folder)], check=True)
        return Project(folder)

    @property
    def config(self) -> dict[str, Any]:
        return yaml.safe_load((self / "config/config.yaml").read_text(encoding="utf-8"))

    @config.setter
    def config(self, values: dict[str, Any]) -> None:
        path = self / "config/config.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), "utf-8")

    def configure(self, change: Callable[[dict[str, Any]], object]) -> None:
        values = self.config
        change(values)
        self.config = values

    def __truediv__(self, path: str) -> Path:
        return self.folder / path

    def stop_in_script(self, name: str, folder: str | tuple[str, ...], files: int) -> None:
        """Let a job of a script stop when it has put a number of files into a folder.

        Another one stops once the file `stopped` is removed.

        Args:
            name: the script's.
            folder: the end of the path of the folder, or of several.
            files: how many.
        """
        self._begin_script(name, _STOP.format(folder=folder, files=files))

    def meet_in_script(self, name: str, jobs: int, folder: str = "/16") -> None:
        """Let jobs of a script that put files into a folder wait until there are so many."""
        self._begin_script(name, _MEET.format(jobs=jobs, folder=folder))

    def met(self) -> list[str]:
        """Return the GPUs of those jobs, in the order in which they came."""
        files = sorted((self / "met").iterdir(), key=lambda path: path.stat().st_mtime_ns)
        return [path.read_text() for path in files]

    def compute_on_the_cpu(self) -> None:
        """Let encoding jobs and trainings compute there: torch sees none of the GPUs they hold."""
        code = "from latentmake.encode.encoders import device\ndevice.visible = list\n"
        self._begin_script("encode.py", code)
        self._begin_script("train.py", "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = ''\n")

    def _begin_script(self, name: str, code: str) -> None:
        entry = self / "scripts" / name
        entry.write_text(code + entry.read_text(encoding="utf-8"), encoding="utf-8")

    # -- running ------------------------------------------------------------------------------

    def command(self, *arguments: str) -> list[str]:
        cores = [] if "--cores" in arguments else ["--cores", "1"]
        return [sys.executable, "-m", "snakemake", *cores, *arguments]

    @staticmethod
    def environment() -> dict[str, str]:
        ours = ("SNAKEMAKE", "PYTEST", "PYTHON", "LATENTMAKE_PLAN")  # a user sets none of these
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        # Where SLURM is installed and down, its plugin waits for a cluster at each start.
        cluster = {"SLURM_CONF": os.devnull}
        return {**kept, **cluster, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    def run(
        self, *arguments: str, check: bool = True, cwd: Path | None = None, **environment: str
    ) -> Result:
        preload = preloaded.environment() if self.preloads else {}
        done = subprocess.run(
            self.command(*arguments),
            cwd=cwd or self.folder,
            env={**self.environment(), **preload, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=600,
        )
        result = Result(done.returncode, done.stdout)
        if check:
            assert done.returncode == 0, done.stdout
        return result

    def ask(self, *arguments: str, check: bool = True) -> Result:
        """Run `latentmake` here, in this process."""
        with contextlib.chdir(self.folder):
            done = CliRunner().invoke(app, [*arguments])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        if check:
            assert done.exit_code == 0, done.output
        return Result(done.exit_code, done.output)

    def plan(self, *targets: str) -> str:
        """Plan targets in this process as a build does; return the path of its plan file."""
        with contextlib.chdir(self.folder):
            Session(self.config, targets=targets, main=True)
        return os.environ.pop(VARIABLE)

    def refusal(self, *targets: str) -> str:
        """Plan targets as `plan` does; return the line that refuses them."""
        try:
            self.plan(*targets)
        except SystemExit as refused:
            (line,) = str(refused).splitlines()
            return line
        raise AssertionError(f"{targets} are not refused")

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command in a process group of its own; its output goes to a file."""
        with (self / "started.txt").open("w") as output:
            return subprocess.Popen(
                self.command(*arguments),
                cwd=self.folder,
                env=self.environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )

    # -- looking ------------------------------------------------------------------------------

    def cache_files(self) -> list[str]:
        """Return the files in `cache`, without notes of its owner where it lies elsewhere."""
        paths = (self / "cache").rglob("*")
        files = (path for path in paths if path.is_file() and path.name != OWNER)
        return sorted(str(path.relative_to(self.folder)) for path in files)

    def snapshot(self) -> Snapshot:
        return {
            name: (
                hashlib.sha256((self / name).read_bytes()).hexdigest(),
                (self / name).stat().st_mtime_ns,
            )
            for name in self.cache_files()
        }

    def changed(self, before: Snapshot) -> Changes:
        now = self.snapshot()
        both = before.keys() & now.keys()
        content = {name for name in both if before[name][0] != now[name][0]}
        return Changes(
            added=now.keys() - before.keys(),
            removed=before.keys() - now.keys(),
            content=content,
            rewritten={name for name in both - content if before[name][1] != now[name][1]},
        )

    def latents(self, *stems: str, resolutions: tuple[int, ...] = (16, 32)) -> set[str]:
        return {
            f"cache/shapes/micro/{resolution}/{stem}.latents.safetensors"
            for stem in stems
            for resolution in resolutions
        }

    def texts(self, *stems: str) -> set[str]:
        return {f"cache/shapes/micro/text/{stem}.text.safetensors" for stem in stems}

    def manifest(self, run: str = "tiny") -> list[dict[str, Any]]:
        text = (self / f"runs/{run}/manifest.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    def lock(self, run: str = "tiny") -> dict[str, Any]:
        return json.loads((self / f"runs/{run}/dataset.lock").read_bytes())

    def store(self) -> list[Path]:
        folder = self / ".latentmake/store"
        return sorted(folder.iterdir()) if folder.is_dir() else []

    def temporaries(self) -> list[Path]:
        """Return every file with a temporary name, wherever it lies."""
        return [path for path in self.folder.rglob(f"*{TEMPORARY_SUFFIX}*") if path.is_file()]

    def assert_all_whole(self) -> None:
        """Every file with a cache name must be complete and one of ours."""
        for name in self.cache_files():
            if not name.endswith(TEMPORARY_SUFFIX):
                read_header(self / name)

    # -- editing ------------------------------------------------------------------------------

    def write_keeping_mtime(self, name: str, data: bytes) -> None:
        """Overwrite a file and set its mtime back to what it was."""
        path = self / name
        stat = path.stat()
        path.write_bytes(data)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    def scramble_mtimes(self) -> None:
        """Give every file another mtime: newest first, oldest last, and some in the future."""
        now = time.time_ns()
        for index, path in enumerate(sorted(self.folder.rglob("*"), reverse=True)):
            moment = now - (index * 7919 % 1000 - 100) * 1_000_000_000
            os.utime(path, ns=(moment, moment), follow_symlinks=False)


_NEVER = 300.0  # seconds after which nothing more is to be expected


def wait_until(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    """Wait for a condition, as long as a process lives; a condition that never holds fails."""
    until = time.monotonic() + _NEVER
    while not condition():
        assert process.poll() is None, "the process ended before"
        assert time.monotonic() < until, "what is waited for has not come"
        time.sleep(0.02)  # looking at all processes takes time of its own


def stopped(running: subprocess.Popen[str], after: int = 0) -> int:
    """Wait until a job of a build has stopped that comes after another, and return its id."""
    found: list[int] = []

    def stops() -> bool:
        for job in psutil.Process(running.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if job.pid != after and job.status() == psutil.STATUS_STOPPED:
                    found.append(job.pid)
        return bool(found)

    wait_until(stops, running)
    return found[0]


def kill_group(process: subprocess.Popen[str]) -> None:
    """End a process and all that it has started, at once."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
