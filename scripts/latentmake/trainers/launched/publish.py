"""Published folder of a run, for an external trainer on another machine.

It holds images, captions and caches. For each system (Linux, Windows) it holds a dataset TOML with
the system's paths, and a script that starts `run_published`, a program that makes the caches that
were not published and then trains.
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
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar

from latentmake.base.errors import ConfigError, SourceError, TrainingError
from latentmake.base.paths import System, absolute, is_windows, translate
from latentmake.base.progress import Progress
from latentmake.base.sync import sync, unsynced
from latentmake.config.fields import resolution_name
from latentmake.data.memo import Memo
from latentmake.layouts.layout import layout_of
from latentmake.models.inspection import ModelFile
from latentmake.runs.findings import Finding, Say, Verdict, model_finding, passed
from latentmake.trainers.launched.installation import elsewhere, flags, network_finding
from latentmake.trainers.launched.order import ExternalOrder, Places, prompt_lines

Files = dict[str, Path | bytes]
"""Path below the published folder, with forward slashes -> file or content."""

Order = TypeVar("Order", bound=ExternalOrder)

Kind = Literal["latents", "text"]
Call = tuple[str, list[str]]
"""A script of the program, and the script's arguments."""

_SETTINGS: Mapping[str, Kind] = {
    ".latentmake-latents.json": "latents",
    ".latentmake-text.json": "text",
}
"""Files that hold the settings of the caches beside them -> kind of these caches.

New content of such a file makes all these caches stale.
"""

_SHELL = """\
#!/bin/sh
# Runs {name}.py by the Python of the trainer. Publishing the run again writes this file anew.
for python in {pythons} "$(command -v python || command -v python3)"; do
  if [ -x "$python" ]; then exec "$python" "$(dirname -- "$0")/{name}.py"{option} "$@"; fi
done
echo '{name}: there is no Python' >&2
exit 1
"""
# `python` may itself be a batch file (pyenv-win), from which cmd does not return: so the call is
# the last line.
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
    """Names of paths on one system.

    They have forward slashes, which programs on Windows read, too.

    Attributes:
        system: `linux` or `windows`.
        unnamed: folders that were asked for and have no name on the system.
        places: paths of the training on the system.
    """

    def __init__(self, order: ExternalOrder, system: System) -> None:
        self.system = system
        self.unnamed: set[str] = set()
        self._folder = posixpath.join(absolute(order.publish.path), order.folder)
        self._maps = [vars(names) for names in order.publish.path_maps]
        toml = f"{order.run}_{'win' if system == 'windows' else 'linux'}.toml"
        tomls = order.publish.tomls
        named = self.of(f"{absolute(tomls)}/{toml}") if tomls else self.below(toml)
        chosen = (order.publish.output, "output"), (order.publish.logs, "logs")
        output, logs = (
            self.of(folder, folder=True) if folder else self.below(name) for folder, name in chosen
        )
        prompts = self.below(f"{order.run}_prompts.txt")
        self.places = Places(self.of, named, output, logs, prompts)

    def of(self, path: str, *, folder: bool = False) -> str:
        """Return the system's name of a path, or the path unchanged if it has no name there."""
        path = absolute(path)
        if is_windows(path):
            path = translate(path, "windows", []) or path
        name = translate(path, self.system, self._maps)
        if name is None:
            is_folder = folder or not posixpath.splitext(path)[1]
            self.unnamed.add(path if is_folder else posixpath.dirname(path))
        return name or path

    def below(self, name: str) -> str:
        """Return the system's name of a path below the published folder."""
        return self.of(f"{self._folder}/{name}")


