"""Published folder of a run, for an external trainer on another machine.

Images, captions and caches; for each system a dataset TOML in the paths that it knows, and a script
that starts `run_published`, which makes the caches that were not published, and trains.
"""

from __future__ import annotations

import contextlib
import glob
import json
import posixpath
import shlex
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

from latentmake.config.fields import resolution_name
from latentmake.config.machines import ExternalProgram
from latentmake.errors import ConfigError, SourceError, TrainingError
from latentmake.files.sync import sync
from latentmake.files.workspace import System, absolute, is_windows, translate
from latentmake.index.memo import Memo
from latentmake.layouts.layout import layout_of
from latentmake.models.checks import ModelFile
from latentmake.progress import Progress
from latentmake.training.external.installation import elsewhere, flags, network_finding
from latentmake.training.external.order import ExternalOrder, Places, prompt_lines
from latentmake.training.findings import Finding, Say, Verdict, model_finding, passed

Files = dict[str, Path | bytes]
"""Path below the published folder, with forward slashes -> file or content."""

Order = TypeVar("Order", bound=ExternalOrder)

Kind = Literal["latents", "text"]
Call = tuple[str, list[str]]
"""A script of the program, and its arguments."""

_SYSTEMS: tuple[System, System] = ("linux", "windows")

_SETTINGS: Mapping[str, Kind] = {
    ".latentmake-latents.json": "latents",
    ".latentmake-text.json": "text",
}
"""Names of the files with the settings of the caches beside them: a new one makes all stale."""

_SHELL = """\
#!/bin/sh
# Runs {name}.py by the Python of the trainer. Publishing the run again writes this file anew.
for python in {pythons} "$(command -v python || command -v python3)"; do
  if [ -x "$python" ]; then exec "$python" "$(dirname -- "$0")/{name}.py"{option} "$@"; fi
done
echo '{name}: there is no Python' >&2
exit 1
"""
# The program may be a batch file itself (pyenv-win), which does not come back: it is the last line.
_BATCH = """\
@echo off
rem Runs {name}.py by the Python of the trainer. Publishing the run again writes this file anew.
setlocal EnableExtensions DisableDelayedExpansion
chcp 65001 >nul
set "PYTHON=python"
{pythons}
"%PYTHON%" "%~dp0{name}.py"{option} %*
"""
_CHOICE = r'if exist "{folder}\Scripts\python.exe" set "PYTHON={folder}\Scripts\python.exe"'


def block_name(dataset: str, size: tuple[int, int]) -> str:
    """Return the name of a dataset's folder for one resolution."""
    return f"{dataset}_{resolution_name(*size)}"


class Names:
    """Names of paths on one system, with forward slashes, which programs under Windows read too.

    Attributes:
        system: which one.
        unnamed: folders without a name there that were asked for.
        places: the paths of the training.
    """

    def __init__(self, order: ExternalOrder, system: System, folder: str = "") -> None:
        self.system = system
        self.unnamed: set[str] = set()
        self._folder = posixpath.join(absolute(order.publish.path), folder or order.run)
        self._maps = [vars(names) for names in order.publish.path_maps]
        toml = f"{order.run}_{'win' if system == 'windows' else 'linux'}.toml"
        tomls = order.publish.tomls
        named = self.of(f"{absolute(tomls)}/{toml}") if tomls else self.below(toml)
        chosen = (order.publish.output, "output"), (order.publish.logs, "logs")
        output, logs = (self.of(x, folder=True) if x else self.below(name) for x, name in chosen)
        prompts = self.below(f"{order.run}_prompts.txt")
        self.places = Places(self.of, named, output, logs, prompts)

    def of(self, path: str, *, folder: bool = False) -> str:
        """Return a path as the system names it, or as it is where the system has no name for it."""
        path = absolute(path)
        if is_windows(path):
            path = translate(path, "windows", []) or path
        name = translate(path, self.system, self._maps)
        if name is None:
            is_folder = folder or not posixpath.splitext(path)[1]
            self.unnamed.add(path if is_folder else posixpath.dirname(path))
        return name or path

    def below(self, name: str) -> str:
        """Return the same of a path below the published folder."""
        return self.of(f"{self._folder}/{name}")


