"""Published folder of a run, for an external trainer on another machine.

Images, captions and caches, or the calls that make them there; for each system a dataset TOML and a
script in the paths that it knows.
"""

from __future__ import annotations

import contextlib
import glob
import posixpath
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from latentmake.config.fields import resolution_name
from latentmake.config.machines import ExternalProgram
from latentmake.errors import ConfigError, StorageError
from latentmake.files.paths import System, absolute, backslashed, is_windows, translate
from latentmake.files.sync import sync
from latentmake.index.memo import Memo
from latentmake.layouts.layout import Layout
from latentmake.progress import Progress
from latentmake.training.backend import Say
from latentmake.training.checks import Finding, Verdict, passed
from latentmake.training.external import checks
from latentmake.training.external.arguments import accelerate_arguments
from latentmake.training.external.installation import Installation
from latentmake.training.external.launch_scripts import (
    Commands,
    Step,
    batch_script,
    shell_script,
)
from latentmake.training.external.order import ExternalOrder
from latentmake.training.external.published_caches import PublishedCaches

Files = dict[str, Path | bytes]
"""Path below the published folder, with forward slashes -> file or content."""

Order = TypeVar("Order", bound=ExternalOrder)

_SYSTEMS: tuple[System, ...] = ("linux", "windows")


class Publication(ABC, Generic[Order]):
    """A run's published folder, `{publish.path}/{run}`.

    Attributes:
        published: the folder as the configuration names it.
        blocks: (dataset, resolution) -> folder of its images, below the published folder.

    Raises:
        ConfigError: the configuration says too little for a publication.
    """

    program: ClassVar[str]
    package: ClassVar[str] = ""
    attentions: Sequence[str]

    def __init__(self, order: Order, published: str = "") -> None:
        self.order = order
        self.published = published or posixpath.join(absolute(order.publish.path), order.run)
        self.blocks = _blocks(order)
        self._maps = [vars(names) for names in order.publish.path_maps]
        self._unnamed: dict[System, set[str]] = defaultdict(set)

    # -- what each trainer answers ------------------------------------------------------------

    @property
    @abstractmethod
    def place(self) -> ExternalProgram:
        """Where the program lies."""

    @property
    @abstractmethod
    def layout(self) -> Layout:
        """Names of the caches."""

    @abstractmethod
    def find(self, place: ExternalProgram, memory: Memo | None) -> Installation:
        """Find the program; raises TrainingError."""

    @abstractmethod
    def own_findings(self) -> Iterable[Finding]:
        """Check the model's files and the settings."""

    @abstractmethod
    def members(self) -> Files:
        """Return the files of items and caches; raises UserError."""

    @abstractmethod
    def drop(self, folder: Path, files: Files, made: PublishedCaches, name: str) -> None:
        """Drop the caches that the trainer's machine made from a file, before it is replaced."""

    @abstractmethod
    def dataset(self, system: System) -> str:
        """Return the dataset TOML of one system."""

    @abstractmethod
    def steps(self, system: System) -> tuple[str, list[Step]]:
        """Return what the script of one system does, and its calls; the last one trains."""

    # -- names of paths -----------------------------------------------------------------------

    def named(self, path: str, system: System, folder: str = "") -> str:
        """Return a path as a system names it, or as it is where the system has no name for it.

        Forward slashes, as TOML files have them. A path without a name is reported by `folder`, by
        default its own.
        """
        path = absolute(path)
        if is_windows(path):
            path = translate(path, "windows", []) or path
        name = translate(path, system, self._maps)
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

    def toml_name(self, system: System) -> str:
        """Return the name of a system's dataset TOML."""
        return f"{self.order.run}_{'win' if system == 'windows' else 'linux'}.toml"

    # -- what follows from that ---------------------------------------------------------------

    @property
    def attention(self) -> str:
        """The attention of the trainer's machine, which cannot be asked for the fastest."""
        trainer = self.order.trainer.attention
        return self.order.publish.attention or ("sdpa" if trainer == "auto" else trainer)

    def commands(self, system: System) -> Commands:
        """Return the content of one system's script."""
        order, config = self.order, self.order.trainer.accelerate_config
        accelerate = accelerate_arguments(
            order.trainer.mixed_precision,
            config=None if config is None else self.argument(config, system),
        )
        if number := order.publish.num_processes:
            accelerate += ["--num_processes", str(number)]
            accelerate += ["--multi_gpu"] if number > 1 else []
        does, steps = self.steps(system)
        path, venv = self.place.path, self.place.venv
        return Commands(
            run=order.run,
            does=does,
            program=self.program,
            folder=self.argument(path, system, path),
            package=self.package,
            venvs=["venv", ".venv"] if venv is None else [self.argument(venv, system, venv)],
            accelerate=accelerate,
            steps=steps,
        )

    def findings(self, memory: Memo | None = None) -> Iterator[Finding]:
        """Check what would be published, before anything is encoded or copied."""
        yield from self.own_findings()
        chosen = self.order.publish.attention is not None
        yield checks.attention(self.attention, self.attentions, self.program, chosen)
        # Its environment may lie on the trainer's machine alone.
        place = self.place.model_copy(update={"venv": None})
        trainer = self.order.trainer
        yield from checks.publication_findings(
            self.commands("linux"),
            {system: self.dataset(system) for system in _SYSTEMS},
            folder=place.path,
            find=lambda: self.find(place, memory),
            further=trainer.arguments,
        )
        if (config := trainer.accelerate_config) is not None and not Path(config).is_file():
            yield checks.elsewhere("accelerate_config", config)
        self.commands("windows")  # asks for all of its names
        yield from self._name_findings()

    def _name_findings(self) -> Iterator[Finding]:
        """Report folders without a name on a system: its script cannot run.

        Failed where that holds for both systems, so that neither script can.
        """
        verdict: Verdict = "failed" if all(self._unnamed[each] for each in _SYSTEMS) else "warning"
        for system in _SYSTEMS:
            what = f"paths for {system.capitalize()}"
            if not self._unnamed[system]:
                yield Finding(what, "ok", "each has a name there")
            other = "linux" if system == "windows" else "windows"
            for folder in _outermost(self._unnamed[system]):
                note = f"{folder} has no name under {system.capitalize()}: it is named as it is; "
                note += f"add to publish.path_maps: - {{{other}: {folder}, {system}: ...}}"
                yield Finding(what, verdict, note)

    def publish(self, say: Say) -> None:
        """Bring the folder up to date: only what changed is copied.

        What an earlier publication put there and no item owns any longer is removed; nothing else.

        Raises:
            UserError: an item, cache or argument cannot be published; finished work is kept.
        """
        folder, run = self._writable(), self.order.run
        passed(self.findings(), say)
        scripts = {
            f"train_{run}.sh": shell_script(self.commands("linux")).encode(),
            f"train_{run}.bat": batch_script(self.commands("windows")).encode(),
        }
        files = self.members()
        files |= {self.toml_name(system): self.dataset(system).encode() for system in _SYSTEMS}
        files |= scripts
        self._tell_about_names(files, say)
        made = PublishedCaches(folder, self.layout)
        caches = self.order.publish.caches
        bar = Progress(files, desc=f"publish {run}", unit="file")
        try:
            drop = None if caches else partial(self.drop, folder, files, made)
            changes = sync(folder, files, progress=bar, replacing=drop)
        finally:
            bar.close()
        with contextlib.suppress(OSError):  # a drive of Windows knows no such permission
            script = folder / f"train_{run}.sh"
            script.chmod(script.stat().st_mode | 0o111)
        say(
            f"{run}: published to {folder}: {changes.copied + changes.linked} files written, "
            f"{changes.unchanged} unchanged, {changes.removed} removed"
        )
        if made.dropped:
            what = "1 cache" if made.dropped == 1 else f"{made.dropped} caches"
            say(
                f"{run}: {what} made in {folder} dropped, since image, caption or settings "
                "changed; its script makes them anew"
            )
        if caches:
            self.tell_of_strays(folder, files, say)

    def tell_of_strays(self, folder: Path, files: Files, say: Say) -> None:
        """Say which cache files were not published, where the program would train on them."""
        del folder, files, say

    def _writable(self) -> Path:
        """Return the published folder as this machine names it.

        Raises:
            ConfigError: this machine has no name for it, or it lies where it may not.
            StorageError: its drive is not mounted.
        """
        publish, local = self.order.publish, [self.published]
        if is_windows(self.published):
            systems: tuple[System, ...] = ("wsl", "linux")
            named = (translate(self.published, each, self._maps) for each in systems)
            local = [name for name in named if name is not None]
            if not local:
                raise ConfigError(
                    f"this machine has no name for {publish.path}",
                    where="publish.path",
                    hint="add the folder to publish.path_maps, or set a path of this machine",
                )
        unmounted = [_unmounted_drive(name) for name in local]
        if None not in unmounted:
            raise StorageError(
                "this drive of Windows is not mounted",
                where=str(unmounted[0]),
                hint="mount it, or correct `publish.path`",
            )
        folder = Path(local[unmounted.index(None)])
        if glob.escape(str(folder)) != str(folder):
            raise ConfigError(
                f"{folder} has one of [ ] * ? in it, with which {self.program} finds nothing",
                where="publish.path",
                hint="set a folder without them",
            )
        for name, dataset in self.order.datasets.items():
            for source in (dataset.folder, dataset.control_directory):
                if source is not None and folder.resolve().is_relative_to(Path(source).resolve()):
                    raise ConfigError(
                        f"{folder} lies in the dataset {name}, which would grow by what is "
                        "published",
                        where="publish.path",
                        hint="set a folder outside of all datasets",
                    )
        return folder

    def _tell_about_names(self, files: Iterable[str], say: Say) -> None:
        """Say which names Windows would not take, where the folder is one that Windows sees."""
        if translate(self.published, "windows", self._maps) is None:
            return
        run, seen = self.order.run, set[str]()
        for name in files:
            base = name.rpartition("/")[2]
            if set(base) & set('<>:"|?*\\') or base.endswith((".", " ")):
                say(f"{run}: {name} is no name that Windows takes; rename its source")
            elif name.casefold() in seen:
                say(
                    f"{run}: {name} differs from another name in upper and lower case alone, "
                    "which Windows does not tell apart; rename its source"
                )
            seen.add(name.casefold())


def _outermost(folders: Iterable[str]) -> list[str]:
    """Return the folders that lie in no other of them."""
    found: list[str] = []
    for folder in sorted(folders):
        if not any(folder == outer or folder.startswith(f"{outer}/") for outer in found):
            found.append(folder)
    return found


def _blocks(order: ExternalOrder) -> dict[tuple[str, tuple[int, int]], str]:
    """Return (dataset, resolution) -> the folder of its images, below the published folder.

    Raises:
        ConfigError: two of them would share a folder, or one has the name of another's caches.
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
                    hint="let it end in {resolution}",
                )
            mine = f"{dataset} at {size}"
            for place in (name, f"{name}_cache", f"{name}_control"):
                if place in taken:
                    raise ConfigError(
                        f"gives {mine} and {taken[place]} of run {order.run} one folder, {place}",
                        where="publish.folder",
                        hint="add {dataset} or {resolution}",
                    )
                taken[place] = mine
            found[dataset, (width, height)] = name
    return found


def _unmounted_drive(path: str) -> Path | None:
    """Return the mount point of a drive that is not there; None of every other path."""
    drive = Path(*Path(path).parts[:3])
    return None if translate(path, "windows", []) is None or drive.is_dir() else drive
