"""Random edits of a project for `versions.py`: its files, configuration, caches, programs, results.

An edit is drawn from dice: the same dice edit the same project in the same way.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import world
from every_key import changed, prepared
from PIL import Image
from project import Project
from versions_world import RUN, World

STATE, MEMO = ".latentmake", "memo.sqlite"
TEXTS, WEIGHTS = (".txt", ".caption", ".tags"), (".safetensors", ".pth")
Dice = random.Random
Edit = Callable[[Path, Dice], None]


def edit(project: Project, kind: World, dice: Dice) -> str:
    """Make an edit; return what it was."""
    if (drawn := dice.random()) < 0.22:
        return _configure(project, kind, dice)
    if drawn < 0.26:
        return _forget(project, dice)
    folder, endings, ways = dice.choices(_PLACES, [weight for weight, *_ in _PLACES])[0][1:]
    found = sorted((project / folder).rglob("*"))
    files = [x for x in found if x.is_file() and (not endings or x.suffix in endings)]
    if not files:
        return edit(project, kind, dice)
    path, way = dice.choice(files), dice.choice(ways)
    with contextlib.suppress(OSError):  # no picture any more, a folder is in the way
        way(path, dice)
    return f"{way.__name__}: {path.relative_to(project.folder)}"


def _configure(project: Project, kind: World, dice: Dice) -> str:
    usable = [each for each in kind.changes.items() if not each[1].files]
    key, change = dice.choice([each for each in usable if not each[1].refused] * 4 + usable)
    with contextlib.suppress(AttributeError, LookupError, TypeError):  # its section is gone
        values = prepared(project.config, [(key, change)], kind.model)
        project.config = changed(values, [(key, change)], kind.model)
    value = "changed" if callable(change.value) else change.value
    return f"{'.'.join(key)}: {value}"


def _forget(project: Project, dice: Dice) -> str:
    """Delete what may be deleted at any time, of both versions."""
    name = dice.choice((MEMO, STATE, ".snakemake"))
    folders = [project / ".snakemake"]
    if name != ".snakemake":
        folders = [*project.folder.glob(f"{STATE}*")]
    for folder in folders:
        if name == MEMO:
            (folder / MEMO).unlink(missing_ok=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return f"delete: {name}"


def _item(path: Path) -> list[Path]:
    """Return the files of the item that a file belongs to."""
    return sorted(path.parent.glob(f"{path.stem}.*"))


def _alike(path: Path) -> list[Path]:
    return sorted(x for x in path.parent.rglob(f"*{path.suffix}") if x != path) or [path]


# -- edits of a file ------------------------------------------------------------------------------


def touch(path: Path, dice: Dice) -> None:
    os.utime(path, ns=(0, path.stat().st_mtime_ns + dice.randint(-(10**12), 10**12)))


def change(path: Path, dice: Dice) -> None:
    """Paint another picture, or write words to the end of any other file."""
    if path.suffix == ".png":
        with Image.open(path) as picture:
            mode, size = picture.mode, picture.size
        world.draw(path, dice.randrange(1000), size if dice.random() < 0.6 else (80, 64))
        Image.open(path).convert(mode).save(path)
    else:
        path.write_bytes(path.read_bytes() + dice.choice((b" more", b", word", b"\n", b"")))


def change_a_byte(path: Path, dice: Dice) -> None:
    """Change one byte as editors do, by a new file; of old size, sometimes of old mtime."""
    stat, data = path.stat(), bytearray(path.read_bytes() or b"x")
    if path.suffix in TEXTS:
        data[0] = data[0] ^ 1 if chr(data[0]).isalnum() else ord("z")
    else:
        data[-dice.randint(1, min(8, len(data)))] ^= 1  # of tensors, not of their names
    new = path.with_name(".new")
    new.write_bytes(data)
    if dice.random() < 0.5:
        os.utime(new, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    new.replace(path)


def swap(path: Path, dice: Dice) -> None:
    other = dice.choice(_alike(path))
    path.rename(new := path.with_name(".new"))
    if other != path:
        other.rename(path)
    new.rename(other)


def copy_onto(path: Path, dice: Dice) -> None:
    if (other := dice.choice(_alike(path))) != path:
        (shutil.copyfile if dice.random() < 0.5 else shutil.copy2)(other, path)


def rename(path: Path, dice: Dice) -> None:
    """Rename an item, or one of its files."""
    new = dice.choice(("new", "ant_2", "zoo.v2", "sub/bee"))
    for each in _item(path) if dice.random() < 0.7 else [path]:
        place = path.parent / f"{new}{each.suffix}"
        place.parent.mkdir(exist_ok=True)
        each.rename(place)


def add(path: Path, dice: Dice) -> None:
    """Add a copy of an item."""
    name = f"copy{dice.randrange(3)}"
    for each in _item(path):
        shutil.copyfile(each, path.parent / f"{name}{each.suffix}")


def delete(path: Path, dice: Dice) -> None:
    path.unlink()


def delete_item(path: Path, dice: Dice) -> None:
    for each in _item(path):
        each.unlink()


def truncate(path: Path, dice: Dice) -> None:
    os.truncate(path, dice.randrange(path.stat().st_size + 1))


def copy_to_an_orphan(path: Path, dice: Dice) -> None:
    shutil.copy2(path, path.with_name(path.name.replace(path.name[:3], "gone")))


def add_a_comment(path: Path, dice: Dice) -> None:
    with path.open("a") as file:
        file.write("# more\n")


def edit_rows(path: Path, dice: Dice) -> None:
    """Change, drop, repeat or reorder rows of a list or of a metadata file."""
    text, lines = path.read_text(encoding="utf-8"), path.suffix == ".jsonl"
    rows: Any = [json.loads(x) for x in text.splitlines()] if lines else [*json.loads(text).items()]
    at = dice.randrange(len(rows) or 1)
    match dice.randrange(5) if rows else None:
        case 0:
            del rows[at]
        case 1:
            rows.append(rows[at])
        case 2:
            dice.shuffle(rows)
        case 3 | 4:
            held = rows[at] if lines else rows[at][1]
            for key in [*held][-2:]:
                held[key] = f"{held[key]} x" if isinstance(held[key], str) else 7
    done = "".join(f"{json.dumps(x)}\n" for x in rows) if lines else json.dumps(dict(rows))
    path.write_text(done, encoding="utf-8")


_FILES: list[Edit] = [
    *(touch, change, change, change_a_byte, swap, copy_onto),
    *(rename, add, delete, delete_item),
]
_CACHES: list[Edit] = [
    *(touch, change_a_byte, swap, copy_onto, truncate, delete, copy_to_an_orphan)
]
_PLACES: list[tuple[int, str, tuple[str, ...], list[Edit]]] = [
    (40, "data", (), _FILES),
    (15, "cache", (), _CACHES),
    (8, "data", (".json", ".jsonl"), [edit_rows]),
    (5, "models", WEIGHTS, [touch, change_a_byte]),
    (5, f"runs/{RUN}", (), [touch, truncate, delete]),
    (3, "musubi-tuner", (".py",), [add_a_comment]),
    (3, "sd-scripts", (".py",), [add_a_comment]),
]
"""Weight, folder, endings of its files, and what is done to one of them."""
