"""Every target and every word on built projects: they print and write what is pinned.

The texts in tests/golden/net are the pins, and hold the commands: each line that begins with `$`.
With `LATENTMAKE_PIN=1` their output is written anew, and `git diff` shows what changed. `fresh`
goes on with a new copy of the built project. The tests only run commands and read files.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from pprint import pformat

import net_world
import pytest
from made_once import made_once
from project import PARTS, ROOT, Project

PINS = Path(__file__).parents[1] / "golden/net"

# What differs between two machines, hours or folders, and the word that replaces it, in this order.
BLANKS = [
    (r"^(no GPU|encoding on .*|cpu computes in .*|past jobs of .*|.*held-out item .*)\n", ""),
    (r"^GPU +warning +no GPU was found.*\n", ""),
    (r", on cpu$", ""),
    (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d:\d\d)?", "DATE"),
    (r"events\.out\.tfevents\.\S+", "EVENTS"),
    (r"\b\d+\.\d{4,}(e-?\d+)?|\b\d+(\.\d+)?e-\d+", "NUMBER"),
    (r"(?<![0-9A-Za-z])([0-9a-f]{12,}(\.\d+(?=\.json))?|[0-9a-f]{8}\.\.)(?![0-9A-Za-z])", "DIGEST"),
    (r"((seconds|began)['\"]?: ?)[\d.e-]+", r"\1TIME"),
    (r"(inode['\"]?: )\d+|\b\d{7,}\b", r"\1NUMBER"),
    (r"((less than|about|up to|some) )?\b\d+(\.\d+)? ?(ms|s|min|h)\b", "TIME"),
    (r"(TIME, |\d, about )[\d.]+ [kM]?B\b", r"\1SIZE"),  # as the order of past jobs has it
    (r"loss \d+\.\d+ . \d+\.\d+", "loss NUMBER"),
    (r"('asked': \w+, 'size': )\d+", r"\1NUMBER"),  # of a drawn clip, which differs by machine
    (r"[\d.]+( TFLOP/s| targets/s| [kMGT]?B free)", r"NUMBER\1"),
    (r"^( *[-─]{3,})+$\n", ""),
    (r"(?<=\S)  +", "  "),
]
JOB = re.compile(r"^\[\w{3} \w{3} .*\d{4}\]\n(?:local)?rule .*:\n(?:    .*\n)*", re.MULTILINE)
TABLE = re.compile(r"Job stats:\njob .*\n[- ]+\n((?:\S+ +\d+\n)+)total .*\n\n*")
OWN = r"^(Using workflow|Provided cores|\d+ of \d+ steps).*\n"


def blank(text: str, project: Project) -> str:
    """Return a text without times, digests and the folders of this machine."""
    for folder, word in ((project.folder, "PROJECT"), (sys.prefix, "VENV"), (ROOT, "ROOT")):
        text = text.replace(str(folder), word)
    for pattern, word in BLANKS:
        text = re.sub(pattern, word, text, flags=re.MULTILINE)
    return "\n".join(line.rstrip() for line in text.splitlines())


def laid_out(text: str) -> str:
    """Return JSON in few lines, without the bytes of pictures."""
    value = json.loads(re.sub(r"data:image/\w+;base64,[\w+/=]+", "PICTURE", text))
    return pformat(value, width=320, compact=True, sort_dicts=False)


# -- commands that show something ------------------------------------------------------------------


def snakemake(project: Project, *arguments: str) -> str:
    """Return the plan and its jobs, and why they run or what they say, in any order."""
    result = project.run(*arguments, *["-p"] * ("-n" in arguments), check=False)
    output = re.sub(OWN, "", result.output, flags=re.MULTILINE)
    plan, *said = JOB.split(output)
    plan = TABLE.sub(lambda table: f"jobs: {re.sub(' +', ' ', table[1]).splitlines()}\n", plan)
    lines = "".join(said).splitlines()
    if "-n" in arguments:
        reasons = "".join(said).partition("\nReasons:\n")[2].replace(":\n        ", ": ")
        lines = reasons.splitlines()[1:-1]
    lines = [*plan.splitlines(), *sorted(lines), f"(exit {result.returncode})"]
    return "\n".join(filter(None, lines))


def latentmake(project: Project, *arguments: str) -> str:
    result = project.ask(*arguments, check=False)
    output = result.output
    if arguments[0] == "doctor":  # the names of what it knows of this machine
        output = re.sub(r"^(  [\w/]+:) .*", r"\1", blank(output, project), flags=re.MULTILINE)
    elif "--json" in arguments and arguments[0] != "captions":
        output = laid_out(output) + "\n"
    return output + f"(exit {result.returncode})"


def files(project: Project) -> str:
    """Return the files of each folder that commands made, and how many have the same name."""
    found: dict[str, list[str]] = {}
    for path in project.folder.rglob("*"):
        place = path.relative_to(project.folder)
        if path.is_file() and place.parts[0] not in (*PARTS, *net_world.GIVEN):
            found.setdefault(str(place.parent), []).append(blank(path.name, project))
    return "\n".join(
        f"{folder}: {dict(Counter(sorted(found[folder])))}" for folder in sorted(found)
    )


def receipts(project: Project) -> str:
    """Return what each job of caches says about its work, without bytes, times and stages."""
    found = []
    for path in (project / ".latentmake/orders").glob("*.receipt.json"):
        receipt = json.loads(path.read_bytes())
        counts = {name: count for name, count in receipt["counts"].items() if count}
        found.append(f"{counts} {receipt['faults']} {sorted(receipt['targets'])}")
    return "\n".join(sorted(found))


def page(project: Project, name: str) -> str:
    """Return the data of a page."""
    text = (project / name).read_text(encoding="utf-8")
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert data, f"{name} has no data"
    return laid_out(data[1])


def read(project: Project, name: str) -> str:
    text = (project / name).read_text(encoding="utf-8")
    return laid_out(text) if name.endswith((".json", ".lock")) else text


COMMANDS = (snakemake, latentmake, files, receipts, page, read, *net_world.EDITS)
NAMED = {each.__name__: each for each in COMMANDS}


def again(name: str, project: Project, fresh: Callable[[], Project] | None = None) -> str:
    """Run the commands of a pinned text again; return the text as it is now."""
    lines = []
    pinned = (PINS / f"{name}.txt").read_text(encoding="utf-8")
    for step in re.findall(r"^\$ (.*)$", pinned, re.MULTILINE):
        word, *rest = shlex.split(step)
        lines.append(f"$ {step}\n")
        if word == "fresh" and fresh:
            project = fresh()
        elif said := NAMED[word](project, *rest):
            lines[-1] += blank(said, project) + "\n"
    return "\n".join(lines)


def check(name: str, text: str) -> None:
    """Compare a text with the pinned one, or pin it."""
    path = PINS / f"{name}.txt"
    if os.environ.get("LATENTMAKE_PIN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each machine be one without a GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture(scope="module")
def made(
    tmp_path_factory: pytest.TempPathFactory, micro: Path, preloading: None
) -> Callable[[str], Project]:
    """Build a project of net_world and note what its targets said, unless that is done."""

    def make(folder: Path) -> None:
        name = folder.name.removeprefix("net_")
        project = net_world.WORLDS[name](folder / "project", micro)
        (folder / "said.txt").write_text(again(f"{name}_targets", project), encoding="utf-8")

    return lambda name: Project(made_once(tmp_path_factory, f"net_{name}", make) / "project")


@pytest.mark.parametrize("name", net_world.WORLDS)
def test_targets_print_and_write_what_is_pinned(made: Callable[[str], Project], name: str) -> None:
    check(f"{name}_targets", (made(name).folder.parent / "said.txt").read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", ["words", "edits"])
@pytest.mark.parametrize("name", net_world.WORLDS)
def test_words_and_plans_of_edits_are_as_pinned(
    made: Callable[[str], Project], name: str, kind: str, tmp_path: Path
) -> None:
    copies = (made(name).copy(tmp_path / str(number)) for number in count())
    check(f"{name}_{kind}", again(f"{name}_{kind}", next(copies), lambda: next(copies)))
