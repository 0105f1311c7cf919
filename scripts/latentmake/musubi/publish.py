"""`publish_{run}`: the folder that a user carries to the machine that trains.

Images, captions and caches in the folders that musubi-tuner wants, and beside them the dataset TOML
and the script of each system, with the paths that this system knows.
"""

from __future__ import annotations

import contextlib
import glob
import posixpath
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

from tqdm import tqdm

from latentmake.errors import CacheError, ConfigError, SourceError, StorageError
from latentmake.mirror import mirror
from latentmake.musubi.order import ManifestRow, MusubiOrder, manifest_rows
from latentmake.musubi.scripts import batch_script, shell_script
from latentmake.musubi.texts import Texts, block_name
from latentmake.paths import System, absolute, is_windows, translate

__all__ = ["publish"]

Say = Callable[[str], None]


def publish(order: MusubiOrder, say: Say, attention: str | None = None) -> None:
    """Bring the published folder of a run up to date: only what changed is copied.

    The folder is `{publish.path}/{run}`. What an earlier publication put there and no item owns any
    longer is removed; nothing else is.

    Args:
        order: the run.
        say: says a line to the user.
        attention: which attention the published scripts train with, one of `command.ATTENTIONS`; by
            default the trainer's, or sdpa, which every environment has.

    Raises:
        ConfigError: the configuration says too little for a publication.
        TrainingError: the manifest is missing or damaged.
        SourceError: an image, video, caption or control cannot be read.
        CacheError: a cache file is not where the manifest says.
        StorageError: the folder cannot be written; finished work is kept.
    """
    published = posixpath.join(absolute(order.publish.path), order.run)
    folder = _writable(published, order)
    if attention is None:
        attention = "sdpa" if order.trainer.attention == "auto" else order.trainer.attention
    text = Texts(order, published, attention, say)
    files = _members(order)
    files |= {
        f"{order.run}_linux.toml": text.dataset("linux").encode(),
        f"{order.run}_win.toml": text.dataset("windows").encode(),
        f"train_{order.run}.sh": shell_script(text.commands("linux")).encode(),
        f"train_{order.run}.bat": batch_script(text.commands("windows")).encode(),
    }
    text.tell_what_is_missing()
    _tell_about_names(order, files, published, say)
    bar = tqdm(files, desc=f"publish {order.run}", unit="file", mininterval=0.5)
    try:
        changes = mirror(folder, files, progress=bar)
    finally:
        bar.close()
    with contextlib.suppress(OSError):  # a drive of Windows knows no such right, and needs none
        script = folder / f"train_{order.run}.sh"
        script.chmod(script.stat().st_mode | 0o111)
    _tell_of_strangers(folder, files, say)
    say(
        f"{order.run}: published to {folder}: {changes.copied + changes.linked} files written, "
        f"{changes.unchanged} unchanged, {changes.removed} removed"
    )


def _writable(published: str, order: MusubiOrder) -> Path:
    """Return the folder as this machine names it."""
    local = [published]
    if is_windows(published):
        systems: tuple[System, ...] = ("wsl", "linux")
        named = (translate(published, system, order.publish.path_maps) for system in systems)
        local = [name for name in named if name is not None]
        if not local:
            raise ConfigError(
                f"this machine has no name for {order.publish.path}",
                where="publish.path",
                mend="add the folder to publish.path_maps, or set a path of this machine",
            )
    unmounted = [_unmounted_drive(name) for name in local]
    if None not in unmounted:
        raise StorageError(
            "this drive of Windows is not mounted",
            where=str(unmounted[0]),
            mend="mount it, or correct `publish.path`",
        )
    folder = Path(local[unmounted.index(None)])
    if glob.escape(str(folder)) != str(folder):
        raise ConfigError(
            f"{folder} has one of [ ] * ? in it, with which musubi-tuner finds nothing",
            where="publish.path",
            mend="set a folder without them",
        )
    for name, dataset in order.datasets.items():
        for source in (dataset.path, dataset.control_directory):
            if source is not None and folder.resolve().is_relative_to(Path(source).resolve()):
                raise ConfigError(
                    f"{folder} lies in the dataset {name}, which would grow by what is published",
                    where="publish.path",
                    mend="set a folder outside of all datasets",
                )
    return folder


def _unmounted_drive(path: str) -> Path | None:
    """Return the mount point of a drive that is not there; None of every other path."""
    drive = Path(*Path(path).parts[:3])
    return None if translate(path, "windows", []) is None or drive.is_dir() else drive


def _members(order: MusubiOrder) -> dict[str, Path | bytes]:
    """Return what belongs to the items: path below the published folder -> source or content.

    Names are flat, as musubi-tuner reads its folders.
    """
    files: dict[str, Path | bytes] = {}
    for row in manifest_rows(Path(order.manifest)):
        ending = order.datasets[row.dataset].caption_extension
        for resolution in order.resolutions:
            name = block_name(row.dataset, resolution)
            files[f"{name}/{Path(row.source).name}"] = Path(row.source)
            files[f"{name}/{Path(row.stem).name}{ending}"] = _caption(row)
            if row.control is not None:
                files[f"{name}_control/{Path(row.control).name}"] = Path(row.control)
            size = name.removeprefix(f"{row.dataset}_")
            for cache in (*row.latents[size], row.text[size]):
                files[f"{name}_cache/{Path(cache).name}"] = Path(cache)
    for path in {path for path in files.values() if isinstance(path, Path)}:
        if not path.is_file():
            kind = CacheError if path.suffix == ".safetensors" else SourceError
            raise kind("is not there", where=path, mend="give the same command again")
    return files


def _caption(row: ManifestRow) -> Path | bytes:
    """Return the file of an item's caption, or the text itself where that is another."""
    if row.written is not None:
        return f"{row.written}\n".encode()
    return b"" if row.caption is None else Path(row.caption)


def _tell_about_names(order: MusubiOrder, files: Iterable[str], published: str, say: Say) -> None:
    """Say which names Windows would not take, where the folder is one that Windows sees."""
    if translate(published, "windows", order.publish.path_maps) is None:
        return
    seen: set[str] = set()
    for name in files:
        base = name.rpartition("/")[2]
        if set(base) & set('<>:"|?*\\') or base.endswith((".", " ")):
            say(f"{order.run}: {name} is no name that Windows takes; rename its source")
        elif name.casefold() in seen:
            say(
                f"{order.run}: {name} differs from another name in upper and lower case alone, "
                "which Windows does not tell apart; rename its source"
            )
        seen.add(name.casefold())


def _tell_of_strangers(folder: Path, files: Iterable[str], say: Say) -> None:
    """Say which cache files were not published: musubi-tuner trains on all that lie there."""
    caches: dict[str, set[str]] = defaultdict(set)
    for name in files:
        place, _, base = name.rpartition("/")
        if place.endswith("_cache"):
            caches[place].add(base)
    for place, known in caches.items():
        found = {path.name for path in (folder / place).glob("*_wan.safetensors")}
        if strange := sorted(found - known):
            say(
                f"{folder / place} holds cache files that no item owns, and musubi-tuner trains on "
                f"them: {', '.join(strange[:3])}{' ...' if len(strange) > 3 else ''}; remove them"
            )
