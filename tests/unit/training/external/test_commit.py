"""The commit of a trainer is compared with the proven one; another one is never an error."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from latentmake.training.backend import failed
from latentmake.training.external.installation import PROVEN
from latentmake.training.external.musubi.backend import Musubi
from musubi_world import make_run, stand_in


def git(folder: Path, *words: str) -> str:
    names = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    command = ["git", "-C", str(folder), *names, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository at the commit that is proven."""
    monkeypatch.chdir(tmp_path)
    folder = stand_in(tmp_path / "musubi-tuner")
    (folder / ".gitignore").write_text("venv\n")
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "first")
    head = git(folder, "rev-parse", "HEAD")
    monkeypatch.setitem(PROVEN, "musubi_tuner", head[:7])
    return folder


def checked(folder: Path) -> tuple[str, str]:
    """Return verdict and note of the checklist's line, beside which nothing has failed."""
    findings = [*Musubi().preflight(make_run(Path.cwd(), tuner=folder))]
    assert not failed(findings)
    ((verdict, note),) = [each[1:] for each in findings if each.what == "commit"]
    return verdict, note


def test_another_commit_than_the_proven_one_is_a_warning(clone: Path) -> None:
    first, head = PROVEN["musubi_tuner"], git(clone, "rev-parse", "HEAD")
    assert checked(clone) == ("ok", f"commit {head[:12]} (proven)")
    script = clone / "wan_train_network.py"
    script.write_text(f"{script.read_text()}\n")
    verdict, note = checked(clone)
    assert (verdict, note.partition(" with ")[2]) == ("warning", "local changes (proven)")
    git(clone, "commit", "--quiet", "--all", "--message", "second")
    verdict, note = checked(clone)
    assert verdict == "warning" and note.endswith(f"(not proven; {first} is)")
    (clone / ".git").rename(clone / "no-git")
    verdict, note = checked(clone)
    assert verdict == "warning" and note.startswith("no git repository")


def test_planning_does_not_run_git(clone: Path) -> None:
    order = make_run(Path.cwd(), tuner=clone)
    assert "commit" not in [each.what for each in Musubi().preflight(order, quick=True)]
