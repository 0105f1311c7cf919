"""Settings of a user's machines: external programs, publication, store, batches, SLURM."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Annotated, Literal, Self, cast

from pydantic import ByteSize, Field, WithJsonSchema, model_validator

from latentmake.config.fields import (
    MACHINE,
    PUBLICATION,
    BatchSize,
    Closed,
    DiskPath,
    Number,
    Real,
    ResolutionField,
    worded,
)

Resources = dict[str, int | str | Callable[[object, int], int]]
"""Resources of a Snakemake rule: numbers, texts, or functions of wildcards and attempt."""

PROGRAMS = {"musubi": "musubi-tuner", "sdscripts": "sd-scripts"}
"""Kind of a trainer, or layout of a model -> name of the external program."""


class ExternalProgram(Closed, shapes=MACHINE):
    """Installation of sd-scripts."""

    path: DiskPath = Field(min_length=1)
    """Folder of the program: for sd-scripts the one that holds `train_network.py`, for
    musubi-tuner the one that holds `wan_train_network.py` or `src/musubi_tuner/`."""
    venv: DiskPath | None = Field(None, min_length=1)
    """Virtual environment of the program; by default `venv` or `.venv` in its folder."""


class MusubiTuner(ExternalProgram):
    """Installation of musubi-tuner."""

    batch_size: BatchSize | None = None
    """Items that the caching scripts encode at once; by default the choice of each script."""
    num_workers: Number | None = Field(None, ge=1)
    """Threads with which the caching scripts read images; by default the threads of the job."""


class PathMap(Closed, shapes=PUBLICATION):
    """Names of one folder on several systems, at least two of them.

    ```yaml
    path_maps: [{wsl: /home/me/models, windows: 'E:/models', linux: /data/models}]
    ```
    """

    linux: str | None = Field(None, min_length=1)
    """Name of the folder on Linux."""
    windows: str | None = Field(None, min_length=1)
    """Name of the folder on Windows."""
    wsl: str | None = Field(None, min_length=1)
    """Name of the folder in WSL."""

    @model_validator(mode="after")
    def _two_names(self) -> Self:
        if sum(name is not None for name in (self.linux, self.windows, self.wsl)) < 2:
            raise ValueError("needs two of `linux`, `windows` and `wsl`")
        return self


class History(Closed, shapes=MACHINE):
    """Memory of a run's trainings: their items, settings, losses, and a picture of samples."""

    keep: Number = Field(50, ge=1)
    """Number of trainings of a run to remember, in `runs/{run}/history`. A training whose weights
    are in the run's folder is always remembered."""


class Publish(Closed, shapes=PUBLICATION):
    """Folders that `publish_{run}` makes for another machine."""

    path: DiskPath = Field("published", min_length=1)
    """Folder that gets a sub-folder for each published run, such as a Windows drive in WSL:
    `/mnt/d/training`."""
    path_maps: list[PathMap] = Field([])
    """[Names of folders on other systems](#names-of-a-folder). The entry with the longest name
    that fits a path is used. Drives of WSL (`/mnt/d` is `D:`) are known."""
    tomls: DiskPath | None = Field(None, min_length=1)
    """Folder for the dataset TOMLs, such as `files/tomls` in the trainer's folder; by default they
    lie in the published folder."""
    scripts: DiskPath | None = Field(None, min_length=1)
    """Folder for the scripts, such as the trainer's; by default they lie in the published
    folder."""
    batch_scripts: DiskPath | None = Field(None, min_length=1)
    """Folder for the `.bat` files, each with its `.py` and `.json`; by default that of the other
    scripts."""
    folders: str = Field("{dataset}_{resolution}", min_length=1)
    """Name of the folder of a dataset's images at a resolution, below the published folder. The
    caches of `{dataset}/{resolution}` are in `{dataset}/{resolution}_cache`, such as
    `michael_gove/256_cache`. `{resolution}` is enough for a run of one dataset."""
    output: DiskPath | None = Field(None, min_length=1)
    """Folder for the trained weights on the other machine; by default `output` in the published
    folder."""
    logs: DiskPath | None = Field(None, min_length=1)
    """Folder for TensorBoard's files on the other machine; by default `logs` in the published
    folder."""
    each_resolution: bool = False
    """Also publish a dataset TOML and scripts for each resolution of the run, such as
    `train_{run}_512.bat`. It trains `{run}_512` on the images of that resolution only."""
    caches: bool = True
    """Encode here and publish the caches. With `false`, the published scripts make the caches on
    the other machine; see [Without caches](#without-caches)."""
    attention: Literal["sdpa", "flash_attn", "flash3", "xformers", "mem_eff_attn"] | None = None
    """Attention on the machine that trains; by default that of the trainer. If that is `auto`, the
    published script [chooses](#on-the-other-machine). `mem_eff_attn` is for sd-scripts."""
    num_processes: Number | None = Field(None, ge=1)
    """`--num_processes` of `accelerate launch` in the published scripts, with `--multi_gpu` from 2
    on."""
    batch_size: BatchSize | None = None
    """Items that the published scripts encode at once with `caches: false`: `--batch_size` of
    musubi-tuner, whose caching scripts then read a dataset TOML of their own with this size;
    `--vae_batch_size` and `--text_encoder_batch_size` of sd-scripts. By default that of the
    training."""
    num_workers: Number | None = Field(None, ge=1)
    """`--num_workers` of musubi-tuner's caching scripts, with `caches: false`. sd-scripts has no
    such flag."""

    @model_validator(mode="after")
    def _named(self) -> Self:
        bare = self.folders.replace("{dataset}", "a").replace("{resolution}", "a")
        if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)*", bare):
            rule = "is a path of letters, digits, `_`, `-`, `{dataset}` and `{resolution}`"
            raise ValueError(f"`folders` {rule}, not {self.folders}")
        return self