class Publication(ABC, Generic[Order]):
    """A run's published folder, `{publish.path}/{run}`; a subclass says what differs of a program.

    Attributes:
        order: the run, or a part of it.
        names: those of Linux and of Windows.
        attentions: those that the program knows.
        modules: attention -> module that it needs, where the trainer's machine is to choose.
        cache_ending: what follows the name of a block in that of the folder of its caches.
    """

    attentions: Sequence[str]
    modules: Mapping[str, str]
    cache_ending: ClassVar[str] = ""

    def __init__(self, order: Order, folder: str = "") -> None:
        """Begin the publication of a run, or of a part of the run that a folder is named after."""
        self.order, self.modules = order, {}
        pairs = [(dataset, size) for dataset in order.datasets for size in order.resolutions]
        names = [f"{self.block(*x)}{end}" for x in pairs for end in ("", "_cache", "_control")]
        if len({*names}) < len(names):
            what = f"several of the run's folders have the name {self.block(*pairs[0])}"
            hint = "name them by `{dataset}/{resolution}`"
            raise ConfigError(what, where="publish.folders", hint=hint)
        self.names = [Names(order, each, folder) for each in _SYSTEMS]
        self._listed: dict[Path, dict[str, dict[Kind, list[Path]]]] = {}

    @abstractmethod
    def models(self) -> Iterable[ModelFile]:
        """Return the model's files, inspected."""

    def settings_findings(self, models: Sequence[ModelFile]) -> Iterable[Finding]:
        """Check settings against the model's files."""
        return ()

    @abstractmethod
    def members(self) -> Files:
        """Return the files of items and caches; raises UserError."""

    @abstractmethod
    def settings(self, dataset: str, size: tuple[int, int]) -> Mapping[Kind, Any]:
        """Return what shapes the caches of a dataset at a resolution; of files, the paths."""

    @abstractmethod
    def dataset(self, names: Names) -> str:
        """Return the dataset TOML of a system."""

    @abstractmethod
    def calls(self, names: Names) -> list[Call]:
        """Return scripts and their arguments in the paths of a system; the last one trains."""

    def block(self, dataset: str, size: tuple[int, int]) -> str:
        """Return the folder of a dataset's images at a resolution, below the published folder."""
        named = self.order.publish.folders.replace("{dataset}", dataset)
        return named.replace("{resolution}", resolution_name(*size))

    def tomls(self, names: Names) -> dict[str, str]:
        """Return the dataset TOMLs of a system by their names there."""
        return {names.places.toml: self.dataset(names)}

    @property
    def place(self) -> ExternalProgram:
        """Where the program lies."""
        found: ExternalProgram = getattr(self.order, self.order.section)
        return found

    @property
    def attention(self) -> str:
        """Attention of the calls; `sdpa` where the trainer's machine is to choose."""
        trainer = self.order.trainer.attention
        return self.order.publish.attention or ("sdpa" if trainer == "auto" else trainer)

    # -- files for the trainer's machine ----------------------------------------------------------

    def texts(self, *, tomls: str = "", scripts: str = "", batch_scripts: str = "") -> Files:
        """Return the files that are read on the trainer's machine: TOMLs, calls and scripts.

        `tomls`, `scripts` and `batch_scripts` are their folders, each with a slash behind it.
        """
        batches = batch_scripts or scripts
        run, place, names = self.order.run, self.place, self.names
        name = f"train_{run}"
        calls = [self.calls(each) for each in names]
        published: dict[str, object] = {
            each.system: {
                "folder": each.of(place.path, folder=True),
                "calls": asked,
                "launcher": self._launcher(each),
            }
            for each, asked in zip(names, calls, strict=True)
        }
        published |= {"program": self.order.name, "attention": self.modules}
        folders = [place.venv] if place.venv else [f"{place.path}/venv", f"{place.path}/.venv"]
        linux, windows = ([x.of(folder, folder=True) for folder in folders] for x in names)
        pythons = " ".join(shlex.quote(f"{folder}/bin/python") for folder in linux)
        shell = partial(_SHELL.format, name=name, pythons=pythons)
        quoted = [folder.replace("%", "%%").replace("/", "\\") for folder in reversed(windows)]
        pythons = "\r\n".join(_CHOICE.format(folder=folder) for folder in quoted)
        batch = partial(_BATCH.replace("\n", "\r\n").format, name=name, pythons=pythons)
        options = {name: "", f"cache_{run}": " --only-caches"}
        if len(calls[0]) == 1:
            del options[f"cache_{run}"]
        prompts = {f"{run}_prompts.txt": prompt_lines(self.order).encode()}
        content = f"{json.dumps(published, indent=1, ensure_ascii=False)}\n".encode()
        toml = {
            posixpath.basename(x): text for each in names for x, text in self.tomls(each).items()
        }
        program = Path(__file__).with_name("run_published.py").read_bytes()
        return {
            **(prompts if self.order.trainer.samples.prompts else {}),
            **{f"{tomls}{base}": text.encode() for base, text in toml.items()},
            **{f"{place}{name}.json": content for place in (scripts, batches)},
            **{f"{place}{name}.py": program for place in (scripts, batches)},
            **{f"{scripts}{x}.sh": shell(option=option).encode() for x, option in options.items()},
            **{f"{batches}{x}.bat": batch(option=option).encode() for x, option in options.items()},
        }

    def _launcher(self, names: Names) -> list[str]:
        config, number = self.order.trainer.accelerate_config, self.order.publish.num_processes
        launcher = ["--mixed_precision", self.order.trainer.mixed_precision]
        if config is not None:
            launcher = ["--config_file", names.of(config)]
        if number:
            launcher += ["--num_processes", str(number), *(["--multi_gpu"] if number > 1 else [])]
        return ["-m", "accelerate.commands.launch", *launcher]

    # -- the checklist ----------------------------------------------------------------------------

    def findings(self, memory: Memo | None = None) -> Iterator[Finding]:
        """Check what would be published, before anything is encoded or copied."""
        order, asked, known = self.order, self.attention, self.attentions
        models = [*self.models()]
        for file in models:
            if file.place and not (file.doubt or Path(file.place).exists()):  # or on the hub
                yield elsewhere(f"model: {file.key}", file.place)
            else:
                yield model_finding(file)
        yield from self.settings_findings(models)
        if asked not in known:
            note = f"{order.name} has no {asked}: set `publish.attention` to one of "
            yield Finding("attention", "failed", note + ", ".join(known))
        else:
            yield Finding("attention", "ok", ", else ".join([*self.modules, asked]))
        yield from self._program_findings(memory)
        config = order.trainer.accelerate_config
        if config is not None and not Path(config).is_file():
            yield elsewhere("accelerate_config", config)
        self.texts()  # asks for all names
        yield from self._name_findings()

    def _program_findings(self, memory: Memo | None) -> Iterator[Finding]:
        """Check the calls against the program's sources, where it is on this machine."""
        order, place = self.order, self.place
        try:  # its environment may lie on the trainer's machine only
            here = {order.section: place.model_copy(update={"venv": None})}
            program, found = order.model_copy(update=here).find(memory), list[Finding]()
            for script, arguments in self.calls(self.names[0]):
                program.script(script)
                found.append(flags(program, arguments, script))
            if order.trained and order.trainer.network_module is not None:
                module = order.trainer.network_module
                found.append(network_finding(program, module, here=False))
            yield from [Finding(order.name, "ok", str(program.folder)), *found]
        except TrainingError as error:
            is_here = Path(place.path).expanduser().is_dir()
            yield Finding(order.name, "failed" if is_here else "warning", str(error))

    def _name_findings(self) -> Iterator[Finding]:
        """Report folders without a name on a system: its script cannot run.

        Failed where that holds for both systems, so that neither script can.
        """
        verdict: Verdict = "failed" if all(each.unnamed for each in self.names) else "warning"
        for each, other in zip(self.names, reversed(self.names), strict=True):
            title, lacks = each.system.capitalize(), each.unnamed
            if not lacks:
                yield Finding(f"paths for {title}", "ok", "each has a name there")
            for folder in sorted(lacks):
                if not any(folder.startswith(f"{outer}/") for outer in lacks):
                    note = f"{folder} has no name under {title}: it is named as it is; "
                    note += f"add to publish.path_maps: - {{{other.system}: {folder}, "
                    yield Finding(f"paths for {title}", verdict, f"{note}{each.system}: ...}}")

    # -- caches of the trainer's machine ----------------------------------------------------------

    def settings_files(self) -> Files:
        """Return the files with the settings of caches that the trainer's machine makes."""
        found: Files = {}
        for dataset in self.order.datasets:
            for size in self.order.resolutions:
                settings = self.settings(dataset, size)
                folder = f"{self.block(dataset, size)}{self.cache_ending}"
                for name, kind in _SETTINGS.items():
                    if kind in settings:
                        content = f"{json.dumps(settings[kind], sort_keys=True)}\n".encode()
                        found[f"{folder}/{name}"] = content
        return found

    @abstractmethod
    def edited(
        self, base: str, old: Path, new: Path | bytes | None
    ) -> Iterator[tuple[str, Sequence[Kind]]]:
        """Yield stems of items, and kinds of their caches, that come from a file of a block.

        Args:
            base: its path below the block.
            old: the published file.
            new: the one that replaces it; None where it is removed.
        """

    def made_from(self, folder: Path, name: str, new: Path | bytes | None) -> Iterator[Path]:
        """Yield the caches made from a file, which are dropped before it is replaced.

        Trainers take a cache that is there for a fresh one. Those that the trainer's machine made
        have no record: their names tell whose they are.

        Args:
            folder: the published one.
            name: of the file, below it.
            new: what replaces it; None where it is removed.
        """
        *folders, last = name.split("/")
        if made := _SETTINGS.get(last):
            for kinds in self._caches(folder.joinpath(*folders)).values():
                yield from kinds.get(made, ())
        elif not (self.order.publish.caches or name.startswith("/")):  # a TOML or script
            for depth in range(1, len(folders) + 1):  # an earlier publication had other folders
                block, base = "/".join(folders[:depth]), "/".join([*folders[depth:], last])
                place = f"{block.removesuffix('_control')}{self.cache_ending}"
                owned = self._caches(folder / place)
                for stem, asked in self.edited(base, folder / name, new) if owned else ():
                    for kind in asked:
                        yield from owned.get(stem, {}).get(kind, ())

    def _caches(self, root: Path) -> Mapping[str, Mapping[Kind, Sequence[Path]]]:
        """Return stem -> kind -> the cache files below a folder that may belong to it."""
        if root not in self._listed:
            layout = layout_of(self.order.model.layout_name)
            found: dict[str, dict[Kind, list[Path]]] = defaultdict(lambda: defaultdict(list))
            for path in root.rglob("*"):
                name = path.relative_to(root).as_posix()
                is_text = layout.text_ending is not None and name.endswith(layout.text_ending)
                for stem in layout.owners(name):
                    found[stem]["text" if is_text else "latents"].append(path)
            self._listed[root] = found
        return self._listed[root]


