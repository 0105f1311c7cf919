"""What publishing a run for another trainer takes, whichever it is: a folder, names, a report."""

from __future__ import annotations

import contextlib
import glob
import posixpath
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from latentmake.config import resolution_name
from latentmake.errors import ConfigError, StorageError
from latentmake.files.paths import System, absolute, backslashed, is_windows, translate
from latentmake.files.sync import sync
from latentmake.progress import Progress
from latentmake.training.external.launch_scripts import (
    Commands,
    batch_script,
    powershell_script,
    shell_script,
)
from latentmake.training.external.order import ExternalOrder

__all__ = [
    "Names",
    "block_names",
    "bring",
    "launch_options",
    "published_folder",
    "script_files",
    "writable",
]

Say = Callable[[str], None]


class Names:
    """Paths as several systems name them, and the folders for which one has no name.

    Args:
        order: names the run, and what the user says of folders.
        published: its published folder.
    """

    def __init__(self, order: ExternalOrder, published: str) -> None:
        self.order = order
        self.published = published
        self._unnamed: dict[System, set[str]] = defaultdict(set)

    def named(self, path: str, system: System, folder: str = "") -> str:
        """Return a path as a system names it, or as it is where the system has no name for it.

        Forward slashes, as TOML files have them.

        Args:
            path: absolute, or relative to the working directory.
            system: who reads it.
            folder: what to tell of, where it has no name; by default the path's own folder.
        """
        path = absolute(path)
        if is_windows(path):
            path = translate(path, "windows", []) or path
        name = translate(path, system, self.order.publish.path_maps)
        if name is None:
            self._unnamed[system].add(absolute(folder) if folder else posixpath.dirname(path))
            return path
        return name

    def argument(self, path: str, system: System, folder: str = "") -> str:
        """Return the same as an argument, with the separators of the system."""
        name = self.named(path, system, folder)
        return backslashed(name) if system == "windows" and is_windows(name) else name

    def below(self, name: str, system: System) -> str:
        """Return the same of a path below the published folder."""
        return self.argument(f"{self.published}/{name}", system, self.published)

    def unnamed(self, system: System) -> Iterator[str]:
        """Yield a line for each folder without a name on a system, of all paths asked for."""
        mine, other = ("windows", "linux") if system == "windows" else ("linux", "windows")
        for folder in _outermost(self._unnamed[system]):
            yield (
                f"{folder} has no name under {mine.capitalize()}: it is named as it is; add to "
                f"publish.path_maps: - {{{other}: {folder}, {mine}: ...}}"
            )


def _outermost(folders: Iterable[str]) -> list[str]:
    """Return the folders that lie in no other of them."""
    found: list[str] = []
    for folder in sorted(folders):
        if not any(folder == outer or folder.startswith(f"{outer}/") for outer in found):
            found.append(folder)
    return found


def block_names(order: ExternalOrder) -> dict[tuple[str, tuple[int, int]], str]:
    """Return (dataset, resolution) -> the folder of its images, below the published folder.

    Raises:
        ConfigError: two of them would share a folder, or one lies in the place of another's caches.
    """
    found: dict[tuple[str, tuple[int, int]], str] = {}
    taken: dict[str, str] = {}
    for dataset in order.datasets:
        for width, height in order.resolutions:
            size = resolution_name(width, height)
            name = order.publish.folder.format(
                run=order.run,
                dataset=dataset,
                model=order.model_name,
                resolution=size,
                width=width,
                height=height,
            )
            if name.endswith(("_cache", "_control")):
                raise ConfigError(
                    f"gives {dataset} the folder {name}, which is named like one of caches",
                    where="publish.folder",
                    mend="let it end in {resolution}",
                )
            mine = f"{dataset} at {size}"
            for place in (name, f"{name}_cache", f"{name}_control"):
                if place in taken:
                    raise ConfigError(
                        f"gives {mine} and {taken[place]} of run {order.run} one folder, {place}",
                        where="publish.folder",
                        mend="add {dataset} or {resolution}",
                    )
                taken[place] = mine
            found[dataset, (width, height)] = name
    return found


def launch_options(order: ExternalOrder) -> list[str]:
    """Return the options of `accelerate launch` for the processes of the trainer's machine."""
    number = order.publish.num_processes
    if number is None:
        return []
    return ["--num_processes", str(number), *(["--multi_gpu"] if number > 1 else [])]


def script_files(order: ExternalOrder, commands: Mapping[System, Commands]) -> dict[str, bytes]:
    """Return the scripts of a publication: name -> content.

    Args:
        order: the run.
        commands: what the script of each system does.

    Raises:
        ConfigError: an argument has signs that a script cannot pass on.
    """
    found = {"sh": shell_script(commands["linux"]), "bat": batch_script(commands["windows"])}
    if order.publish.powershell:
        found["ps1"] = powershell_script(commands["windows"])
    return {f"train_{order.run}.{ending}": text.encode() for ending, text in found.items()}


def published_folder(order: ExternalOrder) -> str:
    """Return the folder of a published run, as the configuration names it."""
    return posixpath.join(absolute(order.publish.path), order.run)


def writable(published: str, order: ExternalOrder, program: str) -> Path:
    """Return a published folder as this machine names it.

    Args:
        published: the folder.
        order: names what the user says of folders, and datasets, in none of which it may lie.
        program: the trainer's name.

    Raises:
        ConfigError: this machine has no name for it, or it lies where it may not.
        StorageError: its drive is not mounted.
    """
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
            f"{folder} has one of [ ] * ? in it, with which {program} finds nothing",
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


def bring(
    order: ExternalOrder,
    folder: Path,
    files: Mapping[str, Path | bytes],
    published: str,
    say: Say,
    replacing: Callable[[str], None] | None = None,
) -> None:
    """Bring a published folder up to date: only what changed is copied.

    Args:
        order: names the run.
        folder: its published folder.
        files: path below that -> what lies there; `train_{run}.sh` may be run.
        published: the folder, as the configuration names it.
        say: says a line to the user.
        replacing: called with a name before it is removed or gets other content.

    Raises:
        SourceError: a file to copy cannot be read.
        StorageError: the folder cannot be written; finished work is kept.
    """
    _tell_about_names(order, files, published, say)
    bar = Progress(files, desc=f"publish {order.run}", unit="file")
    try:
        changes = sync(folder, files, progress=bar, replacing=replacing)
    finally:
        bar.close()
    with contextlib.suppress(OSError):  # a drive of Windows knows no such right, and needs none
        script = folder / f"train_{order.run}.sh"
        script.chmod(script.stat().st_mode | 0o111)
    say(
        f"{order.run}: published to {folder}: {changes.copied + changes.linked} files written, "
        f"{changes.unchanged} unchanged, {changes.removed} removed"
    )


def _tell_about_names(order: ExternalOrder, files: Iterable[str], published: str, say: Say) -> None:
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
