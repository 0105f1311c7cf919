"""A list is confirmed as it was shown; what the configuration names again since stays."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from latentmake.config import parse
from latentmake.config.command import Options
from latentmake.errors import ConfigError, StorageError
from latentmake.files.cachefile import serialize, stamp
from latentmake.index.memo import Memo
from latentmake.plan.facts import Facts
from latentmake.plan.owners import OWNER, claim
from latentmake.plan.prune_job import prune
from latentmake.plan.prune_order import PruneOrder, plan_prune, prunable

Order = Callable[..., PruneOrder]


@pytest.fixture
def order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Order:
    """Return a function for the order of a pruning, with caches of two resolutions."""
    monkeypatch.chdir(tmp_path)
    # A larger disk is a link in the place of the whole folder.
    Path("disk").mkdir()
    Path("cache").symlink_to("disk")
    meta = stamp(key="k" * 64, source="s" * 64, recipe={"a": 1})
    for place in ("64", "96"):
        path = Path(f"cache/cats/tiny/{place}/a.latents.safetensors")
        path.parent.mkdir(parents=True)
        path.write_bytes(serialize({"latents": torch.ones(1)}, meta))

    def make(*resolutions: int, confirm: bool = False, dataset: str = "cats") -> PruneOrder:
        values = {
            "datasets": {"cats": {"path": "data"}},
            "models": {"tiny": {"vae": "vae", "text": "text"}},
            "runs": {"first": {"datasets": "cats", "model": "tiny", "resolutions": resolutions}},
        }
        options = Options(confirm=confirm)
        with Memo(None) as memo:
            facts = Facts(parse(values), memo, encoders=False, options=options)
            (pruning,) = plan_prune(facts, [f"prune_{dataset}"], {})
        return pruning.order

    return make


def test_the_note_of_a_shared_folders_owner_goes_with_the_last_caches(order: Order) -> None:
    claim(["cats"])
    note = Path("cache/cats", OWNER)
    for wanted in (order(64), order(64).model_copy(update={"folders": {}, "layouts": {}})):
        assert note.exists()
        assert OWNER not in prune(wanted, print)
        prune(wanted.model_copy(update={"confirm": True}), print)
    assert not note.parent.exists()


def test_another_projects_caches_are_refused(
    order: Order, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim(["cats"])
    guest = tmp_path / "guest"
    guest.mkdir()
    (guest / "cache").symlink_to(tmp_path / "disk")
    monkeypatch.chdir(guest)
    with pytest.raises(ConfigError, match=f"^cache/cats: the project {tmp_path} uses this folder"):
        order(64)


def test_what_is_named_again_stays_and_the_list_is_spent(order: Order) -> None:
    said: list[str] = []
    assert "no run needs 96 of it" in prune(order(64), said.append)
    assert "left: .latentmake/store: a run's recipe is not known" in prune(order(64), said.append)
    prune(order(64, 96, confirm=True), said.append)
    assert said == ["pruned cats: removed 0 files, 0.0 kB; 1 left: gone or named again"]
    assert Path("cache/cats/tiny/96/a.latents.safetensors").exists()
    with pytest.raises(StorageError, match="nothing was listed for removal; look at the list"):
        prune(order(64, confirm=True), said.append)


def test_a_folder_of_caches_that_is_a_link_as_a_whole_is_pruned(order: Order) -> None:
    said: list[str] = []
    prune(order(64), said.append)
    prune(order(64, confirm=True), said.append)
    assert said[-1].startswith("pruned cats: removed 1 file, ")
    assert not Path("cache/cats/tiny/96").exists()
    assert Path("cache/cats/tiny/64/a.latents.safetensors").exists()


def test_a_file_that_cannot_be_removed_stops_the_removal_of_no_other(order: Order) -> None:
    said: list[str] = []
    locked, free = (Path(f"disk/cats/tiny/{place}") for place in ("64", "96"))
    prune(order(32), said.append)
    if subprocess.run(["mount", "--bind", locked, locked], capture_output=True).returncode:
        pytest.skip("mounting needs the rights of root")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", locked], check=True)
        with pytest.raises(StorageError, match="cannot be removed"):
            prune(order(32, confirm=True), said.append)
    finally:
        subprocess.run(["umount", locked], check=True)
    assert "removed 1 file, " in said[-1] and said[-1].endswith("1 left: could not be removed")
    assert list(locked.iterdir()) and not free.exists()
    prune(order(32, confirm=True), said.append)  # the list is good for what is left
    assert not locked.exists()


def test_pruning_is_a_command_of_its_own(order: Order) -> None:
    with Memo(None) as memo:
        facts = Facts(parse(ORDINARY), memo)
        assert prunable(facts.config) == ["cats", "dogs"]
        with pytest.raises(ConfigError, match="prune_cats: cannot be given together with all"):
            plan_prune(facts, ["prune_cats", "all"], {})


ORDINARY = {
    "datasets": {"dogs": {"path": "data"}},
    "models": {"tiny": {"vae": "vae", "text": "text"}},
    "runs": {"first": {"datasets": "dogs", "model": "tiny", "resolutions": [64]}},
}
