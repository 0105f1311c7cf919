"""Published folder of a run, for an external trainer on another machine.

Images, captions and caches; for each system a dataset TOML in the paths that it knows, and a script
that starts `run_published`, which makes missing caches and trains.

With `publish: {caches: false}` the items of a run come from its datasets alone: no recipe is asked
for, so that the model's encoders need not lie on this machine.
"""

from __future__ import annotations

import contextlib
import glob
import json
import posixpath
import shlex
import sys
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

from latentmake.config.fields import resolution_name
from latentmake.config.machines import ExternalProgram
from latentmake.errors import ConfigError, DatasetError, StorageError, TrainingError
from latentmake.files import atomic
from latentmake.files.sync import sync
from latentmake.files.workspace import System, absolute, is_windows, translate
from latentmake.index.memo import Memo
from latentmake.layouts.layout import Layout, layout_of
from latentmake.plan.facts import Facts
from latentmake.plan.manifest import lines_of, read_lock, row_of
from latentmake.plan.orders import run_order
from latentmake.plan.run_plan import members
from latentmake.progress import Progress
from latentmake.training.backend import Finding, Say, Verdict, passed
from latentmake.training.external.installation import Installation, elsewhere, flags
from latentmake.training.external.order import (
    ExternalOrder,
    accelerate_arguments,
    missing_files,
)

Files = dict[str, Path | bytes]
"""Path below the published folder, with forward slashes -> file or content."""

Kind = Literal["latents", "text"]
Made = tuple[str, Kind, str | None]
"""Caches made from a file: folder below the published one, kind, stem of the item; None: all."""

Order = TypeVar("Order", bound=ExternalOrder)

_SYSTEMS: tuple[System, ...] = ("linux", "windows")

_SETTINGS: Mapping[str, Kind] = {
    ".latentmake-latents.json": "latents",
    ".latentmake-text.json": "text",
}
"""Names of the files with the settings of the caches beside them: a new one makes all stale."""

_SHELL = """\
#!/bin/sh
# {about}
for python in {pythons} "$(command -v python || command -v python3)"; do
  if [ -x "$python" ]; then exec "$python" "$(dirname -- "$0")/{name}.py" "$@"; fi
done
echo '{name}: there is no Python' >&2
exit 1
"""
# The program may be a batch file itself (pyenv-win), which does not come back: it is the last line.
_BATCH = """\
@echo off
rem {about}
setlocal EnableExtensions DisableDelayedExpansion
chcp 65001 >nul
set "PYTHON=python"
{pythons}
"%PYTHON%" "%~dp0{name}.py" %*
"""


class Step(NamedTuple):
    """One call of a Python script.

    Attributes:
        what: in words.
        launcher: arguments of Python before the script.
    """

    what: str
    script: str
    arguments: Sequence[str]
    launcher: Sequence[str] = ()


