"""`latentmake new` and `latentmake demo`: make project folders outside of a clone."""

from __future__ import annotations

import shutil
from pathlib import Path
from shlex import quote

from latentmake.base.errors import StorageError
from latentmake.commands.project import HOME, say
from latentmake.data.folders import slug

_IGNORED = """\
# what a build makes
/cache/
/clips/
/runs/
/reports/
/logs/
/benchmarks/
/.latentmake/
/.snakemake/
# weights
/models/
"""
_EMPTY = """\
# The configuration of this project. `latentmake init {pictures} --model models/FILE` writes it for
# your pictures and your model.
"""
_SAMPLE = ("config/config.yaml", "data/michael_gove", "data/tiny-sd")


def new(folder: Path) -> None:
    """Make a folder for a project; raises StorageError if the folder contains files."""
    name = slug(folder.absolute().name)
    pictures = f"pictures/{name}"
    _make(folder)
    for place in (pictures, "models"):
        (folder / place).mkdir(parents=True)
    (folder / f"{name}.yaml").write_text(_EMPTY.format(pictures=pictures))
    say("wrote", f"{folder}: {pictures}/, models/, {name}.yaml, .gitignore")
    say("next", f"put pictures with captions (a.jpg, a.txt) into {folder / pictures}")
    say("next", f"cd {quote(str(folder))} && latentmake init {pictures} --model MODEL")


def demo(folder: Path = Path("latentmake-demo")) -> None:
    """Make a folder with the sample; raises StorageError if the folder contains files."""
    _make(folder)
    for name in _SAMPLE:
        source, target = HOME / name, folder / name
        target.parent.mkdir(exist_ok=True)
        copy = shutil.copytree if source.is_dir() else shutil.copyfile
        copy(source, target)
    say("wrote", f"{folder}: {', '.join(_SAMPLE)}, .gitignore")
    say("next", f"cd {quote(str(folder))} && latentmake build train_michael_gove")


def _make(folder: Path) -> None:
    """Make a folder that has only a .gitignore; raises StorageError if it contains files."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        hint = "name a folder that is not there yet"
        raise StorageError("is not empty", where=folder, hint=hint)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text(_IGNORED)
