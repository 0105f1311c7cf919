"""`latentmake doctor`: print the facts that a bug report needs."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import typer
import yaml

import latentmake
from latentmake import backends
from latentmake.base.errors import UserError
from latentmake.base.machine import free, human, said
from latentmake.commands.project import opened, print_json

_PACKAGES = ("snakemake", "torch", "diffusers", "transformers", "accelerate", "safetensors")
_WIDE = 10_000  # characters; long lines are not wrapped, so that paths can be searched and copied
_LINES = 12  # number of lines from the end of a log
_ERROR = re.compile(r"(^|\s)error\b|^Traceback|^\w*(Error|Exception)\b", re.IGNORECASE)


def doctor(
    as_json: bool = False,
    configfile: Sequence[Path] | None = None,
    directory: Path | None = None,
) -> None:
    """Print what a bug report needs: versions, GPU, trainers, disk room, the last error."""
    facts: dict[str, object] = {"versions": _versions(), "gpu": _gpu()}
    try:
        with opened(configfile, directory) as project:
            facts["trainers"] = backends.programs(project.config) or "none is configured"
    except UserError as error:
        facts["configuration"] = str(error)
    folders = (Path(), Path("cache"))
    facts["disk"] = {str(folder.absolute()): f"{human(free(folder))} free" for folder in folders}
    facts["last error"] = _last_error()
    if as_json:
        print_json(facts)
        return
    text = yaml.safe_dump(facts, sort_keys=False, allow_unicode=True, width=_WIDE)
    typer.echo(text, nl=False)


def _versions() -> dict[str, str]:
    versions = {
        "latentmake": f"{latentmake.__version__} in {Path(latentmake.__file__).parent}",
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
    }
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def _gpu() -> dict[str, object]:
    """Return the GPUs that torch reports, and the driver that nvidia-smi reports."""
    driver = said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    facts: dict[str, object] = {"driver": driver.partition("\n")[0] or "nvidia-smi is not there"}
    try:
        import torch  # here, because it takes seconds
    except Exception as error:  # a broken installation may be the reason for the report
        return {**facts, "torch": f"cannot be imported ({error})"}
    builds = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    built = [f"{name} {version}" for name, version in builds.items() if version]
    facts["torch"] = "".join(built) or "built without CUDA"
    facts["devices"] = [
        f"{gpu.name}, {human(gpu.total_memory)}, compute capability {gpu.major}.{gpu.minor}"
        for gpu in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    ]
    if torch.backends.mps.is_available():
        facts["devices"] = ["Apple GPU (MPS)"]
    if not facts["devices"]:
        facts["note"] = "no GPU was found: training will be slow"
    return facts


def _last_error() -> dict[str, list[str]]:
    """Return the end of the newest log with an error; empty if a later build succeeded."""
    builds, end = {*Path(".snakemake/log").glob("*.log")}, dict[str, list[str]]()
    logs = [*builds, *Path("logs").rglob("*.log")]
    for log in sorted(logs, key=lambda log: log.stat().st_mtime, reverse=True):
        lines = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").splitlines()
        failed = any(map(_ERROR.search, lines))
        if failed and not (end and log in builds):
            end = {str(log): lines[-_LINES:]}
        # Stop at a build that succeeded, or at a failed job. After a failed build, look on for the
        # log of its job, which says more.
        if failed != (log in builds):
            break
    return end