class Publication(ABC, Generic[Order]):
    """A run's published folder, `{publish.path}/{run}`; each program has a subclass.

    A block is a folder of one dataset's images at one resolution.

    Attributes:
        order: order of the run, or of a part of it.
        program: section of the configuration with the program's folder.
        names: names of paths on Linux and on Windows.
        attentions: attentions that the program supports.
        modules: attention -> Python module that it needs; empty unless the trainer's machine
            chooses the attention.
        cache_ending: suffix that makes the name of a block the name of its folder of caches.
    """

    attentions: Sequence[str]
    modules: Mapping[str, str]
    cache_ending: ClassVar[str] = ""

    def __init__(self, order: Order) -> None:
        """Begin the publication of a run, or of a part of it; raises ConfigError."""
        if order.program is None:
            hint = f"set {order.section}.path to its folder, which the published scripts go to"
            raise ConfigError("this key is missing", where=order.section, hint=hint)
        self.order, self.program, self.modules = order, order.program, {}
        pairs = [(dataset, size) for dataset in order.datasets for size in order.resolutions]
        blocks = [self.block(*pair) for pair in pairs]
        names = [f"{block}{end}" for block in blocks for end in ("", "_cache", "_control")]
        if len({*names}) < len(names):
            what = f"several of the run's folders have the name {blocks[0]}"
            hint = "name them by `{dataset}/{resolution}`"
            raise ConfigError(what, where="publish.folders", hint=hint)
        self.names = [Names(order, "linux"), Names(order, "windows")]
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
        """Return the settings that shape a block's caches; files appear as their paths."""

    @abstractmethod
    def dataset(self, names: Names) -> str:
        """Return the dataset TOML of a system."""

    @abstractmethod
    def calls(self, names: Names) -> list[Call]:
        """Return the scripts to run, with the paths of a system; the last script trains."""

    def block(self, dataset: str, size: tuple[int, int]) -> str:
        """Return the folder of a dataset's images at a resolution, below the published folder."""
        named = self.order.publish.folders.replace("{dataset}", dataset)
        return named.replace("{resolution}", resolution_name(*size))

    def parts(self) -> list[Self]:
        """Return this publication, and with `publish.each_resolution` one for each resolution.

        They add TOMLs and scripts for parts of the run.
        """
        order, parts = self.order, [self]
        if order.publish.each_resolution and len(order.resolutions) > 1:
            for size in order.resolutions:
                part = {"run": block_name(order.run, size), "resolutions": [size]}
                parts.append(type(self)(order.model_copy(update=part)))
        return parts

    def tomls(self, names: Names) -> dict[str, str]:
        """Return path -> content of a system's dataset TOMLs; the paths are the system's."""
        return {names.places.toml: self.dataset(names)}

    @property
    def attention(self) -> str:
        """Attention in the calls; `sdpa` if the trainer's machine chooses it."""
        trainer = self.order.trainer.attention
        return self.order.publish.attention or ("sdpa" if trainer == "auto" else trainer)

    # -- files for the trainer's machine ----------------------------------------------------------

    def texts(self, *, tomls: str = "", scripts: str = "", batch_scripts: str = "") -> Files:
        """Return the files that the trainer's machine reads: TOMLs, calls and scripts.

        Args:
            tomls: folder of the TOMLs, with a slash at its end; "" for the published folder.
            scripts: folder of the shell scripts, likewise.
            batch_scripts: folder of the batch files, likewise; "" for `scripts`.
        """
        run, place, batches = self.order.run, self.program, batch_scripts or scripts
        name, files = f"train_{run}", Files()
        published, calls = dict[str, object](), list[Call]()
        for names in self.names:
            calls = self.calls(names)
            published[names.system] = {
                "folder": names.of(place.path, folder=True),
                "calls": calls,
                "launcher": self._launcher(names),
            }
            for path, text in self.tomls(names).items():
                files[f"{tomls}{posixpath.basename(path)}"] = text.encode()
        if self.order.trainer.samples.prompts:
            files[f"{run}_prompts.txt"] = prompt_lines(self.order).encode()
        published |= {"program": self.order.name, "attention": self.modules}
        content = f"{json.dumps(published, indent=1, ensure_ascii=False)}\n".encode()
        for folder in (scripts, batches):
            files[f"{folder}{name}.json"] = content
            files[f"{folder}{name}.py"] = Path(__file__).with_name("run_published.py").read_bytes()
        folders = [place.venv] if place.venv else [f"{place.path}/venv", f"{place.path}/.venv"]
        linux, windows = (
            [system.of(folder, folder=True) for folder in folders] for system in self.names
        )
        shells = " ".join(shlex.quote(f"{folder}/bin/python") for folder in linux)
        quoted = [folder.replace("%", "%%").replace("/", "\\") for folder in reversed(windows)]
        choices = "\r\n".join(_CHOICE.format(folder=folder) for folder in quoted)
        options = {name: ""}
        if len(calls) > 1:  # both systems have the same steps
            options[f"cache_{run}"] = " --only-caches"
        for script, option in options.items():
            shell = _SHELL.format(name=name, pythons=shells, option=option)
            batch = _BATCH.replace("\n", "\r\n").format(name=name, pythons=choices, option=option)
            files[f"{scripts}{script}.sh"] = shell.encode()
            files[f"{batches}{script}.bat"] = batch.encode()
        return files

    def _launcher(self, names: Names) -> list[str]:
        config, number = self.order.trainer.accelerate_config, self.order.publish.num_processes
        launcher = ["--mixed_precision", self.order.trainer.mixed_precision]
        if config is not None:
            launcher = ["--config_file", names.of(config)]
        if number:
            launcher += ["--num_processes", str(number)]
            if number > 1:
                launcher.append("--multi_gpu")
        return ["-m", "accelerate.commands.launch", *launcher]

    # -- the checklist ----------------------------------------------------------------------------

    def findings(self, memory: Memo | None = None) -> Iterator[Finding]:
        """Check the publication before anything is encoded or copied."""
        order, attention = self.order, self.attention
        models = [*self.models()]
        for file in models:
            # A file with a doubt may be on the hub, where no path can exist.
            if file.place and not (file.doubt or Path(file.place).exists()):
                yield elsewhere(f"model: {file.key}", file.place)
            else:
                yield model_finding(file)
        yield from self.settings_findings(models)
        if attention not in self.attentions:
            note = f"{order.name} has no {attention}: set `publish.attention` to one of "
            yield Finding("attention", "failed", note + ", ".join(self.attentions))
        else:
            yield Finding("attention", "ok", ", else ".join([*self.modules, attention]))
        yield from self._program_findings(memory)
        config = order.trainer.accelerate_config
        if config is not None and not Path(config).is_file():
            yield elsewhere("accelerate_config", config)
        self.texts()  # asks for the names of all paths, so that `unnamed` is complete
        yield from self._name_findings()

    def _program_findings(self, memory: Memo | None) -> Iterator[Finding]:
        """Check the calls against the program's sources, if this machine has the program."""
        order = self.order
        # Without `venv`: the environment may exist on the trainer's machine only.
        here = {"program": self.program.model_copy(update={"venv": None})}
        try:
            program, findings = order.model_copy(update=here).find(memory), list[Finding]()
            for script, arguments in self.calls(self.names[0]):
                program.script(script)
                findings.append(flags(program, arguments, script))
            if order.trained and order.trainer.network_module is not None:
                module = order.trainer.network_module
                findings.append(network_finding(program, module, here=False))
            yield from [Finding(order.name, "ok", str(program.folder)), *findings]
        except TrainingError as error:
            is_here = Path(self.program.path).expanduser().is_dir()
            yield Finding(order.name, "failed" if is_here else "warning", str(error))

    def _name_findings(self) -> Iterator[Finding]:
        """Report folders without a name on a system, whose script then cannot run.

        A finding has failed if both systems lack names, because then neither script can run.
        """
        is_lost = all(names.unnamed for names in self.names)
        verdict: Verdict = "failed" if is_lost else "warning"
        for names, other in zip(self.names, reversed(self.names), strict=True):
            title, unnamed = names.system.capitalize(), names.unnamed
            if not unnamed:
                yield Finding(f"paths for {title}", "ok", "each has a name there")
            for folder in sorted(unnamed):
                if not any(folder.startswith(f"{outer}/") for outer in unnamed):
                    note = f"{folder} has no name under {title}: it is named as it is; "
                    note += f"add to publish.path_maps: - {{{other.system}: {folder}, "
                    yield Finding(f"paths for {title}", verdict, f"{note}{names.system}: ...}}")

    # -- caches of the trainer's machine ----------------------------------------------------------

    def settings_files(self) -> Files:
        """Return the files with the settings of caches that the trainer's machine makes."""
        files: Files = {}
        for dataset in self.order.datasets:
            for size in self.order.resolutions:
                settings = self.settings(dataset, size)
                folder = f"{self.block(dataset, size)}{self.cache_ending}"
                for name, kind in _SETTINGS.items():
                    if kind in settings:
                        content = f"{json.dumps(settings[kind], sort_keys=True)}\n".encode()
                        files[f"{folder}/{name}"] = content
        return files

    @abstractmethod
    def edited(
        self, base: str, old: Path, new: Path | bytes | None
    ) -> Iterator[tuple[str, Sequence[Kind]]]:
        """Yield the items that are made from a changed file of a block: stem, kinds of caches.

        Args:
            base: path of the file below the block.
            old: path of the published file.
            new: file or content that replaces it; None if it is removed.
        """

    def made_from(self, folder: Path, name: str, new: Path | bytes | None) -> Iterator[Path]:
        """Yield the caches made from a file, which must be deleted before it is replaced.

        Trainers use an existing cache without checking that it is fresh. Caches that the trainer's
        machine made are in no record of ours, so they are found by their names.

        Args:
            folder: published folder.
            name: path of the file below the folder.
            new: file or content that replaces it; None if it is removed.
        """
        *folders, last = name.split("/")
        if made := _SETTINGS.get(last):
            for kinds in self._caches(folder.joinpath(*folders)).values():
                yield from kinds.get(made, ())
        elif not (self.order.publish.caches or name.startswith("/")):  # no TOML or script elsewhere
            # The block may be any of the folders: an earlier publication may have named them
            # otherwise.
            for depth in range(1, len(folders) + 1):
                block, base = "/".join(folders[:depth]), "/".join([*folders[depth:], last])
                place = f"{block.removesuffix('_control')}{self.cache_ending}"
                owned = self._caches(folder / place)
                for stem, stale_kinds in self.edited(base, folder / name, new) if owned else ():
                    for kind in stale_kinds:
                        yield from owned.get(stem, {}).get(kind, ())

    def _caches(self, root: Path) -> Mapping[str, Mapping[Kind, Sequence[Path]]]:
        """Return stem -> kind -> files below a folder that may be caches of that item."""
        if root not in self._listed:
            layout = layout_of(self.order.model.layout_name)
            caches: dict[str, dict[Kind, list[Path]]] = defaultdict(lambda: defaultdict(list))
            for path in root.rglob("*"):
                name = path.relative_to(root).as_posix()
                is_text = layout.text_ending is not None and name.endswith(layout.text_ending)
                for stem in layout.owners(name):
                    caches[stem]["text" if is_text else "latents"].append(path)
            self._listed[root] = caches
        return self._listed[root]


