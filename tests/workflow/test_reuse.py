"""What has once been encoded under a key is not encoded again while its bytes are at hand."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import world
from project import NOTHING, Counts, Project


def rename(values: dict[str, Any], section: str, old: str, new: str) -> None:
    values[section][new] = values[section].pop(old)
    run = values["runs"]["tiny"]
    if section == "models":
        run["model"] = new
    else:
        run["datasets"] = [new]


def forget(project: Project) -> None:
    (project / ".latentmake/memo.sqlite").unlink()


def contents(project: Project, folder: str) -> dict[str, bytes]:
    root = project / folder
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def test_an_item_a_dataset_and_a_model_renamed_are_encoded_nowhere(built: Project) -> None:
    before, lock = built.snapshot(), built.lock()["parts"]["shapes/text"]
    for ending in ("png", "txt"):
        (built / f"data/shapes/cat.{ending}").rename(built / f"data/shapes/zebra.{ending}")
    result = built.run("caches_tiny")
    assert {row["reusable"] for row in result.table().values()} == {1}
    assert result.encoded() == Counts(linked=3)
    old = built.latents("cat") | built.texts("cat")
    new = built.latents("zebra") | built.texts("zebra")
    changes = built.changed(before)
    assert changes == NOTHING._replace(added=new, removed=old)
    for name in old:
        assert (before[name][0]) == built.snapshot()[name.replace("cat", "zebra")][0]
    assert built.lock()["parts"]["shapes/text"] != lock
    assert built.store() == []  # the key has a name in the cache
    assert built.run("caches_tiny").idle

    caches = contents(built, "cache/shapes/micro")
    for section, name, other in (("datasets", "shapes", "forms"), ("models", "micro", "small")):
        built.configure(lambda values, names=(section, name, other): rename(values, *names))
        forget(built)  # it only saves time
        result = built.run("caches_tiny")
        assert result.encoded() == Counts(linked=18)
    assert contents(built, "cache/forms/small") == caches
    assert contents(built, "cache/shapes/micro") == caches  # which nobody removes
    assert built.store() == []


def test_an_edit_undone_encodes_nothing_until_the_store_forgets_it(built: Project) -> None:
    caption = built / "data/shapes/cat.txt"
    before, text, lock = built.snapshot(), caption.read_text(), built.lock()
    caption.write_text("something else\n")
    assert built.run("caches_tiny").encoded() == Counts(encoded=1)
    assert [path.stat().st_nlink for path in built.store()] == [1]
    caption.write_text(text)
    undone = built.run("caches_tiny")
    assert undone.encoded() == Counts(spooled=1)
    assert [job for job in undone.jobs if job.startswith("encode")] == []
    assert built.changed(before) == NOTHING  # the very file of before, from the store
    assert built.lock() == lock
    for path in built.store():  # "something else"
        path.write_bytes(path.read_bytes()[:-9])
    caption.write_text("something else\n")
    assert built.run("caches_tiny").encoded() == Counts(encoded=1)
    shutil.rmtree(built / ".latentmake/store")
    caption.write_text(text)
    assert built.run("caches_tiny").encoded() == Counts(encoded=1)
    built.configure(lambda values: values.update(store={"keep": 0}))
    caption.write_text("something else\n")
    assert built.run("caches_tiny").encoded().encoded in (0, 1)
    assert built.store() == []
    assert "store: 0 B of 0 B used" in built.ask("status").output


def test_a_setting_taken_back_encodes_nothing_and_what_it_does_not_cut_stays(
    built: Project,
) -> None:
    world.draw(built / "data/shapes/ant.png", 7, (40, 40))  # a square among others
    world.draw(built / "data/shapes/bee.png", 8, (60, 30))
    built.run("caches_tiny")
    before = built.snapshot()

    def fit(value: str) -> None:
        settings = {"fit": value, "bucket_reso_steps": 8}
        built.configure(lambda values: values["datasets"]["shapes"].update(settings))

    fit("bucket")
    assert built.run("caches_tiny").encoded("latents").encoded > 0
    changes = built.changed(before)
    assert changes.content >= built.latents("bee", resolutions=(32,))
    assert not changes.content & built.latents("ant")
    bucketed = built.snapshot()
    for value, expected in (("crop", before), ("bucket", bucketed)):
        fit(value)
        assert built.run("caches_tiny").encoded().encoded == 0
        assert {name: each[0] for name, each in built.snapshot().items()} == {
            name: each[0] for name, each in expected.items()
        }


def test_an_item_that_returns_is_taken_from_the_store(built: Project, tmp_path: Path) -> None:
    before = built.snapshot()
    for ending in ("png", "txt"):
        shutil.copy(built / f"data/shapes/dog.{ending}", tmp_path / f"dog.{ending}")
        (built / f"data/shapes/dog.{ending}").unlink()
    built.run("caches_tiny")
    assert len(built.store()) == 3
    for ending in ("png", "txt"):
        shutil.copyfile(tmp_path / f"dog.{ending}", built / f"data/shapes/dog.{ending}")
    assert built.run("caches_tiny").encoded() == Counts(spooled=3)
    assert built.store() == []
    changes = built.changed(before)
    assert not changes.added | changes.removed | changes.content