class Publication(ABC, Generic[Order]):
    """A run's published folder, `{publish.path}/{run}`.

    Attributes:
        published: the folder as the configuration names it.
        blocks: (dataset, resolution) -> folder of its images, below the published folder.
        program: the trainer's name.
        package: folder below its own in which its scripts lie in some versions; "" for none.
        cache_ending: what follows the name of a block in that of the folder of its caches.
        attentions: those that it knows.
        modules: attention -> module that it needs, where the trainer's machine is to choose.

    Raises:
        ConfigError: the configuration says too little for a publication.
    """

    program: ClassVar[str]
    package: ClassVar[str] = ""
    cache_ending: ClassVar[str] = ""
    attentions: Sequence[str]
    modules: Mapping[str, str] = {}

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
    def settings(self, dataset: str, resolution: tuple[int, int]) -> Mapping[Kind, Any]:
        """Return the settings that shape latents and text; of files, the paths."""

    @abstractmethod
    def made_from(self, folder: Path, files: Files, name: str) -> Iterator[Made]:
        """Yield the caches made from a file, before it is replaced."""

    @abstractmethod
    def dataset(self, system: System) -> str:
        """Return the dataset TOML of one system."""

    @abstractmethod
    def steps(self, system: System) -> list[Step]:
        """Return the calls in the paths of one system; the last one trains."""

    # -- names of paths -----------------------------------------------------------------------

    def named(self, path: str, system: System, folder: str = "") -> str:
        """Return a path as a system names it, or as it is where the system has no name for it.

        Forward slashes, which programs under Windows read too. A path without a name is reported by
        `folder`, by default its own.
        """
        path = absolute(path)
        if is_windows(path):
            path = translate(path, "windows", []) or path
        name = translate(path, system, self._maps)
        if name is None:
            self._unnamed[system].add(absolute(folder) if folder else posixpath.dirname(path))
            return path
        return name

    def below(self, name: str, system: System) -> str:
        """Return the same of a path below the published folder."""
        return self.named(f"{self.published}/{name}", system, self.published)

    def toml_name(self, system: System) -> str:
        """Return the name of a system's dataset TOML."""
        return f"{self.order.run}_{'win' if system == 'windows' else 'linux'}.toml"

    # -- scripts ------------------------------------------------------------------------------

    @property
    def attention(self) -> str:
        """The attention of the calls; `sdpa` where the trainer's machine is to choose."""
        trainer = self.order.trainer.attention
        return self.order.publish.attention or ("sdpa" if trainer == "auto" else trainer)

    def launcher(self, system: System) -> list[str]:
        """Return the arguments of Python before a script that trains."""
        trainer, number = self.order.trainer, self.order.publish.num_processes
        config = trainer.accelerate_config
        launcher = ["-m", "accelerate.commands.launch"]
        launcher += accelerate_arguments(
            trainer.mixed_precision,
            config=None if config is None else self.named(config, system),
        )
        if number:
            launcher += ["--num_processes", str(number), *(["--multi_gpu"] if number > 1 else [])]
        return launcher

    def _pythons(self, system: System) -> list[str]:
        """Return where the Python of the program's environment may lie."""
        path, venv = self.place.path, self.place.venv
        places = [f"{path}/venv", f"{path}/.venv"] if venv is None else [venv]
        python = "Scripts/python.exe" if system == "windows" else "bin/python"
        return [self.named(f"{place}/{python}", system, venv or path) for place in places]

    def _texts(self) -> Files:
        """Return the files that are read on the trainer's machine: TOMLs, calls and scripts."""
        name, path = f"train_{self.order.run}", self.place.path
        calls = {
            "program": self.program,
            "places": [".", *filter(None, [self.package])],
            "attention": self.modules,
        } | {
            system: {
                "folder": self.named(path, system, path),
                "steps": [step._asdict() for step in self.steps(system)],
            }
            for system in _SYSTEMS
        }
        about = f"Makes missing caches of run {self.order.run}, and trains it with {self.program}. "
        about += "Publishing the run again writes this file anew."
        words = map(shlex.quote, self._pythons("linux"))
        shell = _SHELL.format(name=name, about=about, pythons=" ".join(words))
        places = [
            each.replace("%", "%%").replace("/", "\\")
            for each in reversed(self._pythons("windows"))
        ]
        choices = "\n".join(f'if exist "{each}" set "PYTHON={each}"' for each in places)
        batch = _BATCH.format(name=name, about=about, pythons=choices).replace("\n", "\r\n")
        return {
            **{self.toml_name(system): self.dataset(system).encode() for system in _SYSTEMS},
            f"{name}.json": f"{json.dumps(calls, indent=1, ensure_ascii=False)}\n".encode(),
            f"{name}.py": Path(__file__).with_name("run_published.py").read_bytes(),
            f"{name}.sh": shell.encode(),
            f"{name}.bat": batch.encode(),
        }

    # -- the checklist ------------------------------------------------------------------------

    def findings(self, memory: Memo | None = None) -> Iterator[Finding]:
        """Check what would be published, before anything is encoded or copied."""
        yield from self.own_findings()
        yield self._attention_finding()
        yield from self._program_findings(memory)
        config = self.order.trainer.accelerate_config
        if config is not None and not Path(config).is_file():
            yield elsewhere("accelerate_config", config)
        self._texts()  # asks for all names
        yield from self._name_findings()

    def _attention_finding(self) -> Finding:
        """Check that the program knows the attention."""
        asked, known = self.attention, self.attentions
        if asked not in known:
            note = f"{self.program} has no {asked}: set `publish.attention` to one of "
            return Finding("attention", "failed", note + ", ".join(known))
        if self.modules:
            note = f"{' or '.join(self.modules)} if the trainer's machine has it, else {asked}"
        elif asked == "sdpa":
            hint = ", which every machine has; `publish.attention` names another"
            note = asked + (hint if self.order.publish.attention is None else "")
        else:
            note = f"{asked}, which the trainer's machine must have"
        return Finding("attention", "ok", note)

    def _program_findings(self, memory: Memo | None) -> Iterator[Finding]:
        """Check the calls against the program's sources, where it is on this machine."""
        place = self.place
        if not Path(place.path).expanduser().is_dir():
            note = f"{place.path} is not on this machine: its flags cannot be checked"
            yield Finding(self.program, "warning", note)
            return
        try:  # its environment may lie on the trainer's machine only
            program = self.find(place.model_copy(update={"venv": None}), memory)
        except TrainingError as error:
            yield Finding(self.program, "failed", str(error))
            return
        yield Finding(self.program, "ok", str(program.folder))
        for step in self.steps("linux"):
            try:
                program.script(step.script)
                yield flags(program, step.arguments, step.script)
            except TrainingError as error:
                yield Finding(f"arguments of {step.script}", "failed", str(error))
        for name in missing_files(self.order.trainer.arguments, program.folder):
            yield elsewhere("arguments", name)

    def _name_findings(self) -> Iterator[Finding]:
        """Report folders without a name on a system: its script cannot run.

        Failed where that holds for both systems, so that neither script can.
        """
        verdict: Verdict = "failed" if all(self._unnamed[each] for each in _SYSTEMS) else "warning"
        for system, other in zip(_SYSTEMS, reversed(_SYSTEMS), strict=True):
            what = f"paths for {system.capitalize()}"
            if not self._unnamed[system]:
                yield Finding(what, "ok", "each has a name there")
            for folder in _outermost(self._unnamed[system]):
                note = f"{folder} has no name under {system.capitalize()}: it is named as it is; "
                note += f"add to publish.path_maps: - {{{other}: {folder}, {system}: ...}}"
                yield Finding(what, verdict, note)

    # -- the folder ---------------------------------------------------------------------------

    def publish(self, say: Say) -> None:
        """Bring the folder up to date: only what changed is copied.

        What an earlier publication put there and no item owns any longer is removed; nothing else.

        Raises:
            UserError: an item, cache or argument cannot be published; finished work is kept.
        """
        folder, run, caches = self._writable(), self.order.run, self.order.publish.caches
        passed(self.findings(), say)
        files = self.members()
        if not caches:
            for key, block in self.blocks.items():
                settings = self.settings(*key)
                for name, kind in _SETTINGS.items():
                    if kind in settings:
                        content = f"{json.dumps(settings[kind], sort_keys=True)}\n".encode()
                        files[f"{block}{self.cache_ending}/{name}"] = content
        files |= self._texts()
        self._tell_about_names(files, say)
        dropped: list[Path] = []
        drop = None if caches else self._dropping(folder, files, dropped)
        bar = Progress(files, desc=f"publish {run}", unit="file")
        try:
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
        if dropped:
            what = "1 cache" if len(dropped) == 1 else f"{len(dropped)} caches"
            say(
                f"{run}: {what} made in {folder} dropped, since image, caption or settings "
                "changed; its script makes them anew"
            )
        if caches:
            self._tell_of_strays(folder, files, say)

    def _dropping(self, folder: Path, files: Files, dropped: list[Path]) -> Callable[[str], None]:
        """Return a function that drops the caches made from a file, before it is replaced.

        Trainers take a cache that is there for a fresh one. Those that the trainer's machine made
        have no record: their names tell whose they are. A folder is listed once.
        """
        layout = layout_of(self.order.model.layout_name)
        listing = cache(lambda place: _owned(folder / place, layout))

        def drop(name: str) -> None:
            place, _, base = name.rpartition("/")
            made: Iterable[Made] = [(place, _SETTINGS[base], None)] if base in _SETTINGS else ()
            for where, kind, stem in made or self.made_from(folder, files, name):
                for path in listing(where)[kind, stem]:
                    if path.is_file():
                        path.unlink()
                        dropped.append(path)

        return drop

    def _tell_of_strays(self, folder: Path, files: Files, say: Say) -> None:
        """Say which files in folders of caches were not published: the program trains on them."""
        ending = layout_of(self.order.model.layout_name).latents_ending
        for block in self.blocks.values() if self.cache_ending else ():
            place = f"{block}{self.cache_ending}"
            found = (path.name for path in (folder / place).glob(f"*{ending}"))
            if strays := sorted(name for name in found if f"{place}/{name}" not in files):
                say(
                    f"{folder / place} holds cache files that no item owns, and {self.program} "
                    f"trains on them: {', '.join(strays[:3])}{' ...' if len(strays) > 3 else ''}; "
                    "remove them"
                )

    def _writable(self) -> Path:
        """Return the published folder as this machine names it.

        Raises:
            ConfigError: this machine has no name for it, or it lies where it may not.
            StorageError: its drive is not mounted.
        """
        names: list[str | None] = [self.published]
        if is_windows(self.published):
            systems: tuple[System, ...] = ("wsl", "linux")
            names = [translate(self.published, each, self._maps) for each in systems]
        local = [Path(name) for name in names if name is not None]
        if not local:
            raise ConfigError(
                f"this machine has no name for {self.order.publish.path}",
                where="publish.path",
                hint="add the folder to publish.path_maps, or set a path of this machine",
            )
        folder = next((path for path in local if not _unmounted_drive(path)), None)
        if folder is None:
            raise StorageError(
                "this drive of Windows is not mounted",
                where=str(_unmounted_drive(local[0])),
                hint="mount it, or correct `publish.path`",
            )
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


