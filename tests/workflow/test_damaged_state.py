"""Damaged files of state are named in a line and made anew; caches and trainings stay."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from latentmake.session import Session
from project import NOTHING, Counts, Project

KINDS = (
    "runs/tiny/dataset.lock",
    "runs/tiny/manifest.jsonl",
    "runs/tiny/training.json",
    "runs/tiny/trained.json",
    "runs/tiny/samples/index.json",
    "runs/tiny/checkpoints/*/progress.json",
    ".latentmake/orders/*.receipt.json",
    ".latentmake/orders/*.items.json",
    ".latentmake/runs/plan.*.json",
    ".latentmake/runs/*.train.json",
    ".latentmake/memo.sqlite",
)
"""Files that builds write for later ones; the first that fits stands for all."""

COMMANDS = ("status", "explain tiny", "check tiny", "report tiny", "compare tiny", "verify")
FOLDER = b"a folder in its place"


def damaged(data: bytes) -> Iterator[bytes]:
    """Yield damaged contents of a file: cut, of no JSON, and of other types."""
    yield from (b"", data[: len(data) // 2], b"\xff\xfe" + data, bytes(len(data)), b"[" * 10**5)
    yield from (b"[]", b"7", b"{}", FOLDER)
    with contextlib.suppress(ValueError, TypeError):  # no JSON, or a list
        keys = json.loads(data)
        for value in ([], {"a": [None]}, "x", 10**400, -1):
            yield json.dumps(dict.fromkeys(keys, value)).encode()


def write(path: Path, content: bytes) -> None:
    """Write a file, or make a folder in its place."""
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)
    if content == FOLDER:
        path.mkdir()
    else:
        path.write_bytes(content)


def plan(project: Project) -> None:
    with contextlib.chdir(project.folder), contextlib.suppress(SystemExit):
        Session(project.config, targets=["train_tiny"], main=True, read_only=True)


def test_no_damage_of_a_file_of_state_ends_in_a_traceback(trained: Project) -> None:
    failed = list[str]()
    for kind in KINDS:
        path = min(trained.folder.glob(kind))
        data = path.read_bytes()
        for number, content in enumerate(damaged(data)):
            write(path, content)
            try:
                plan(trained)
                for command in COMMANDS if number == 9 else COMMANDS[:1]:
                    done = trained.ask(*command.split(), check=False)
                    assert done.returncode in (0, 1, 2), done.output
            except Exception as error:
                failed.append(f"{kind}: {content[:200]!r}: {error!r}")
        write(path, data)
    assert not failed, "\n".join(failed)


def test_damaged_files_of_state_are_made_anew_and_nothing_is_encoded_or_trained_again(
    trained: Project,
) -> None:
    before, weights = trained.snapshot(), trained / "runs/tiny/pytorch_lora_weights.safetensors"
    trained_at, digest = weights.stat().st_mtime_ns, trained.lock()["digest"]
    kinds = [each for each in KINDS if each != "runs/tiny/trained.json"]  # has the record as well
    for path in (path for kind in kinds for path in trained.folder.glob(kind)):
        write(path, b'{"digest": [], "aside": []}')
    result = trained.run("train_tiny")
    for name in ("dataset.lock", "training.json"):
        result.one_line(f"note: runs/tiny/{name} is damaged (", "; Latentmake makes it anew")
    result.one_line("note: .latentmake/memo.sqlite is damaged (file is not a database)")
    result.one_line("tiny: already trained on exactly this")
    assert result.encoded() == Counts() and trained.changed(before) == NOTHING
    assert weights.stat().st_mtime_ns == trained_at and trained.lock()["digest"] == digest
    result = trained.run("train_tiny")
    assert result.idle and "is damaged" not in result.output
