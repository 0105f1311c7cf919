"""`latentmake doctor`: what a bug report needs."""

from __future__ import annotations

import json
import platform
import re
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import typer
import yaml

import latentmake
from latentmake.config.machines import ExternalProgram
from latentmake.errors import UserError
from latentmake.files.workspace import free, human
from latentmake.training.external.installation import proven_commit, said
from latentmake.words.project import opened

_PACKAGES = ("snakemake", "torch", "diffusers", "transformers", "accelerate", "safetensors")
_WIDE = 10_000  # characters of a line
_LINES = 12  # of a log
_ERROR = re.compile(r"(^|\s)error\b|^Traceback|^\w*(Error|Exception)\b", re.IGNORECASE)


def doctor(
    as_json: bool = False,
    configfile: Sequence[Path] | None = None,
    directory: Path | None = None,
) -> None:
    """Print what a bug report needs: versions, GPU, trainers, disk room, the last error."""
    found: dict[str, object] = {"versions": _versions(), "gpu": _gpu()}
    try:
        with opened(configfile, directory) as project:
            config = project.config
            settings = {"musubi_tuner": config.musubi_tuner, "sd_scripts": config.sd_scripts}
            trainers = {name: _trainer(name, each) for name, each in settings.items() if each}
            found["trainers"] = trainers or "none is configured"
    except UserError as error:
        found["configuration"] = str(error)
    found["disk"] = {
        str(Path(name).absolute()): f"{human(free(name))} free" for name in (".", "cache")
    }
    found["last error"] = _last_error()
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    text = yaml.safe_dump(found, sort_keys=False, allow_unicode=True, width=_WIDE)
    typer.echo(text, nl=False)


def _versions() -> dict[str, str]:
    found = {
        "latentmake": f"{latentmake.__version__} in {Path(latentmake.__file__).parent}",
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
    }
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _gpu() -> dict[str, object]:
    """Return the GPUs as torch sees them, and the driver as nvidia-smi does."""
    driver = said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    found: dict[str, object] = {"driver": driver.partition("\n")[0] or "nvidia-smi is not there"}
    try:
        import torch  # takes seconds
    except Exception as error:  # a broken installation is what a report is about
        return {**found, "torch": f"cannot be imported ({error})"}
    builds = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    built = [f"{name} {version}" for name, version in builds.items() if version]
    found["torch"] = "".join(built) or "built without CUDA"
    found["devices"] = [
        f"{each.name}, {human(each.total_memory)}, compute capability {each.major}.{each.minor}"
        for each in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    ]
    if torch.backends.mps.is_available():
        found["devices"] = ["Apple GPU (MPS)"]
    if not found["devices"]:
        found["note"] = "no GPU was found: training will be slow"
    return found


def _trainer(section: str, program: ExternalProgram) -> str:
    """Return the commit of a trainer, and whether it is the one that is proven."""
    folder = Path(program.path).expanduser()
    return f"{folder}: {proven_commit(section, folder).note}"


def _last_error() -> dict[str, list[str]]:
    """Return the end of the newest log with an error; nothing once a build has succeeded since."""
    builds, found = {*Path(".snakemake/log").glob("*.log")}, dict[str, list[str]]()
    logs = [*builds, *Path("logs").rglob("*.log")]
    for log in sorted(logs, key=lambda each: each.stat().st_mtime, reverse=True):
        lines = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").splitlines()
        failed = any(map(_ERROR.search, lines))
        if failed and not (found and log in builds):
            found = {str(log): lines[-_LINES:]}
        if failed != (log in builds):  # a job's log says more than that of its build
            break
    return found
