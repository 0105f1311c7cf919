"""A process that has imported Snakemake, torch, what builds on it and Latentmake, and forks.

Importing them takes a job seven times as long as encoding a few tiny pictures. Here Snakemake, the
scripts of its jobs and trainings run in copies of a process that has done that already; nothing
else of them differs. For tests that are not about processes, signals or imports. A project whose
copy of Latentmake was changed imports that copy: see kept_modules.py.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
from pathlib import Path

import fork_server
from kept_modules import KeptModules

VARIABLE = "LATENTMAKE_PRELOADED"
PROBES = "LATENTMAKE_TEST_PROBES"
"""Variable: how often trainings measure the loss at their ends, if not as often as Wan's do."""
OWNER = fork_server.OWNER

SITE = Path(__file__).with_name("preload")


def environment() -> dict[str, str]:
    """Return what makes scripts of a build run in copies of that process; start it if need be."""
    return {VARIABLE: _started(), "PYTHONPATH": str(SITE)}


@functools.cache
def _started() -> str:
    return fork_server.started("latentmake-tests", sys.executable, __file__)


def main(place: str, owner: int) -> None:
    """Import, wait for commands, and run one: only a copy of this process gets beyond `served`."""
    os.environ["SLURM_CONF"] = os.devnull  # as in project.py: its plugin asks for it once

    import accelerate
    import accelerate.commands.launch
    import diffusers
    import matplotlib.backends.backend_agg
    import matplotlib.figure
    import nbformat
    import peft
    import PIL.ImageFont
    import smart_open
    import snakemake.benchmark
    import snakemake.cli
    import snakemake.profiles
    import snakemake.report.html_reporter
    import snakemake.script
    import snakemake.storage
    import snakemake.workflow
    import torch.utils.tensorboard
    import transformers
    from snakemake_interface_executor_plugins.registry import ExecutorPluginRegistry
    from snakemake_interface_logger_plugins.registry import LoggerPluginRegistry
    from snakemake_interface_report_plugins.registry import ReportPluginRegistry
    from snakemake_interface_scheduler_plugins.registry import SchedulerPluginRegistry
    from snakemake_interface_storage_plugins.registry import StoragePluginRegistry

    for name in (
        "CLIPTextModel",
        "CLIPTextModelWithProjection",
        "CLIPTokenizerFast",
        "T5EncoderModel",
        "UMT5EncoderModel",
    ):
        getattr(transformers, name)
    for name in (
        *("AutoencoderKL", "UNet2DConditionModel", "DDPMScheduler", "DDIMScheduler"),
        *("AutoencoderKLWan", "WanTransformer3DModel", "UniPCMultistepScheduler"),
    ):
        getattr(diffusers, name)  # imported when it is looked for
    for registry in (
        ExecutorPluginRegistry,
        LoggerPluginRegistry,
        ReportPluginRegistry,
        SchedulerPluginRegistry,
        StoragePluginRegistry,
    ):
        registry()  # it looks for plugins through all folders that Python knows, once
    del accelerate, matplotlib, nbformat, peft, PIL, smart_open, torch
    kept = KeptModules(Path(__file__).parents[2] / "scripts")
    gc.collect()
    gc.freeze()  # no copy looks through what all of them have
    command = fork_server.served(place, owner)
    kept.probe(int(os.environ.get(PROBES, "16")))
    snakemake.workflow.Workflow._rundir = os.getcwd()  # which it notes when it is imported
    status = fork_server.done(command)
    # The thread that Snakemake would wait for counts a second, for jobs that do not come.
    fork_server.leave(status, threads=command[:2] != ["-m", "snakemake"])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