# -- the folder -----------------------------------------------------------------------------------


def files_of(publication: Publication[Any], say: Say | None = None) -> tuple[Path, Files]:
    """Return the published folder of a run and its files; raises UserError, as `publish` does.

    With `say`, the checklist is shown first, and refuses what has failed.
    """
    order, settings = publication.order, publication.order.publish
    folder = Path(_writable(order, settings.path, "path", order.folder), order.folder)
    places = {
        key: f"{_writable(order, place, key)}/"
        for key in ("tomls", "scripts", "batch_scripts")
        if (place := getattr(settings, key))
    }
    if say is not None:
        passed(publication.findings(), say)
    files = publication.members() | ({} if settings.caches else publication.settings_files())
    for part in publication.parts():
        files |= part.texts(**places)
    return folder, files


def differing(publication: Publication[Any]) -> Iterator[tuple[str, str]]:
    """Yield each file that `publish` would write or remove, and what is wrong with it."""
    return unsynced(*files_of(publication))


def publish(publication: Publication[Any], say: Say) -> None:
    """Bring the published folder of a run up to date; copy only changed files.

    Files of an earlier publication that belong to no item any longer are removed; other files stay.

    Raises:
        UserError: a check has failed, a file is missing, or the folder cannot be written.
    """
    run, (folder, files) = publication.order.run, files_of(publication, say)
    for path in files.values():
        # All files are looked for before anything in the folder changes.
        if isinstance(path, Path) and not path.is_file():
            raise SourceError("is not there", where=path, hint="run the same command again")
    dropped: list[Path] = []

    def drop(name: str) -> None:
        for path in publication.made_from(folder, name, files.get(name)):
            if path.is_file():
                path.unlink()
                dropped.append(path)

    with Progress(files, desc=f"publish {run}", unit="file") as bar:
        changes = sync(folder, files, progress=bar, replacing=drop)
    with contextlib.suppress(OSError):  # drives of Windows have no such permission
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
    """Return this machine's name of a folder that can be written.

    Args:
        order: order of the run.
        place: folder as the configuration names it.
        key: key of `publish` that names it.
        name: name of the folder in it that is written; "" for the folder itself.

    Raises:
        ConfigError: the folder has no name on this machine, or must not be written.
    """
    path = absolute(place)
    maps, named = [vars(names) for names in order.publish.path_maps], [path]
    if is_windows(path):
        names_here = (translate(path, system, maps) for system in ("wsl", "linux"))
        named = [translated for translated in names_here if translated is not None]
    here = next(filter(_is_mounted, named), None)
    folder = Path(here or path, name).resolve()
    datasets = order.datasets.values()
    sources = [source for data in datasets for source in (data.folder, data.control_directory)]
    fault = ""
    if not named:
        fault = "has no name on this machine: add it to publish.path_maps, or"
    elif here is None:
        fault = "lies on a drive of Windows that is not mounted: mount it, or"
    elif glob.escape(here) != here:
        fault = f"has one of [ ] * ? in it, with which {order.name} finds nothing:"
    elif any(folder.is_relative_to(Path(source).resolve()) for source in sources if source):
        fault = "lies in a dataset, which would grow by what is published:"
    if fault:
        raise ConfigError(f"{path} {fault} set another folder", where=f"publish.{key}")
    return here or path


def _is_mounted(name: str) -> bool:
    """Whether a path is on no Windows drive (`/mnt/c`), or on a mounted one."""
    return translate(name, "windows", []) is None or Path(*Path(name).parts[:3]).is_dir()
