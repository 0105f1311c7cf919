"""What the plan says before anything is done, and who plans."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import world
from latentmake.request import VARIABLE
from project import NOTHING, Project


@pytest.fixture
def mixed(built: Project) -> Project:
    """A project with targets of every state."""
    data = built / "data/shapes"
    world.draw(data / "new.png", 60)
    (data / "new.txt").write_text("a new picture")
    world.draw(data / "ant.png", 61)
    (data / "bee.png").unlink()
    (data / "bee.txt").unlink()
    (name,) = built.latents("cat", resolutions=(32,))
    (built / name).write_bytes(b"damaged")
    built.configure(lambda config: config["models"]["micro"].update(text_dtype="bfloat16"))
    return built


def test_a_dry_run_counts_every_reason_and_changes_nothing(mixed: Project) -> None:
    for left in ("incomplete/of-a-killed-build", "locks/0.output.lock"):
        path = mixed / ".snakemake" / left
        path.parent.mkdir(exist_ok=True)
        path.touch()
    before, states = mixed.snapshot(), states_of(mixed)
    result = mixed.run("-n", "caches_tiny")
    columns = ["fresh", "new", "edited", "changed recipe", "damaged", "orphaned"]
    table = {kind: [row[name] for name in columns] for (_, kind), row in result.table().items()}
    assert table == {
        "latents 16": [4, 1, 1, 0, 0, 1],
        "latents 32": [3, 1, 1, 0, 1, 1],
        "text": [0, 1, 0, 5, 0, 1],
    }
    assert "11 targets to make (5 latents, 6 texts), in 2 jobs" in result.output
    assert "\nrecipe: dtype float32 -> bfloat16: 5 texts of shapes\n" in result.output
    assert result.tables == 1
    assert result.output.index("11 targets to make") < result.output.index("Job stats:")
    summary = mixed.run("--summary", "caches_tiny").output
    assert len(re.findall(r"^\S+\.receipt\.json\t-\tencode.*update pending$", summary, re.M)) == 2
    assert re.search(r"^runs/tiny/dataset\.lock\t.*\tupdate pending$", summary, re.M)
    assert mixed.changed(before) == NOTHING and states_of(mixed) == states


def states_of(project: Project) -> set[Path]:
    """Return files of builds, ours and Snakemake's, but for the memo and logs."""
    folders = (project / name for name in (".latentmake", ".snakemake"))
    found = {path for folder in folders for path in folder.rglob("*") if path.is_file()}
    return {path for path in found if not {"log", "iocache"} & {*path.parts}}


def test_status_prints_every_stale_target_with_its_reason(mixed: Project) -> None:
    before = mixed.snapshot()
    output = mixed.ask("status", "tiny", "--verbose").output
    said = set(re.findall(r"^([a-z ]+?) +(cache/\S+)$", output, re.MULTILINE))
    expected = {("damaged", name) for name in mixed.latents("cat", resolutions=(32,))}
    expected |= {("edited", name) for name in mixed.latents("ant")}
    expected |= {("new", name) for name in mixed.latents("new") | mixed.texts("new")}
    expected |= {("orphaned", name) for name in mixed.latents("bee") | mixed.texts("bee")}
    expected |= {
        ("changed recipe", name) for name in mixed.texts("ant", "cat", "dog", "eel", "fox")
    }
    assert said == expected
    assert "tiny: 7 targets fresh, 11 stale" in output
    (status,) = json.loads(mixed.ask("status", "tiny", "--json").output)
    assert {(each["reason"], each["path"]) for each in status["files"]} == expected
    rows = {row["kind"]: row for row in status["rows"]}
    planned = mixed.run("-n", "caches_tiny").table()
    for kind, counts in planned.items():
        row = rows[kind[1]]
        found = {"fresh": row["fresh"], "orphaned": row["orphans"], **row["stale"]}
        assert found == {name: count for name, count in counts.items() if count or name in found}
    for kind, folder in (("latents 16", "16"), ("latents 32", "32"), ("text", "text")):
        there = [*(mixed / "cache/shapes/micro" / folder).iterdir()]
        inodes = {path.stat().st_ino: path.stat().st_size for path in there}
        assert (rows[kind]["files"], rows[kind]["bytes"]) == (len(there), sum(inodes.values()))
        assert rows[kind]["rest_bytes"] > 0 and rows[kind]["rest_seconds"] > 0
    short = mixed.ask("status").output
    assert "cache/shapes" not in short and "files are not fresh; --verbose" in short
    assert mixed.changed(before) == NOTHING


def test_a_process_that_snakemake_starts_never_plans(built: Project) -> None:
    """It carries out the order that lies on disk, even if the data would now give another plan."""
    (name,) = built.texts("ant")
    (built / name).unlink()
    plan = built.plan("caches_tiny")
    (rule,) = json.loads((built / plan).read_text())["jobs"]
    shutil.rmtree(built / "data/shapes")
    for stem, caption in world.CAPTIONS.items():
        world.draw(built / f"data/shapes/{stem}.png", 99)
        (built / f"data/shapes/{stem}.txt").write_text(f"{caption} of another kind")
    memo = (built / ".latentmake/memo.sqlite").read_bytes()
    orders = sorted(path.name for path in (built / ".latentmake").rglob("*.json"))
    before = built.snapshot()
    arguments = ["--mode", "subprocess", "--nolock", "--target-jobs", f"{rule}:"]
    result = built.run(*arguments, **{VARIABLE: plan})
    assert result.tables == 0
    assert built.changed(before) == NOTHING._replace(added={name})
    assert (built / ".latentmake/memo.sqlite").read_bytes() == memo
    after = {path.name for path in (built / ".latentmake").rglob("*.json")}
    assert {each for each in after if not each.endswith("receipt.json")} == {
        each for each in orders if not each.endswith("receipt.json")
    }
