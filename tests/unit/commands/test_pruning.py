"""Files that the configuration does not name are found and removed, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from latentmake.base.atomic import replacing
from latentmake.base.errors import ConfigError, StorageError
from latentmake.base.workspace import OWNER, claim
from latentmake.commands.prune import Files, Groups, all_files, find, freed, prunable, remove
from latentmake.config.root import parse
from latentmake.data.memo import Memo
from latentmake.formats.cachefile import serialize, stamp
from latentmake.plan.facts import Facts

Find = Callable[..., Groups]


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Find:
    """Return a function for what may be pruned of caches of two resolutions."""
    monkeypatch.chdir(tmp_path)
    # A larger disk is a link in the place of the whole folder.
    Path("disk").mkdir()
    Path("cache").symlink_to("disk")
    meta = stamp(key="k" * 64, source="s" * 64, recipe={"a": 1})
    for place in ("64", "96"):
        path = Path(f"cache/cats/tiny/{place}/a.latents.safetensors")
        path.parent.mkdir(parents=True)
        path.write_bytes(serialize({"latents": torch.ones(1)}, meta))

    def make(*resolutions: int, model: str = "tiny") -> Groups:
        values = {
            "datasets": {"cats": {"path": "data"}, "dogs": {"path": "data"}},
            "models": {model: {"vae": "vae", "text": "text"}},
            "runs": {"first": {"datasets": "cats", "model": model, "resolutions": resolutions}},
        }
        with Memo(None) as memo:
            facts = Facts(parse(values), memo, encoders=False)
            assert prunable(facts) == ["cats", "dogs"]
            return find(facts, "cats")

    return make


def files(groups: Groups) -> Files:
    return all_files(groups.values())


def test_a_resolution_that_no_run_needs_is_removed_behind_a_link_of_the_whole_folder(
    found: Find,
) -> None:
    groups = found(64)
    (why,) = groups
    assert why == ("cache/cats/tiny/96", "no run needs 96 of it")
    remove(files(groups))
    assert not Path("cache/cats/tiny/96").exists() and not found(64)
    assert Path("cache/cats/tiny/64/a.latents.safetensors").exists()


def test_names_of_one_file_free_its_bytes_once_and_together(found: Find) -> None:
    path = Path("cache/cats/tiny/96/a.latents.safetensors")
    path.with_name("b.latents.safetensors").hardlink_to(path)
    path.with_name("c").hardlink_to(path)
    size = path.stat().st_size
    assert freed(files(found(64))) == size
    Path("other").hardlink_to(path)
    assert len(files(found(64))) == 3 and freed(files(found(64))) == 0


@pytest.mark.parametrize("place", ["64", "96", "64/sub", "../.kept/tiny/64"])
def test_what_a_killed_job_left_half_written_is_listed_wherever_it_lies(
    found: Find, place: str
) -> None:
    folder = Path("cache/cats/tiny", place)
    folder.mkdir(parents=True, exist_ok=True)
    with pytest.raises(KeyboardInterrupt), replacing(folder / "a.latents.safetensors") as half:
        raise KeyboardInterrupt
    half.write_bytes(b"half")  # as SIGKILL leaves it
    groups = found(64, 96)
    assert {Path(path).name for path in files(groups)} == {half.name}
    remove(files(groups))
    assert not half.exists()


def test_nothing_behind_a_link_is_listed(found: Find) -> None:
    Path("cache/cats/tiny/96").rename("elsewhere")
    Path("cache/cats/tiny/96").symlink_to(Path("elsewhere").resolve())
    assert found(64) == {}


def test_our_note_of_the_owner_stays_while_a_run_has_the_dataset(found: Find) -> None:
    claim(["cats"])
    remove(files(found(64, model="other")))
    assert Path("cache/cats", OWNER).exists()


def test_another_projects_caches_are_refused(
    found: Find, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim(["cats"])
    guest = tmp_path / "guest"
    guest.mkdir()
    (guest / "cache").symlink_to(tmp_path / "disk")
    monkeypatch.chdir(guest)
    with pytest.raises(ConfigError, match=f"^cache/cats: the project {tmp_path} uses this folder"):
        found(64)


@pytest.mark.parametrize("place", ["cache/cats/tiny/96", "cache/cats"])
def test_a_folder_that_cannot_be_read_is_named(
    found: Find,
    permitted: Callable[[str, int], AbstractContextManager[None]],
    place: str,
) -> None:
    with permitted(place, 0), pytest.raises(StorageError, match=rf"^{place}: cannot be read"):
        found(64)
