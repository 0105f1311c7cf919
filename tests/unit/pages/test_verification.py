"""Verification and repair: what is found, what is deleted, and what is left."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import verify_world
import world
import yaml
from latentmake.base import digest
from latentmake.base.digest import target_stat
from latentmake.data.memo import Memo
from latentmake.formats import cachefile
from latentmake.formats.safetensors import read_head
from latentmake.pages.verification import DAMAGED, EDITED, UNEXPECTED, Finding, verify
from latentmake.plan import store
from latentmake.plan.planner import make_plan
from safetensors.torch import load_file

ITEMS = 4


class Caches:
    """A project with all caches, and its verification."""

    def __init__(self, folder: Path) -> None:
        self.files = verify_world.build(folder)
        self.values = yaml.safe_load((folder / "config/config.yaml").read_text())

    def __getitem__(self, number: int) -> Path:
        return Path(self.files[number].path)

    def verify(self, *, repair: bool = False) -> tuple[list[Finding], list[str], dict[str, float]]:
        with Memo(Path(".latentmake/memo.sqlite")) as memo:
            facts = verify_world.facts_of(self.values, memo)
            return verify(facts, ["tiny"], repair=repair)

    def verified(self, *, repair: bool = False) -> dict[str, tuple[str, str]]:
        """Return path -> (verdict, what was done) of a verification."""
        findings, _, _ = self.verify(repair=repair)
        return {each.path: (each.verdict, each.done) for each in findings}

    def stale(self) -> dict[str, str]:
        """Return path -> reason of what the next build makes."""
        with Memo(Path(".latentmake/memo.sqlite")) as memo:
            plan = make_plan(verify_world.facts_of(self.values, memo), ["tiny"]).runs["tiny"]
        return {each.path: each.reason for part in plan.parts.values() for each in part.to_make}


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


def test_a_repair_deletes_each_name_from_which_a_build_would_link_the_damage(
    caches: Caches,
) -> None:
    key = caches.files[0].key
    other = Path("cache/other/micro/16/x.latents.safetensors")
    places = [other, store.stored(key)]
    for place in places:
        place.parent.mkdir(parents=True, exist_ok=True)
        os.link(caches[0], place)
    with Memo(Path(".latentmake/memo.sqlite")) as memo:
        memo.targets.learn(str(other), target_stat(other.stat()), key)
    verify_world.flip_a_bit(caches[0])
    assert caches.verified() == {str(caches[0]): (DAMAGED, "")}
    assert caches.stale() == {}  # nothing tells a plan
    assert caches.verified(repair=True) == {str(caches[0]): (DAMAGED, "deleted")}
    assert not any(path.exists() for path in (caches[0], *places))
    assert caches.stale() == {str(caches[0]): "new"}


@pytest.mark.parametrize("data", [b"", bytes(500), b"\x05" + bytes(7) + b"{latentmake.key"])
def test_a_file_whose_header_cannot_be_read_is_damaged(caches: Caches, data: bytes) -> None:
    caches[0].write_bytes(data)
    assert caches.verified(repair=True) == {str(caches[0]): (DAMAGED, "deleted")}
    assert caches.stale() == {str(caches[0]): "new"}


def test_links_are_deleted_and_what_they_lead_to_is_not(caches: Caches) -> None:
    away = Path("away.safetensors")
    caches[0].rename(away)
    caches[0].symlink_to(away.resolve())
    verify_world.flip_a_bit(away)
    caches[1].unlink()
    caches[1].symlink_to("nowhere")
    found = caches.verified(repair=True)
    assert found == dict.fromkeys(map(str, (caches[0], caches[1])), (DAMAGED, "deleted"))
    assert away.exists() and not caches[0].is_symlink() and not caches[1].is_symlink()


def test_a_file_of_an_edited_source_is_named_and_left_for_the_undone_edit(caches: Caches) -> None:
    text = next(each for each in caches.files if each.part == "text")
    Path(text.source).write_text("another caption")
    (finding,), _, figures = caches.verify(repair=True)
    assert (finding.path, finding.verdict, finding.done) == (text.path, EDITED, "")
    assert figures["repaired"] == 0
    assert finding.reason == f"it was not made of {text.source} as it is"
    Path(text.source).write_text(f"caption {int(Path(text.source).stem[-4:])}")
    assert caches.stale() == {} and caches.verified() == {}


def test_a_file_without_checksum_is_compared_as_far_as_can_be(caches: Caches) -> None:
    """As releases before wrote them."""
    each, other = caches.files[:2]
    write_without_checksum(each.path)
    assert caches.verified() == {}
    write_without_checksum(each.path, SOURCE=other.content)
    assert caches.verified() == {each.path: (UNEXPECTED, "")}
    write_without_checksum(each.path, SOURCE=each.content)
    verify_world.put_nan(caches[0])
    assert caches.verified() == {each.path: (DAMAGED, "")}


def test_missing_files_are_listed_and_are_no_finding(caches: Caches) -> None:
    caches[0].unlink()
    assert caches.verify(repair=True)[:2] == ([], [str(caches[0])])


def test_a_cache_that_cannot_be_written_is_verified_and_repaired_by_nothing(caches: Caches) -> None:
    verify_world.flip_a_bit(caches[0])
    if subprocess.run(["mount", "--bind", "cache", "cache"], capture_output=True).returncode:
        pytest.skip("mounting needs the rights of root")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", "cache"], check=True)
        (finding,), _, figures = caches.verify(repair=True)
    finally:
        subprocess.run(["umount", "cache"], check=True)
    assert finding.done == "cannot be deleted (the file system is read-only)"
    assert figures["repaired"] == 0


@pytest.mark.parametrize("number", [0.0, float("nan")])
def test_values_are_looked_at_where_checksums_hold(caches: Caches, number: float) -> None:
    each = caches.files[0]
    with Memo(None) as memo:
        tensors = {"latents": torch.full((4, 2, 2), number)}
        verify_world.write_cache(verify_world.facts_of(caches.values, memo), each, tensors=tensors)
    assert caches.verified(repair=True) == {each.path: (DAMAGED, "deleted")}


def trained(**files: str) -> Path:
    """Write trained weights and the record of their training."""
    weights = Path("runs/tiny/unet/weights.safetensors")
    weights.parent.mkdir(parents=True, exist_ok=True)
    weights.write_bytes(b"trained weights")
    record = {"parts": {}, "steps": 3, "seconds": 1, "files": files}
    Path("runs/tiny/training.json").write_text(json.dumps(record))
    return weights


def test_trained_weights_that_changed_are_named_and_never_deleted(caches: Caches) -> None:
    weights = trained(**{"unet/weights.safetensors": digest.of_bytes(b"trained weights")})
    assert caches.verified() == {}
    verify_world.flip_a_bit(weights)
    changed = weights.read_bytes()
    for repair in (False, True):
        (finding,), _, _ = caches.verify(repair=repair)
        assert (finding.path, finding.verdict, finding.done) == (str(weights), DAMAGED, "")
        assert "changed since they were trained" in finding.reason
        assert "delete runs/tiny/training.json and run `latentmake build tiny`" in finding.reason
        assert weights.read_bytes() == changed
    weights.unlink()  # the next training makes it
    assert caches.verified() == {}
    trained()  # records of earlier releases have no digests
    assert caches.verified() == {}


def test_a_second_name_of_damaged_weights_is_named_too(caches: Caches) -> None:
    """The trainer's own output is linked to the result, and would be taken again."""
    weights = trained(**{"unet/weights.safetensors": "0" * 64})
    other = Path("runs/tiny/output/tiny.safetensors")
    other.parent.mkdir()
    os.link(weights, other)
    (finding,), _, _ = caches.verify()
    assert f"delete {other} and runs/tiny/training.json" in finding.reason
