"""Every target and every word on built projects: they print and write what is pinned.

The texts in tests/golden/net are the pins. With `LATENTMAKE_PIN=1` they are written anew, and
`git diff` shows what changed. The tests only run commands and read files.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import net_world
import pytest
from made_once import made_once
from project import PARTS, ROOT, Project

PINS = Path(__file__).parents[1] / "golden/net"
Step = str | Callable[[Project], object]

# What differs between two machines, hours or folders, and the word that replaces it, in this order.
BLANKS = [
    (r"^(    (input|output|jobid|resources): .*|\d+ of \d+ steps .*|no GPU|encoding on .*)\n", ""),
    (r"^cpu computes in .*\n|held-out item .*|, on cpu$", ""),
    (r"builds/[\w.]+", "builds/BUILD"),
    (r"^(Using workflow specific|Provided cores|Complete log|Elapsed time).*\n", ""),
    (r"; device busy .*", ""),
    (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d:\d\d)?", "DATE"),
    (r"data:image/\w+;base64,[\w+/=]+", "PICTURE"),
    (r"events\.out\.tfevents\.\S+", "EVENTS"),
    (r"\b\d+\.\d{4,}(e-?\d+)?|\b\d+(\.\d+)?e-\d+", "NUMBER"),
    (r"(?<![0-9A-Za-z])([0-9a-f]{12,}(\.\d+(?=\.json))?|[0-9a-f]{8}\.\.)(?![0-9A-Za-z])", "DIGEST"),
    (r"(inode\"?: )\d+|\b\d{7,}\b", r"\1NUMBER"),
    (r"(seconds\"?: ?)[\d.e-]+", r"\1TIME"),
    (r"((less than|about|up to|some) )?\b\d+(\.\d+)? ?(ms|s|min|h)\b", "TIME"),
    (r"loss \d+\.\d+ . \d+\.\d+", "loss NUMBER"),
    (r"[-─]{3,}", "---"),
    (r"[\d.]+( TFLOP/s| targets/s| [kMGT]?B free)", r"NUMBER\1"),
]


def blank(text: str, project: Project) -> str:
    """Return a text without times, digests and the folders of this machine."""
    for folder, word in ((project.folder, "PROJECT"), (ROOT, "ROOT"), (sys.prefix, "VENV")):
        text = text.replace(str(folder), word)
    for pattern, word in BLANKS:
        text = re.sub(pattern, word, text, flags=re.MULTILINE)
    return "\n".join(line.rstrip() for line in text.splitlines())


def in_order(output: str) -> str:
    """Return the output of Snakemake with its jobs sorted, whose order is no promise."""
    first, *jobs, last = ["", *re.split(r"^\[\w{3} \w{3} .*\d{4}\]\n", output, flags=re.MULTILINE)]
    return "".join([first, *jobs[:1], *sorted(jobs[1:], key=job_name), last])


def job_name(job: str) -> str:
    return re.sub(r"(_|/)[0-9a-f]{12,}", "", job)


def files(project: Project) -> str:
    """Return the names of all files that commands made, and how many have the same name."""
    given = {*PARTS, *net_world.GIVEN, ".snakemake"}
    paths = (path.relative_to(project.folder) for path in project.folder.rglob("*"))
    paths = (path for path in paths if path.parts[0] not in given and (project / path).is_file())
    names = Counter(blank(str(path), project) for path in paths if "sqlite-" not in path.name)
    return "\n".join(f"{name} x{count}" for name, count in sorted(names.items()))


def receipts(project: Project) -> str:
    """Return what each job of caches says about its work, without bytes, times and stages."""
    found = []
    for path in (project / ".latentmake/orders").glob("*.receipt.json"):
        receipt = json.loads(path.read_bytes())
        work, counts, faults = receipt["work"], receipt["counts"], receipt["faults"]
        found.append(f"{work}: {counts} {faults} {sorted(receipt['targets'])}")
    return "\n".join(sorted(found))


def page(project: Project, name: str) -> str:
    """Return the data of a page."""
    text = (project / name).read_text(encoding="utf-8")
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert data, f"{name} has no data"
    lines = []
    for key, value in sorted(json.loads(data[1]).items()):
        rows = value if isinstance(value, list) else [value]
        lines += [key, *(f"  {json.dumps(row, ensure_ascii=False)}" for row in rows)]
    return "\n".join(lines)


def read(project: Project, *names: str) -> str:
    return "".join((project / name).read_text(encoding="utf-8") for name in names)


def snakemake(project: Project, *arguments: str) -> str:
    result = project.run(*arguments, check=False)
    return in_order(result.output) + f"(exit {result.returncode})"


def latentmake(project: Project, *arguments: str) -> str:
    result = project.ask(*arguments, check=False)
    output = result.output
    if arguments[0] == "doctor":  # the names of what it knows of this machine
        output = re.sub(r"^(  [\w/]+:) .*", r"\1", blank(output, project), flags=re.MULTILINE)
    return output + f"(exit {result.returncode})"


COMMANDS = {each.__name__: each for each in (snakemake, latentmake, files, receipts, page, read)}


def transcript(project: Project, *steps: Step) -> str:
    """Take steps; return them with what they printed."""
    lines = []
    for step in steps:
        if callable(step):
            step(project)
            lines.append(f"# {step.__name__.replace('_', ' ')}\n")
        else:
            word, *rest = shlex.split(step)
            said = blank(COMMANDS[word](project, *rest), project)
            lines.append(f"$ {step}\n{said}\n")
    return "\n".join(lines)


def check(name: str, text: str) -> None:
    """Compare a text with the pinned one, or pin it."""
    path = PINS / f"{name}.txt"
    if os.environ.get("LATENTMAKE_PIN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


Made = Callable[[str], Project]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each machine be one without a GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, micro: Path, preloading: None) -> Made:
    """Build a project of net_world and note what its targets said, unless that is done."""

    def make(folder: Path) -> None:
        world = net_world.WORLDS[folder.name.removeprefix("net_")]
        project = world.make(folder / "project", micro)
        (folder / "said.txt").write_text(transcript(project, *world.targets), encoding="utf-8")

    return lambda name: Project(made_once(tmp_path_factory, f"net_{name}", make) / "project")


@pytest.mark.parametrize("name", net_world.WORLDS)
def test_targets_print_and_write_what_is_pinned(made: Made, name: str) -> None:
    check(f"{name}_targets", (made(name).folder.parent / "said.txt").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", net_world.WORLDS)
def test_words_print_and_write_what_is_pinned(made: Made, name: str, tmp_path: Path) -> None:
    project = made(name).copy(tmp_path / "project")
    check(f"{name}_words", transcript(project, *net_world.WORLDS[name].words))


@pytest.mark.parametrize("name", net_world.WORLDS)
def test_the_plan_of_an_edit_is_as_pinned(made: Made, name: str, tmp_path: Path) -> None:
    world = net_world.WORLDS[name]
    said = []
    for number, (edit, path) in enumerate(world.edits.items()):
        project = made(name).copy(tmp_path / str(number))
        said.append(transcript(project, edit, *world.after, f"latentmake explain {path}"))
    project = made(name).copy(tmp_path / "all")
    said.append(transcript(project, *list(world.edits)[:3], *world.built))
    check(f"{name}_edits", "\n".join(said))
