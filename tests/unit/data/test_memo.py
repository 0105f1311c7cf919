"""The memo forgets nothing that was saved, and nothing that happens to it stops a plan."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path

import pytest
from file_clock import await_another_time
from latentmake.base import digest
from latentmake.base.digest import SourceStat, TargetStat, source_stat, target_stat
from latentmake.data.memo import Memo
from latentmake.geometry.clips import Media

SOURCE = SourceStat(1, 2, 3, 4)
TARGET, TARGET_7 = TargetStat(5, 6, 7), TargetStat(7, 1, 1)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "sub" / "memo.sqlite"


def learn_something(memo: Memo) -> None:
    memo.sources.learn("data/a.png", SOURCE, "digest")
    memo.targets.learn("cache/a", TARGET, "key")
    memo.verdicts.learn("question", None, "answer")
    memo.receipts.learn("receipt", None, "")


def knows_something(memo: Memo) -> bool:
    known = [
        memo.sources.below("data") == {"data/a.png": (SOURCE, "digest")},
        memo.targets.below("cache") == {"cache/a": (TARGET, "key")},
        memo.verdicts.get("question") == "answer",
        {*memo.receipts.below("")} == {"receipt"},
    ]
    assert len(set(known)) == 1, known
    return known[0]


@pytest.mark.parametrize("saved", [False, True])
def test_what_was_learnt_is_known_the_next_time(place: Path, saved: bool) -> None:
    with Memo(place) as memo:
        assert not knows_something(memo)
        learn_something(memo)
        if saved:
            memo.save()
        assert knows_something(memo)
    with Memo(place) as memo:
        assert knows_something(memo)


def test_facts_of_a_memo_that_is_never_closed_are_saved_every_few_seconds(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("latentmake.data.memo._SECONDS", 0.0)
    learn_something(Memo(place))  # of a plan that is killed
    with Memo(place) as memo:
        assert knows_something(memo)


def test_a_memo_of_version_0_2_is_read(place: Path) -> None:
    place.parent.mkdir()
    database = sqlite3.connect(place)
    database.executescript(
        """
        CREATE TABLE facts (
            kind INT, name TEXT, size INT, mtime_ns INT, ctime_ns INT, inode INT, value TEXT,
            PRIMARY KEY (kind, name)
        ) WITHOUT ROWID;
        CREATE INDEX source_sizes ON facts (size) WHERE kind = 1;
        CREATE INDEX target_keys ON facts (value) WHERE kind = 2;
        CREATE TABLE entries (list INT, name TEXT, caption TEXT, tags TEXT,
            PRIMARY KEY (list, name)) WITHOUT ROWID;
        PRAGMA user_version = 7;
        INSERT INTO facts VALUES
            (1, 'data/a.png', 1, 2, 3, 4, 'digest'), (2, 'cache/a', 5, 6, NULL, 7, 'key'),
            (3, 'data/a.mp4', 1, 2, 3, 4, '[64, 48, 9, "1/24:1x9", 90]'),
            (3, 'data/old.png', 1, 2, 3, 4, '30 20 0'), -- of versions before 0.2.0
            (5, 'meta.json', 1, 2, 3, 4, '1 1'), (6, '1digest', NULL, 1, NULL, NULL, '60 40'),
            (7, 'question', NULL, 1, NULL, NULL, 'answer'),
            (9, 'receipt', NULL, 1, NULL, NULL, ''), (12, 'data/a.txt', 1, 2, 3, 4, 'a cat'),
            (10, 'latents of cats', NULL, 1, NULL, NULL, '[[1, 2], "s"]'), -- what others wrote
            (11, 'head', NULL, 1, NULL, NULL, 'of another form');
        INSERT INTO entries VALUES (1, 'a', 'a cat', NULL);
        """
    )
    database.close()
    with Memo(place) as memo:
        assert knows_something(memo)
        assert not memo.is_new
        # Nor does 0.2.0 read these of ours, so that a user may go back to it.
        assert memo.rates.get("latents of cats") is memo.snapshots.get("head") is None
        assert memo.texts.get("data/a.txt", SOURCE) == "a cat"
        video = Media(64, 48, 9, "1/24:1x9", 90)
        stats = dict.fromkeys(["data/a.mp4", "data/old.png"], SOURCE)
        assert memo.media(stats) == {"data/a.mp4": video}
        assert memo.media({"data/a.mp4": SOURCE._replace(inode=9)}) == {}
        assert memo.pictures(["digest"], upright=True) == {"digest": (60, 40)}
        assert [*memo.sources.where("size", [1])] == [("data/a.png", SOURCE, "digest")]
        assert [*memo.targets.where("value", ["key"])] == [("cache/a", TARGET, "key")]


def test_what_is_learnt_or_forgotten_is_known_before_it_is_saved() -> None:
    def everything(memo: Memo) -> list[object]:
        names = [f"data/{number}" for number in range(6)]
        return [
            memo.sources.below("data"),
            memo.sources.look_up(names),
            memo.sources.look_up([*names, *map(str, range(3000))]),
            sorted(memo.sources.where("size", [1, 2])),
            sorted(memo.targets.where("value", ["old", "new"])),
            {*memo.sources.below("")},
            [memo.sources.get(name) for name in names],
            memo.sources.get("data/1", SOURCE),
            memo.sources.get("data/1", SOURCE._replace(inode=9)),
            memo.snapshots.get("row"),
            [memo.pictures(["digest"], upright=each) for each in (True, False)],
            memo.media({"a.mp4": SOURCE}),
            memo.rates.get("latents tiny"),
        ]

    with Memo(None) as memo:
        for number in range(4):
            memo.sources.learn(f"data/{number}", SourceStat(number, 2, 3, 4), "old")
            memo.targets.learn(f"cache/{number}", TARGET, "old")
        memo.save()
        memo.sources.learn("data/1", SOURCE, "new")
        memo.targets.learn("cache/1", TARGET, "new")
        memo.targets.learn("cache/2", TARGET, "another")
        memo.targets.forget(["cache/3"])
        memo.sources.learn("data/2", SourceStat(7, 2, 3, 4), "another")
        memo.sources.forget(["data/3", "data/gone"])
        memo.sources.learn("data/4", SOURCE, "new")
        memo.snapshots.learn("row", None, b"bytes")
        memo.learn_picture("digest", 60, 40, True)
        memo.learn_media("a.mp4", SOURCE, Media(64, 48, 9, "1/24:1x9", 90))
        memo.rates.learn("latents tiny", None, "{}")
        before = everything(memo)
        memo.save()
        assert everything(memo) == before
    assert before[4] == [("cache/0", TARGET, "old"), ("cache/1", TARGET, "new")]
    assert before[5] == {"data/0", "data/1", "data/2", "data/4"}
    assert before[7:10] == ["new", None, b"bytes"]


def test_below_a_folder_is_what_a_path_says() -> None:
    names = {"a", "a/b", "a/b/c", "a.b/c", "a-/c", "a0", "a/\U0001f600", "ab/c", "b/a/c"}
    with Memo(None) as memo:
        for name in names:
            memo.sources.learn(name, SOURCE, name)
        for _ in range(2):
            for folder in ("a", "a/b", "a.b", "a-"):
                below = {name for name in names if name.startswith(f"{folder}/")}
                assert set(memo.sources.below(folder)) == below
            memo.save()


def test_a_file_of_known_stat_is_not_read_again(place: Path, tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    with Memo(place) as memo:
        memo.sources.learn(str(file), source_stat(file.stat()), "told before")
    with Memo(place) as memo:
        assert memo.digest_of_file(file) == "told before"


def test_a_fact_is_found_anew_once_one_of_its_files_changes(place: Path, tmp_path: Path) -> None:
    file, missing, found = tmp_path / "script.py", tmp_path / "missing", []

    def find() -> tuple[dict[str, int], list[Path]]:
        found.append(file)
        return {"found": len(found)}, [file, missing]

    def ask() -> object:
        with Memo(place) as memo:
            return memo.remembered(["sources", str(file)], find)

    file.write_bytes(b"one")
    assert ask() == ask() == {"found": 1}
    await_another_time(file)
    file.write_bytes(b"two")
    assert ask() == ask() == {"found": 2}
    missing.touch()
    assert ask() == {"found": 3}


def test_an_edit_with_the_old_size_and_mtime_is_noticed(place: Path, tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    stat = file.stat()
    with Memo(place) as memo:
        assert memo.digest_of_file(file) == digest.of_bytes(b"one")
    await_another_time(file)
    file.write_bytes(b"two")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with Memo(place) as memo:
        assert memo.digest_of_file(file) == digest.of_bytes(b"two")


def test_a_second_name_does_not_change_a_targets_stat_but_any_content_does(tmp_path: Path) -> None:
    file = tmp_path / "target"
    file.write_bytes(b"one")
    before = target_stat(file.stat())
    os.link(file, tmp_path / "second")
    assert target_stat(file.stat()) == before
    (tmp_path / "new").write_bytes(b"two")
    (tmp_path / "new").replace(file)
    assert target_stat(file.stat()) != before


def test_an_inode_of_64_bits_and_a_date_that_sqlite_has_no_room_for_stop_nothing(
    place: Path,
) -> None:
    full, late = SourceStat(1, -2, 3, (1 << 64) - 5), TargetStat(1, 1 << 63, 4)
    with Memo(place) as memo:
        memo.sources.learn("a.png", full, "x")
        memo.targets.learn("late", late, "y")
        memo.targets.learn("cut", TargetStat(2, 3, 1 << 63), "z")
    with Memo(place) as memo:
        assert memo.sources.get("a.png", full) == "x"
        assert memo.targets.get("cut", TargetStat(2, 3, 1 << 63)) == "z"
        assert memo.targets.get("late", late) is None and memo.targets.get("late") == "y"


@pytest.mark.parametrize("garbage", [b"", b"garbage" * 1000, b"SQLite format 3\0" + b"\xff" * 4000])
def test_an_empty_or_damaged_memo_is_replaced(place: Path, garbage: bytes) -> None:
    place.parent.mkdir()
    place.write_bytes(garbage)
    with Memo(place) as memo:
        learn_something(memo)
    with Memo(place) as memo:
        assert knows_something(memo)


def test_a_memo_of_another_version_is_replaced(place: Path) -> None:
    with Memo(place) as memo:
        learn_something(memo)
    database = sqlite3.connect(place)
    database.execute("PRAGMA user_version = 99")
    database.close()
    with Memo(place) as memo:
        assert not knows_something(memo)
        learn_something(memo)
    with Memo(place) as memo:
        assert knows_something(memo)


def test_the_fault_of_a_damaged_memo_is_printed_without_control_characters(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Memo(place):
        pass
    content = place.read_bytes()
    assert content.count(b"CREATE TABLE entries") == 1
    place.write_bytes(content.replace(b"CREATE TABLE entries", b"CREATE TABLE entri\x7fs"))
    with Memo(place) as memo:
        learn_something(memo)
    note = capsys.readouterr().err
    assert "is damaged" in note and note.rstrip("\n").isprintable()


@pytest.mark.parametrize("kept", [1, 50, 90])
def test_a_memo_damaged_inside_stops_nothing(place: Path, kept: int) -> None:
    with Memo(place) as memo:
        for number in range(2000):
            memo.sources.learn(f"data/{number}", SOURCE, "d" * 64)
        learn_something(memo)
    data = bytearray(place.read_bytes())
    start = max(len(data) * kept // 100, 4096)
    data[start:] = b"\xff" * (len(data) - start)
    place.write_bytes(data)
    with Memo(place) as memo:
        memo.sources.below("data")
        memo.targets.below("cache")
        memo.verdicts.get("question")
        {*memo.receipts.below("")}
        memo.digest_of_file(Path(__file__))
        learn_something(memo)


@pytest.mark.parametrize("lock", ["IMMEDIATE", "EXCLUSIVE"])
def test_a_memo_that_another_locks_is_left_as_it_is(place: Path, lock: str) -> None:
    with Memo(place) as memo:
        learn_something(memo)
    with contextlib.closing(sqlite3.connect(place, isolation_level=None)) as other:
        other.execute(f"BEGIN {lock}")
        with Memo(place) as memo:
            assert knows_something(memo) == (lock == "IMMEDIATE")  # may be read meanwhile
            memo.verdicts.learn("another", None, "answer")
            memo.save()
            assert memo.verdicts.get("another") == "answer"
    with Memo(place) as memo:
        assert knows_something(memo)
        assert memo.verdicts.get("another") is None


def test_a_memo_that_cannot_be_made_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way of a folder")
    (tmp_path / "memo.sqlite").mkdir()
    for place in (tmp_path / "file" / "memo.sqlite", tmp_path / "memo.sqlite"):
        with Memo(place) as memo:
            learn_something(memo)
            memo.save()
            assert knows_something(memo)


def test_old_verdicts_are_forgotten(place: Path) -> None:
    with Memo(place) as memo:
        learn_something(memo)
    with sqlite3.connect(place) as database:
        database.execute("UPDATE facts SET mtime_ns = mtime_ns - 91 * 24 * 3600 * 1000000000")
    with Memo(place) as memo:
        assert memo.verdicts.get("question") == "answer"
        memo.verdicts.learn("another", None, "answer")
    with Memo(place) as memo:
        assert memo.verdicts.get("question") is None
        assert memo.verdicts.get("another") == "answer"


def test_files_are_found_by_key_and_by_size_until_they_are_forgotten(place: Path) -> None:
    with Memo(place) as memo:
        assert memo.is_new and not memo.targets.any()
        for number in range(1200):  # more than one query takes
            memo.targets.learn(f"cache/a/b/{number}", TargetStat(number, 1, 1), f"key {number}")
        memo.targets.learn("cache/c/d/7", TARGET_7, "key 7")
        memo.sources.learn("data/7", SOURCE, "digest 7")
    with Memo(place) as memo:
        assert not memo.is_new
        assert memo.targets.any("cache/a") and not memo.targets.any("cache/a/c")
        assert len([*memo.targets.where("value", [f"key {n}" for n in range(2000)])]) == 1201
        memo.targets.forget(["cache/a/b/7", "cache/gone"])
        for _ in range(2):
            assert [*memo.targets.where("value", ["key 7"])] == [("cache/c/d/7", TARGET_7, "key 7")]
            memo.save()
        memo.targets.forget(["cache/c/d/7"])
        assert not memo.targets.any("cache/c") and memo.targets.any("cache/a")


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        ("UPDATE facts SET value = x'00ff' WHERE kind = 1", "a value of another type"),
        ("UPDATE facts SET value = CAST(x'fffe' AS TEXT) WHERE kind = 1", "UTF-8"),
        ("UPDATE facts SET value = '[' WHERE kind = 3", "for Media"),
        ("UPDATE facts SET value = '[1, {}]' WHERE kind = 3", "for Media"),
        ("UPDATE facts SET value = 'x y' WHERE kind = 6", "invalid literal"),
        ("ALTER TABLE facts RENAME COLUMN value TO other", "no such column"),
        ("DROP TABLE facts", "no such table"),
    ],
)
def test_a_damaged_row_or_table_is_named_and_the_memo_made_anew(
    place: Path, damage: str, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Memo(place) as memo:
        memo.sources.learn("a", SOURCE, "digest")
        memo.learn_media("a", SOURCE, Media(1, 2, 3))
        memo.learn_picture("digest", 4, 8, True)
        memo.remembered("question", lambda: ("fact", []))
    with contextlib.closing(sqlite3.connect(place)) as database, database:
        database.execute(damage)
    with Memo(place) as memo:
        for _ in range(2):
            memo.sources.get("a")
            memo.media({"a": SOURCE})
            memo.pictures(["digest"], upright=True)
        memo.sources.learn("a", SOURCE, "new")
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].startswith(f"note: {place} is damaged (") and fault in said[0]
    with Memo(place) as memo:
        assert memo.sources.get("a") == "new"


@pytest.mark.parametrize("value", ["", "x", "[]", '[{"a": 1}, 2]', "[" * 9999])
def test_a_damaged_answer_is_found_anew(place: Path, value: str) -> None:
    with Memo(place) as memo:
        memo.remembered("question", lambda: ("fact", []))
    with contextlib.closing(sqlite3.connect(place)) as database, database:
        database.execute("UPDATE facts SET value = ?", [value])
    with Memo(place) as memo:
        assert memo.remembered("question", lambda: ("fact", [])) == "fact"