class Export(Closed, shapes=PUBLICATION):
    """Caches that `export_{run}` writes for ai-training."""

    folder: DiskPath | None = Field(None, min_length=1)
    """Folder for the files, with a sub-folder for each dataset; by default they lie beside the
    images. ai-training looks for the images there as well."""
    resolution: ResolutionField | None = None
    """Resolution to export, if the run has several. The file names of ai-training have room for
    only one."""
    overwrite: bool = False
    """Replace files with such names that `export_{run}` did not write."""


_BYTES = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)? *([KMGTP]i?)?B?$"}


class Store(Closed, shapes=MACHINE):
    """Replaced and removed cache files that are kept on this disk."""

    keep: Annotated[
        ByteSize,
        Field(ge=0),
        WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, _BYTES]}),
    ] = Field(cast(ByteSize, "5 GB"), validate_default=True)
    """Largest size of the store, such as `500 MB`. After a successful build the oldest files are
    deleted until the rest fits. `0` keeps nothing. A latent of SDXL at 1024 takes about 260 KB in
    float32."""


class Batch(Closed, shapes=MACHINE):
    """Size of encoding jobs."""

    items: Annotated[
        Annotated[Number, Field(ge=1)] | Literal["auto"], worded("should be 1 or more, or auto")
    ] = 1024
    """Items (images, clips or captions) of one batch. `auto` takes as many as earlier jobs of the
    same model encoded in `minutes`; before there are any, 1024. A batch is never so small that
    starting the job takes more than a tenth of its time."""
    minutes: Real = Field(10, gt=0)
    """Target length of a batch, with `items: auto`."""


class ClusterJob(Closed, shapes=MACHINE):
    """Resources of encoding jobs."""

    partition: str | None = Field(None, min_length=1)
    """Partition of this kind of job; by default that of all jobs."""
    constraint: str | None = Field(None, min_length=1)
    """Features that the node must have, such as `a100` or `"a100|h100"`; by default those of all
    jobs."""
    qos: str | None = Field(None, min_length=1)
    """Quality of service of this kind of job; by default that of all jobs."""
    gpus: Number = Field(1, ge=0)
    """GPUs. With `0`, encoding jobs run on CPUs."""
    cpus: Number = Field(4, ge=1)
    """CPU cores."""
    mem_mb: Number = Field(16_000, ge=1)
    """Memory in megabytes; each retry gets another half of it."""
    runtime: Number = Field(60, ge=1)
    """Time limit in minutes; each retry gets the same again."""


class TrainingJob(ClusterJob):
    """Resources of trainings."""

    gpus: Number = Field(1, ge=0)
    """GPUs. With `0`, trainings run on CPUs."""
    cpus: Number = Field(8, ge=1)
    mem_mb: Number = Field(48_000, ge=1)
    runtime: Number = Field(1440, ge=1)


class Cluster(Closed, shapes=MACHINE):
    """Resources of SLURM jobs."""

    partition: str | None = Field(None, min_length=1)
    """Partition of all jobs."""
    account: str | None = Field(None, min_length=1)
    """SLURM account that is charged."""
    constraint: str | None = Field(None, min_length=1)
    """Features that the nodes of all jobs must have (`sbatch --constraint`), such as `a100`; see
    `sinfo -o "%N %f"`."""
    qos: str | None = Field(None, min_length=1)
    """Quality of service of all jobs (`sbatch --qos`); see `sacctmgr show qos`."""
    encode: ClusterJob = ClusterJob()
    """[Resources of encoding jobs](#encoding-jobs)."""
    train: TrainingJob = TrainingJob()
    """[Resources of trainings](#trainings)."""

    def resources(self, kind: str, seconds: float) -> Resources:
        """Return what a job of a kind (`encode`, `train`) asks of SLURM, in Snakemake's names.

        Its time limit is `runtime` and twice the `seconds` that it is expected to take.
        """
        settings = self.encode if kind == "encode" else self.train
        limit = settings.runtime + 2 * seconds / 60
        resources: Resources = {
            "mem_mb": lambda wildcards, attempt: int(settings.mem_mb * (1 + (attempt - 1) / 2)),
            "runtime": lambda wildcards, attempt: math.ceil(limit * attempt),
        }
        slurm = {
            "slurm_partition": settings.partition or self.partition,
            "slurm_account": self.account,
            "constraint": settings.constraint or self.constraint,
            "qos": settings.qos or self.qos,
        }
        return resources | {name: value for name, value in slurm.items() if value}