def _owned(root: Path, layout: Layout) -> Mapping[tuple[Kind, str | None], Sequence[Path]]:
    """Return (kind, stem) -> the cache files below a folder that may belong to it; None: all."""
    found: dict[tuple[Kind, str | None], list[Path]] = defaultdict(list)
    for path in root.rglob("*"):
        name = path.relative_to(root).as_posix()
        is_text = layout.text_ending is not None and name.endswith(layout.text_ending)
        stems = layout.owners(name)
        for stem in (*stems, None) if stems else ():
            found["text" if is_text else "latents", stem].append(path)
    return found


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
            if name in found.values():
                other, (width, height) = next(key for key in found if found[key] == name)
                raise ConfigError(
                    f"gives {dataset} at {size} and {other} at {resolution_name(width, height)} of "
                    f"run {order.run} one folder, {name}",
                    where="publish.folder",
                    hint="add {dataset} or {resolution}",
                )
            found[dataset, (width, height)] = name
    return found


def _unmounted_drive(path: Path) -> Path | None:
    """Return the mount point of a drive that is not there; None of every other path."""
    drive = Path(*path.parts[:3])
    is_drive = translate(str(path), "windows", []) is not None
    return drive if is_drive and not drive.is_dir() else None


def write_items(facts: Facts, name: str) -> Path:
    """Write the manifest of a publication without caches, a JSONL file; return its path.

    Raises:
        DatasetError: a dataset is missing, holds no image, or has faulty items and does not skip
            them.
    """
    config, run = facts.config, facts.config.runs[name]
    without = _left_out(facts, name)
    layout = facts.layout(run.model)
    rows = [
        row_of(each, config.datasets[each.dataset].num_repeats, layout)
        for each in members(facts, run, {}, {})
        if (each.dataset, each.item.stem) not in without
    ]
    if not rows:
        raise DatasetError("no item is left to publish", where=f"run {name}")
    items = run_order(name, "items", time.time_ns()).with_suffix(".jsonl")
    atomic.write(items, lines_of(rows))
    return items


def _left_out(facts: Facts, name: str) -> set[tuple[str, str]]:
    """Return dataset and stem of the items that cannot be published, each of which is told.

    Besides those that a listing tells, earlier builds here skipped what they could not read.
    """
    config, run = facts.config, facts.config.runs[name]
    found: set[tuple[str, str]] = set()
    lines: list[str] = []
    for dataset in run.datasets:
        skip = config.datasets[dataset].on_error == "skip"
        faults = [(fault.stem, fault.line) for fault in facts.items(dataset, run.model)[1]]
        for noted in read_lock(name).aside.get(dataset, []) if skip else []:
            if noted["digest"] and facts.digest_of(noted["path"]) == noted["digest"]:
                faults.append((noted["stem"], noted["line"]))
        found |= {(dataset, stem) for stem, _ in faults}
        if skip:
            sys.stderr.writelines(f"skipped: {line}\n" for _, line in faults)
        else:
            lines += [line for _, line in faults]
    if lines:
        raise DatasetError(
            f"{len(lines)} faulty: {' | '.join(lines)}",
            where=f"run {name}",
            hint="set on_error: skip to publish without these",
        )
    return found