# -- the folder -----------------------------------------------------------------------------------


def parts_of(order: Order) -> list[Order]:
    """Return the order, and where the user asks for them, orders of each of its resolutions."""
    if not order.publish.each_resolution or len(order.resolutions) == 1:
        return [order]
    parts = ({"run": block_name(order.run, x), "resolutions": [x]} for x in order.resolutions)
    return [order, *(order.model_copy(update=part) for part in parts)]


def publish(publications: Sequence[Publication[Any]], say: Say) -> None:
    """Bring the folder up to date: only what changed is copied; raises UserError.

    The first one is that of the run; the others add TOMLs and scripts for parts of it. What an
    earlier publication put there and no item owns any longer is removed; nothing else.
    """
    publication = publications[0]
    order, run, settings = publication.order, publication.order.run, publication.order.publish
    folder = Path(_writable(order, settings.path, "path", run), run)
    places = {
        key: f"{_writable(order, place, key)}/"
        for key in ("tomls", "scripts", "batch_scripts")
        if (place := getattr(settings, key))
    }
    passed(publication.findings(), say)
    files = publication.members() | ({} if settings.caches else publication.settings_files())
    for part in publications:
        files |= part.texts(**places)
    for path in files.values():
        if isinstance(path, Path) and not path.is_file():  # before anything there changes
            raise SourceError("is not there", where=path, hint="run the same command again")
    dropped: list[Path] = []

    def drop(name: str) -> None:
        for path in publication.made_from(folder, name, files.get(name)):
            if path.is_file():
                path.unlink()
                dropped.append(path)

    with Progress(files, desc=f"publish {run}", unit="file") as bar:
        changes = sync(folder, files, progress=bar, replacing=drop)
    with contextlib.suppress(OSError):  # a drive of Windows knows no such permission
        for script in (folder / name for name in files if name.endswith(".sh")):
            script.chmod(script.stat().st_mode | 0o111)
    say(
        f"{run}: published to {folder}: {changes.copied + changes.linked} files written, "
        f"{changes.unchanged} unchanged, {changes.removed} removed"
    )
    if dropped:
        what = "1 cache" if len(dropped) == 1 else f"{len(dropped)} caches"
        say(f"{run}: {what} made in {folder} dropped, since image, caption or settings changed")


