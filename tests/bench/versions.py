"""Two versions of this project on the same projects: they agree on what is up to date, and why.

    python tests/bench/versions.py BEFORE [AFTER] [--parts idle edits] [--edits 500] [--seed 0]
        [--worlds NAME ...] [--only SEQUENCE ...] [--jobs 2] [--folder FOLDER]

BEFORE and AFTER are checkouts; AFTER is this one unless named. Each version runs in processes of
its own. They are asked from outside (`latentmake status RUN --json`, and Snakemake's builds), so
that the package may be rewritten between them.

`idle`: a project that one version has built and trained has nothing to do under the other: as it
is, back under the first, without `.latentmake`, and without `.snakemake` too.

`edits`: random edits of files, caches, models, programs, results and the configuration, one after
another, with builds by either version between them. After each edit both versions plan the project,
each with a memo of its own. The same targets have to be stale for the same reasons, with the same
orphans and faulty items; manifest and training have to be due for both or for neither. A difference
is printed with the number of its sequence, which `--only` repeats.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent / "scripts"), str(TESTS / "workflow"), str(TESTS / "worlds")]

import preloaded  # noqa: E402
import project as projects  # noqa: E402
import world  # noqa: E402
from edits_world import MEMO, STATE, Dice, edit  # noqa: E402
from project import PARTS, Project  # noqa: E402
from versions_world import RUN, WORLDS  # noqa: E402

LENGTH, BUILD = 20, 10  # edits of a sequence, and edits between its builds
_MADE = {*PARTS, "cache", "logs", "runs", STATE, ".snakemake", "said.json", "said.txt"}
Answer = dict[str, Any]


class Task(NamedTuple):
    """What is compared: in which folder, which checkouts, by which dice, `idle` too or not."""

    folder: Path
    checkouts: tuple[Path, Path]
    seed: int
    idle: bool


# -- a version ------------------------------------------------------------------------------------

# Each question is answered in a copy of the process, so that it keeps nothing of the one before but
# what a copy had to import.
_SERVER = """
import contextlib, gc, importlib, json, os, runpy, sys, traceback
import latentmake.cli, snakemake.cli, snakemake.common.configfile
sys.argv = ["snakemake"]
snakemake.cli.parse_args(["all"])  # which imports its plugins
print(latentmake.__file__, flush=True)
for line in sys.stdin:
    folder, arguments = json.loads(line)
    gc.freeze()
    known, (heard, told) = {*sys.modules}, os.pipe()
    if (child := os.fork()) == 0:
        os.chdir(folder)
        for number, name in ((1, "said.json"), (2, "said.txt")):
            os.dup2(os.open(name, os.O_CREAT | os.O_TRUNC | os.O_WRONLY), number)
        sys.argv, status = ["latentmake", *arguments], 0
        try:
            runpy.run_module("latentmake", run_name="__main__", alter_sys=True)
        except SystemExit as error:
            status = error.code or 0
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(told, " ".join(sys.modules.keys() - known).encode()[:60_000])
        os._exit(status)
    os.close(told)
    with open(heard) as file, contextlib.suppress(ImportError):
        for name in file.read().split():
            importlib.import_module(name)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Version:
    """A checkout, and the process that answers for it."""

    def __init__(self, name: str, checkout: Path) -> None:
        self.name, self.checkout = name, checkout
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._server = subprocess.Popen(
            [sys.executable, "-c", _SERVER],
            env={**kept, "PYTHONPATH": str(checkout / "scripts")},
            stderr=subprocess.DEVNULL,  # Snakemake's word about its profile
            cwd=checkout,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        package = Path(self._line())
        if checkout not in package.parents:
            raise SystemExit(f"{checkout} answers with {package}")

    def _line(self) -> str:
        assert self._server.stdout is not None
        if not (line := self._server.stdout.readline()):
            raise SystemExit(f"the process of {self.checkout} ended")
        return line.strip()

    def plan(self, project: Project) -> Answer:
        """Return what a plan says of a project."""
        assert self._server.stdin is not None
        question = [str(project.folder), ["status", RUN, "--json"]]
        self._server.stdin.write(f"{json.dumps(question)}\n")
        self._server.stdin.flush()
        status = int(self._line())
        if status:
            said = (project / "said.txt").read_text().strip().splitlines() or [""]
            return {"refused": status, "line": said[-1]}
        return _planned(json.loads((project / "said.json").read_bytes())[0])

    def build(self, project: Project, *, train: bool = True) -> projects.Result:
        """Build with this version's Snakefile, rules and scripts; train where it has a trainer."""
        for part in PARTS:
            place = project / part
            if place.is_symlink() or place.is_file():
                place.unlink()
            elif place.is_dir():
                shutil.rmtree(place)
            place.symlink_to(self.checkout / part)
        trains = train and project.config["runs"][RUN].get("trainer")
        return project.run(f"{'train' if trains else 'caches'}_{RUN}", check=False)


def _planned(status: Mapping[str, Any]) -> Answer:
    """Return what has to be equal of a run's status. To adapt, where a version prints another."""
    lines = [
        line.removeprefix(f"{RUN}: ") for line in status["lines"] if line.startswith(f"{RUN}:")
    ]
    manifest = "the manifest is to be written"
    return {
        "stale": sorted(f"{each['reason']} {each['path']}" for each in status["files"]),
        "fresh": {f"{x['dataset']} {x['model']} {x['kind']}": x["fresh"] for x in status["rows"]},
        "faulty": sorted(status["faulty"]),
        "manifest": manifest in lines,
        "training": any(line != manifest for line in lines)
        or any(line.startswith(f"training of {RUN}: ") for line in status["lines"]),
    }


@functools.cache
def _versions(*checkouts: Path) -> tuple[Version, Version]:
    """Return both, whose processes live as long as this one."""
    before, after = checkouts
    return Version("before", before), Version("after", after)


# -- idle -----------------------------------------------------------------------------------------


def idle(name: str, builder: int, task: Task) -> list[str]:
    """Build a project of a world by one version; return what is not idle, and under which one."""
    versions = _versions(*task.checkouts)
    by, faults = versions[builder], []
    projects.ROOT = by.checkout  # whose parts a project has
    project = WORLDS[name].make(task.folder / f"{name}-{by.name}")
    if (result := by.build(project)).returncode:
        raise SystemExit(f"{name} by {by.name}: {result.output[-3000:]}")
    project.copy(task.folder / f"{name}-{by.name}-built")  # with which edits begin
    for left_out in ([], [STATE], [STATE, ".snakemake"]) if task.idle else ():
        for part in left_out:
            shutil.rmtree(project / part, ignore_errors=True)
        for version in (versions[1 - builder], by):  # the second goes back to what it was
            result, found = version.build(project), version.plan(project)
            if not result.idle or any(found[key] for key in found.keys() - {"fresh"}):
                without = f" without {' and '.join(left_out)}" if left_out else ""
                said = result.output[-2000:] if not result.idle else ""
                faults.append(f"{name} by {by.name}, {version.name}{without}: {found} {said}")
    return faults


# -- edits ----------------------------------------------------------------------------------------


class _Both:
    """A copy of a built project that both versions plan, each with a state folder of its own."""

    def __init__(self, template: Project, folder: Path, versions: tuple[Version, Version]) -> None:
        self._template, self._versions = template, versions
        self.project = template.copy(folder)
        for version in versions:
            shutil.copytree(self.project / STATE, self._state(version))
        shutil.rmtree(self.project / STATE)

    def _state(self, version: Version) -> Path:
        return self.project / f"{STATE}.{version.name}"

    @contextlib.contextmanager
    def _with(self, version: Version) -> Iterator[Version]:
        if self._state(version).exists():
            self._state(version).rename(self.project / STATE)
        yield version
        if (self.project / STATE).exists():
            (self.project / STATE).rename(self._state(version))

    def plan(self) -> list[Answer]:
        """Return what each version says."""
        answers = []
        for each in self._versions:
            with self._with(each) as version:
                answers.append(version.plan(self.project))
        return answers

    def build(self, dice: Dice) -> str:
        """Build by one of them; the other finds what that left, and has its own memo or that."""
        builder, other = dice.sample(self._versions, 2)
        with self._with(builder) as version:
            result = version.build(self.project, train=dice.random() < 0.5)
        if (memo := self._state(other) / MEMO).exists() and dice.random() < 0.5:
            shutil.copy2(memo, self.project / MEMO)
        shutil.rmtree(self._state(other), ignore_errors=True)
        shutil.copytree(self._state(builder), self._state(other))
        if (self.project / MEMO).exists():
            (self.project / MEMO).replace(memo)
        return f"build by {builder.name}; {self.restore() if result.returncode else 'done'}"

    def restore(self) -> str:
        """Take all edits of sources and of the configuration back."""
        for part in {path.name for path in self._template.folder.iterdir()} - _MADE:
            shutil.rmtree(self.project / part)
            source = self._template / part
            subprocess.run(["cp", "-a", source, self.project.folder], check=True)
        return "all sources as they were"


def edits(name: str, number: int, task: Task) -> Counter[str]:
    """Edit a project again and again; print a difference, and return how often what happened."""
    dice, versions = Dice(f"{task.seed} {number}"), _versions(*task.checkouts)
    template = Project(task.folder / f"{name}-before-built")
    both = _Both(template, task.folder / f"sequence-{number}", versions)
    counts, done = Counter[str](), ["nothing"]
    for step in range(LENGTH + LENGTH // BUILD):
        if step % (BUILD + 1):
            undone = dice.random() < 0.2
            done.append(both.restore() if undone else edit(both.project, WORLDS[name], dice))
            counts["edits"] += 1
        elif step:
            done.append(both.build(dice))
            counts["builds"] += 1
        one, other = both.plan()  # of what was just built too, so that edits meet what is known
        counts["with something to do"] += bool(one.get("stale") or one.get("training"))
        if one | {"line": ""} != other | {"line": ""}:
            counts["differences"] += 1
            print(f"sequence {number}, {name}:", *done, sep="\n    ")
            for key in sorted(one.keys() | other.keys()):
                if one.get(key) != other.get(key):
                    print(f"  {key}, before: {one.get(key)}\n  {key}, after:  {other.get(key)}")
            sys.stdout.flush()
            return counts  # the states have parted
        if "refused" in one:  # nothing more would be seen
            counts["refused" if one["line"].startswith("error:") else "crashed"] += 1
            done[-1] += f"; {both.restore()}"
    shutil.rmtree(both.project.folder)
    return counts


# -- the command ----------------------------------------------------------------------------------


def main() -> None:
    """Compare, print differences, and fail if there is one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path, nargs="?", default=TESTS.parent)
    parser.add_argument("--parts", nargs="+", choices=("idle", "edits"), default=["idle", "edits"])
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, default=[*WORLDS])
    parser.add_argument("--edits", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="+", help="numbers of sequences")
    parser.add_argument("--jobs", type=int, default=2, help="projects at a time")
    parser.add_argument("--folder", type=Path, help="a new folder for the projects")
    chosen = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "SLURM_CONF": os.devnull}
    os.environ.setdefault(preloaded.OWNER, str(os.getpid()))
    preloaded.environment()  # which starts what the builds of all workers use
    folder = chosen.folder or Path(tempfile.mkdtemp(prefix="latentmake-versions-"))
    world.make_model(folder / "micro")
    checkouts = chosen.before.resolve(), chosen.after.resolve()
    task = Task(folder, checkouts, chosen.seed, "idle" in chosen.parts)
    count = -(-chosen.edits // LENGTH) if "edits" in chosen.parts else 0
    # Of any other worlds, a sequence would be another one.
    sequences = [(chosen.worlds[x % len(chosen.worlds)], x) for x in chosen.only or range(count)]
    begun, counts = time.monotonic(), Counter[str]()
    with ProcessPoolExecutor(chosen.jobs) as pool:
        names = chosen.worlds if task.idle else dict.fromkeys(name for name, _ in sequences)
        asked = [(name, builder) for builder in range(1 + task.idle) for name in names]
        for (name, builder), each in [(x, pool.submit(idle, *x, task)) for x in asked]:
            counts["not idle"] += len(faults := each.result())
            print(
                f"{name}, built by {('before', 'after')[builder]}", *faults, sep="\n  ", flush=True
            )
        print(f"{len(asked)} projects in {time.monotonic() - begun:.0f} s", flush=True)
        begun = time.monotonic()
        for each in [pool.submit(edits, *x, task) for x in sequences]:
            counts += each.result()
    told = ", ".join(f"{count} {what}" for what, count in counts.items())
    print(f"seed {chosen.seed}: {told or 'nothing'}; {time.monotonic() - begun:.0f} s of edits")
    if counts["differences"] or counts["not idle"]:
        raise SystemExit(f"the versions differ; projects are in {folder}")
    if chosen.folder is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
