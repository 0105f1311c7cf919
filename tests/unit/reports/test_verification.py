"""Verification and repair: what is found, what is deleted, and what is left."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import verify_world
import world
import yaml
from latentmake import digest
from latentmake.errors import CacheError, StorageError
from latentmake.files import cachefile
from latentmake.files.safetensors import read_head
from latentmake.index.memo import Memo
from latentmake.plan import spool, store
from latentmake.plan.planner import make_plan
from latentmake.reports.verification import report_path, verify
from latentmake.reports.verify_order import plan_verify
from safetensors.torch import load_file

ITEMS = 4


class Caches:
    """A project with all caches, and its verification."""

    def __init__(self, folder: Path) -> None:
        self.files = verify_world.build(folder)
        self.values = yaml.safe_load((folder / "config/config.yaml").read_text())
        self.said: list[str] = []

    def __getitem__(self, number: int) -> Path:
        return Path(self.files[number].path)

    def verified(self, *, repair: bool = False, fails: bool = True) -> Any:
        """Return path -> (kind, what was done) of a verification."""
        with Memo(Path(".latentmake/memo.sqlite")) as memo:
            facts = verify_world.facts_of(self.values, memo, repair=repair)
            plan = make_plan(facts, ["tiny"]).runs["tiny"]
            order = plan_verify(facts, plan, facts.config.runs["tiny"])
        if fails:
            with pytest.raises(CacheError):
                verify(order, 2, self.said.append)
        else:
            verify(order, 2, self.said.append)
        found = json.loads(report_path("tiny").read_bytes())["findings"]
        return {each["path"]: (each["kind"], each["done"]) for each in found}

    def stale(self) -> dict[str, str]:
        """Return path -> reason of what the next build makes."""
        with Memo(Path(".latentmake/memo.sqlite")) as memo:
            plan = make_plan(verify_world.facts_of(self.values, memo), ["tiny"]).runs["tiny"]
        return {each.path: each.reason for part in plan.parts.values() for each in part.stale}


@pytest.fixture
def caches(micro: Path, tmp_path: Path) -> Iterator[Caches]:
    (tmp_path / "config").mkdir()
    (tmp_path / "models").mkdir()
    (tmp_path / "models/micro").symlink_to(micro)
    (tmp_path / "config/config.yaml").write_text(yaml.safe_dump(world.config()))
    verify_world.put_items(tmp_path / "data/shapes", ITEMS)
    with verify_world.inside(tmp_path):
        made = Caches(tmp_path)
        assert made.stale() == {}
        yield made


def write_without_checksum(path: str, **change: str) -> None:
    """Write a file again as releases before did, with a part of its stamp changed."""
    kept = {name: text for name, text in read_head(path).metadata.items() if "sum" not in name}
    kept |= {getattr(cachefile, name): text for name, text in change.items()}
    Path(path).write_bytes(cachefile.serialize(load_file(path), kept))


def test_a_whole_cache_has_no_findings(caches: Caches) -> None:
    assert caches.verified(fails=False) == {}
    assert caches.said[-1] == "0 wrong, 0 repaired"


def test_every_name_of_a_damaged_file_is_damaged(caches: Caches) -> None:
    """Wherever it lies: the next build would link to it."""
    key = caches.files[0].key
    other = Path("cache/other/micro/16/x.latents.safetensors")
    places = [other, store.stored(key), spool.spooled(key)]
    for place in places:
        place.parent.mkdir(parents=True, exist_ok=True)
        os.link(caches[0], place)
    verify_world.flip_a_bit(caches[0])
    wanted = {str(path): ("damaged", "") for path in (caches[0], *places)}
    assert caches.verified() == wanted
    assert caches.stale() == {}  # nothing tells a plan
    assert {done for _, done in caches.verified(repair=True, fails=False).values()} == {"deleted"}
    assert not any(path.exists() for path in (caches[0], *places))
    assert caches.stale() == {str(caches[0]): "new"}


def test_files_of_the_store_are_what_their_names_say(caches: Caches) -> None:
    store.STORE.mkdir(parents=True)
    sound, wrong = store.stored(caches.files[0].key), store.stored(caches.files[1].key)
    for path in (sound, wrong):
        path.write_bytes(caches[0].read_bytes())
    assert caches.verified(repair=True, fails=False) == {str(wrong): ("damaged", "deleted")}
    assert sound.exists() and not wrong.exists()


def test_what_is_no_file_of_a_key_stays_in_store_and_spool(caches: Caches) -> None:
    outside = Path("outside")
    outside.mkdir()
    mine = [outside / "mine.safetensors", store.STORE / "notes.txt", spool.SPOOL / "deep/more.txt"]
    for path in mine:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("precious")
    for folder in (store.STORE, spool.SPOOL):
        (folder / "link").symlink_to(outside.absolute())
    key = store.stored("a" * 64)
    key.symlink_to(mine[0].absolute())
    found = caches.verified(repair=True, fails=False)
    assert found == {str(mine[1]): ("foreign", ""), str(key): ("damaged", "deleted")}
    assert all(path.read_text() == "precious" for path in mine)
    assert not key.is_symlink() and (spool.SPOOL / "link").is_symlink()


def test_files_under_each_others_names_are_not_encoded_again(caches: Caches) -> None:
    before = [path.read_bytes() for path in (caches[0], caches[1])]
    verify_world.swap(caches[0], caches[1])
    found = caches.verified(repair=True, fails=False)
    assert set(found.values()) == {("other item", "kept in the store")}
    kept = [store.stored(each.key).read_bytes() for each in caches.files[:2]]
    assert kept == before
    assert caches.stale() == dict.fromkeys(map(str, (caches[0], caches[1])), "at hand")


def test_a_file_linked_to_another_items_name_is_named_there_alone(caches: Caches) -> None:
    caches[1].unlink()
    os.link(caches[0], caches[1])
    found = caches.verified(repair=True, fails=False)
    assert found == {str(caches[1]): ("other item", "kept in the store")}
    assert caches[0].exists() and caches.stale() == {str(caches[1]): "new"}


def test_a_swapped_file_that_is_damaged_too_is_not_kept(caches: Caches) -> None:
    verify_world.swap(caches[0], caches[1])
    verify_world.put_nan(caches[0])
    found = caches.verified(repair=True, fails=False)
    assert found[str(caches[0])] == ("damaged", "deleted")
    assert found[str(caches[1])] == ("other item", "kept in the store")
    assert not store.stored(caches.files[1].key).exists()


def test_foreign_files_are_named_and_left(caches: Caches) -> None:
    folder = caches[0].parent
    foreign = [folder / "notes.txt", folder / "item0000.npz", folder.parent / "Thumbs.db"]
    foreign.append(folder / "nobody.latents.safetensors")  # our ending, but no header
    foreign.append(folder / os.fsdecode(b"caf\xe9.txt"))  # no UTF-8
    foreign.append(folder / "two\nlines.txt")
    for path in foreign:
        path.write_bytes(b"something else")
    foreign.append(folder / os.fsdecode(b"caf\xe9.latents.safetensors"))  # no build writes such
    foreign[-1].write_bytes(caches[0].read_bytes())
    found = caches.verified(repair=True, fails=False)
    assert found == {str(path): ("foreign", "") for path in foreign}
    assert all(path.exists() for path in foreign) and caches.stale() == {}


def test_a_foreign_file_in_a_targets_place_is_left_to_the_build(caches: Caches) -> None:
    verify_world.put_foreign(caches[0])
    assert caches.verified(repair=True) == {str(caches[0]): ("foreign", "")}
    assert caches.stale() == {str(caches[0]): "damaged"}


@pytest.mark.parametrize(
    "data", [b"", b"\x05", (20).to_bytes(8, "little") + b"{no JSON at all....}"]
)
def test_a_file_whose_header_cannot_be_read_is_damaged(caches: Caches, data: bytes) -> None:
    caches[0].write_bytes(data)
    assert caches.verified(repair=True, fails=False) == {str(caches[0]): ("damaged", "deleted")}
    assert caches.stale() == {str(caches[0]): "new"}


def test_links_are_deleted_and_what_they_lead_to_is_not(caches: Caches) -> None:
    away = Path("away.safetensors")
    caches[0].rename(away)
    caches[0].symlink_to(away.resolve())
    verify_world.flip_a_bit(away)
    caches[1].unlink()
    caches[1].symlink_to("nowhere")
    found = caches.verified(repair=True, fails=False)
    assert found == dict.fromkeys(map(str, (caches[0], caches[1])), ("damaged", "deleted"))
    assert away.exists() and not caches[0].is_symlink() and not caches[1].is_symlink()


def test_a_source_that_is_gone_leaves_orphans(caches: Caches) -> None:
    for path in Path("data/shapes").glob("item0000.*"):
        path.unlink()
    found = caches.verified(repair=True, fails=False)
    assert found == {each.path: ("orphan", "") for each in caches.files if each.stem == "item0000"}
    assert caches[0].exists()


def test_a_damaged_orphan_does_not_come_into_the_store(caches: Caches) -> None:
    for path in Path("data/shapes").glob("item0000.*"):
        path.unlink()
    verify_world.flip_a_bit(caches[0])
    assert caches.verified(repair=True, fails=False)[str(caches[0])] == ("damaged", "deleted")


def test_an_edited_source_is_told_from_another_item(caches: Caches) -> None:
    text = next(each for each in caches.files if each.part == "text")
    Path(text.source).write_text("another caption")
    assert caches.verified(repair=True, fails=False) == {
        text.path: ("other source", "kept in the store")
    }
    Path(text.source).write_text(f"caption {int(text.stem[-4:])}")
    assert caches.stale() == {text.path: "at hand"}


def test_another_recipe_is_named_with_old_and_new(caches: Caches) -> None:
    caches.values["models"]["micro"]["vae_dtype"] = "bfloat16"
    found = caches.verified()
    latents = {each.path for each in caches.files if each.part != "text"}
    assert found == dict.fromkeys(latents, ("other recipe", ""))
    assert any("float32 -> bfloat16" in line for line in caches.said)


def test_a_header_without_checksum_whose_key_and_source_do_not_fit_is_edited(
    caches: Caches,
) -> None:
    each, other = caches.files[:2]
    write_without_checksum(each.path, SOURCE=other.content)
    assert caches.verified(repair=True, fails=False) == {each.path: ("edited header", "deleted")}


def test_findings_are_said_where_they_cannot_be_written(caches: Caches) -> None:
    verify_world.flip_a_bit(caches[0])
    Path("reports").write_text("no folder")
    with pytest.raises(StorageError, match="a file lies where a folder belongs"):
        caches.verified(repair=True, fails=False)
    assert f"{caches[0]}: damaged: checksum differs; deleted" in caches.said


def test_missing_files_are_counted_and_nothing_wrong(caches: Caches) -> None:
    caches[0].unlink()
    assert caches.verified(fails=False) == {}
    assert "1 missing: the next build makes them" in caches.said
    assert json.loads(report_path("tiny").read_bytes())["missing"] == [str(caches[0])]


def test_a_cache_that_cannot_be_written_is_verified_and_repaired_by_nothing(
    caches: Caches,
) -> None:
    verify_world.flip_a_bit(caches[0])
    if subprocess.run(["mount", "--bind", "cache", "cache"], capture_output=True).returncode:
        pytest.skip("mounting needs the rights of root")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", "cache"], check=True)
        found = caches.verified(repair=True)
    finally:
        subprocess.run(["umount", "cache"], check=True)
    done = "cannot be deleted (the file system is read-only)"
    assert found == {str(caches[0]): ("damaged", done)}


@pytest.mark.parametrize(
    ("number", "found"),
    [
        (0.0, ("damaged", "deleted")),
        (float("nan"), ("damaged", "deleted")),
        (2.5, ("odd", "")),
    ],
)
def test_values_are_looked_at_where_checksums_hold(
    caches: Caches, number: float, found: tuple[str, str]
) -> None:
    each = caches.files[0]
    with Memo(None) as memo:
        tensors = {"latents": torch.full((4, 2, 2), number)}
        verify_world.write_cache(verify_world.facts_of(caches.values, memo), each, tensors=tensors)
    assert caches.verified(repair=True, fails=False) == {each.path: found}


def test_a_file_without_checksum_is_compared_as_far_as_can_be(caches: Caches) -> None:
    """As releases before wrote them."""
    each = caches.files[0]
    write_without_checksum(each.path)
    assert caches.verified(fails=False) == {}
    assert any(line.startswith("1 without a checksum") for line in caches.said)
    verify_world.put_nan(caches[0])
    assert caches.verified() == {each.path: ("damaged", "")}


def trained(**files: str) -> Path:
    """Write trained weights and the record of their training."""
    weights = Path("runs/tiny/unet/weights.safetensors")
    weights.parent.mkdir(parents=True, exist_ok=True)
    weights.write_bytes(b"trained weights")
    record = {"wanted": {}, "steps": 3, "files": files}
    Path("runs/tiny/training.json").write_text(json.dumps(record))
    return weights


def test_trained_weights_that_changed_are_named_and_never_deleted(caches: Caches) -> None:
    weights = trained(**{"unet/weights.safetensors": digest.of_bytes(b"trained weights")})
    assert caches.verified(fails=False) == {}
    assert caches.said[-1] == "0 wrong, 0 repaired"
    verify_world.flip_a_bit(weights)
    changed = weights.read_bytes()
    for repair in (False, True):
        caches.said.clear()
        assert caches.verified(repair=repair) == {str(weights): ("damaged weights", "")}
        (line,) = (line for line in caches.said if line.startswith(str(weights)))
        assert "changed since they were trained" in line
        assert "delete runs/tiny/training.json and run `snakemake train_tiny`" in line
        assert weights.read_bytes() == changed
    weights.unlink()  # the next training makes it
    assert caches.verified(fails=False) == {}
    # Records of earlier releases have no digests.
    trained()
    assert caches.verified(fails=False) == {}


def test_a_second_name_of_damaged_weights_is_named_too(caches: Caches) -> None:
    """The trainer's own output is linked to the result, and would be taken again."""
    weights = trained(**{"unet/weights.safetensors": "0" * 64})
    other = Path("runs/tiny/output/tiny.safetensors")
    other.parent.mkdir()
    os.link(weights, other)
    caches.verified()
    assert any(f"delete {other} and runs/tiny/training.json" in line for line in caches.said)