def _writable(order: ExternalOrder, place: str, key: str, name: str = "") -> str:
    """Return a folder that `publish` names by a key as this machine names it; raises ConfigError.

    `name` is that of the folder in it that is written, if it is not the folder itself.
    """
    path = absolute(place)
    maps, named = [vars(names) for names in order.publish.path_maps], [path]
    if is_windows(path):
        known = (translate(path, each, maps) for each in ("wsl", "linux"))
        named = [name for name in known if name is not None]
    here = next(filter(_is_mounted, named), None)
    folder = Path(here or path, name).resolve()
    sources = [x for each in order.datasets.values() for x in (each.folder, each.control_directory)]
    fault = ""
    if not named:
        fault = "has no name on this machine: add it to publish.path_maps, or"
    elif here is None:
        fault = "lies on a drive of Windows that is not mounted: mount it, or"
    elif glob.escape(here) != here:
        fault = f"has one of [ ] * ? in it, with which {order.name} finds nothing:"
    elif any(folder.is_relative_to(Path(x).resolve()) for x in sources if x):
        fault = "lies in a dataset, which would grow by what is published:"
    if fault:
        raise ConfigError(f"{path} {fault} set another folder", where=f"publish.{key}")
    return here or path


def _is_mounted(name: str) -> bool:
    """Return whether a path lies on no drive of Windows, or on one that is there."""
    return translate(name, "windows", []) is None or Path(*Path(name).parts[:3]).is_dir()
