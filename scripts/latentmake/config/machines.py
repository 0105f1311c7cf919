"""Paths and settings of one user's machines: external trainers, publication, S3, folders."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal, Self, cast

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ByteSize,
    Field,
    WithJsonSchema,
    model_validator,
)

from latentmake.config.fields import (
    MACHINE,
    PUBLICATION,
    BatchSize,
    Closed,
    DiskPath,
    Number,
    Real,
    ResolutionField,
    Shapes,
    ascii_digits,
    worded,
)


class ExternalProgram(Closed):
    """Installation of sd-scripts.

    A run with the trainer `sdscripts` or a model with `encoder: sdscripts` needs this section.
    Latentmake reads the files of sd-scripts and runs its scripts in its own environment; it never
    imports them. See [how to install it](../guides/install-trainers.md).

    ```yaml
    sd_scripts: {path: ../sd-scripts}
    ```
    """

    shapes: ClassVar[Shapes] = MACHINE

    path: DiskPath = Field(min_length=1)
    """Folder of the program: for sd-scripts the one that holds `train_network.py`, for
    musubi-tuner the one that holds `wan_train_network.py` or `src/musubi_tuner/`."""
    venv: DiskPath | None = Field(None, min_length=1)
    """Virtual environment of the program; by default `venv` or `.venv` in its folder."""


class MusubiTuner(ExternalProgram):
    """Installation of musubi-tuner.

    A run with the trainer `musubi`, a model with `encoder: musubi`, and `publish_{run}` of such a
    run need this section. Latentmake reads the files of musubi-tuner and runs its scripts in its
    own environment; it never imports them. See [how to install it](../guides/install-trainers.md).

    ```yaml
    musubi_tuner: {path: ../musubi-tuner}
    ```
    """

    batch_size: BatchSize | None = None
    """Items that the caching scripts encode at once; by default the choice of each script."""
    num_workers: Number | None = Field(None, ge=1)
    """Threads with which the caching scripts read images; by default the threads of the job."""


class PathMap(Closed):
    """Names of one folder on several systems, at least two of them.

    ```yaml
    path_maps: [{wsl: /home/me/models, windows: 'E:/models', linux: /data/models}]
    ```
    """

    shapes: ClassVar[Shapes] = PUBLICATION

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


_PLACEHOLDERS = ("run", "dataset", "model", "resolution", "width", "height")


def _folder_pattern(pattern: str) -> str:
    """Refuse a pattern with unknown placeholders, or of more than one folder."""
    known = ", ".join(f"{{{name}}}" for name in _PLACEHOLDERS)
    left = re.sub(rf"\{{({'|'.join(_PLACEHOLDERS)})\}}", "x", pattern)
    if "{" in left or "}" in left:
        raise ValueError(f"has a placeholder that is not known; known: {known}")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", left):
        raise ValueError(
            f"should be a folder's name of letters, digits, `_`, `.`, `-` and the placeholders "
            f"{known}"
        )
    return pattern


class Publish(Closed):
    """Folders that `publish_{run}` makes for another machine.

    `snakemake publish_{run}` makes a folder to copy to the machine that trains. It holds the
    images and captions of each resolution, the caches, a dataset TOML (`{run}_linux.toml`,
    `{run}_win.toml`) and a script (`train_{run}.sh`, `train_{run}.bat`) for each system. For
    sd-scripts the caches lie beside the images, with a `metadata.json`. Only changed files are
    copied. The run needs the trainer `musubi` or `sdscripts`; see the guide [Train on another
    machine](../guides/machine.md).

    ```yaml
    publish: {path: /mnt/d/training, path_maps: [{wsl: /home/me/models, windows: 'E:/models'}]}
    ```

    Before anything is encoded or copied, `publish_{run}` checks:

    - flags and keys of the dataset TOML, against the sources of the trainer;
    - the attention, and model files that lie on this machine;
    - whether each system has a name for every path.

    A path without a name on one system is a warning; it is an error if neither script could run.
    Packages on the other machine cannot be checked.

    ## Without caches

    With `caches: false` nothing is encoded here, so VAE and text encoders need not lie on this
    machine. Images and captions are published with empty cache folders:

    - For musubi-tuner the scripts run its two caching scripts with `--skip_existing` before the
      training.
    - sd-scripts makes its caches beside the images as it starts (`--cache_latents_to_disk`,
      `--cache_text_encoder_outputs_to_disk`), with the VAE of the model.

    Both take any existing cache as up to date. So if you publish again with another image, caption
    or setting, Latentmake removes the caches that were made from it. `latentmake status`, `check`,
    `verify`, `captions` and `report` work without the encoders too; a cache counts as stale if
    only a missing model could tell. If the run cannot be trained here, `latentmake check` shows
    the checklist of its publication.
    """

    shapes: ClassVar[Shapes] = PUBLICATION

    path: DiskPath = Field("published", min_length=1)
    """Folder that gets a sub-folder for each published run, such as a Windows drive in WSL:
    `/mnt/d/training`."""
    path_maps: list[PathMap] = Field([])
    """[Names of folders on other systems](#names-of-a-folder). The entry with the longest name
    that fits a path is used. Drives of WSL (`/mnt/d` is `D:`) are known."""
    caches: bool = True
    """Encode here and publish the caches. With `false`, the published scripts make the caches on
    the other machine; see [Without caches](#without-caches)."""
    attention: Literal["sdpa", "flash_attn", "flash3", "xformers", "mem_eff_attn"] | None = None
    """Attention on the machine that trains; by default that of the trainer, or `sdpa` if it is
    `auto`. `mem_eff_attn` is for sd-scripts."""
    num_processes: Number | None = Field(None, ge=1)
    """`--num_processes` of `accelerate launch` in the published scripts, with `--multi_gpu` from 2
    on."""
    batch_size: BatchSize | None = None
    """Items that the caching steps of the published scripts encode at once: `--batch_size` of
    musubi-tuner, `--vae_batch_size` and `--text_encoder_batch_size` of sd-scripts. By default the
    choice of each script."""
    num_workers: Number | None = Field(None, ge=1)
    """`--num_workers` of musubi-tuner's caching steps in the published scripts. sd-scripts has no
    such flag."""
    powershell: bool = False
    """Also write `train_{run}.ps1`."""
    folder: Annotated[str, AfterValidator(_folder_pattern)] = "{dataset}_{resolution}"
    """Names of the image folders. Placeholders are `{run}`, `{dataset}`, `{model}`,
    `{resolution}`, `{width}` and `{height}`; other characters are letters, digits, `_`, `.` and
    `-`. Folders of caches and control images get the same name with `_cache` and `_control`."""


class Export(Closed):
    """Caches that `export_{run}` writes for ai-training.

    `snakemake export_{run}` brings the caches of a run up to date and writes them as
    [ai-training's](../trainers/ai-training.md) scripts would. Each file lies beside its image and
    has the ending that [`ai_training`](models.md#ai_training) of the model names. Latents and CLIP
    embeddings are float32, T5 embeddings bfloat16. A second `export_{run}` writes only what has
    changed.

    An export does not replace a file that it did not write, unless you set `overwrite`. If such a
    file differs from the cache, and the cache was not adopted from it, the file is named and the
    command fails after all others are written. To make a folder for musubi-tuner or sd-scripts,
    use [`publish`](publish.md).
    """

    shapes: ClassVar[Shapes] = PUBLICATION

    folder: DiskPath | None = Field(None, min_length=1)
    """Folder for the files, with a sub-folder for each dataset; by default they lie beside the
    images. ai-training looks for the images there as well."""
    resolution: ResolutionField | None = None
    """Resolution to export, if the run has several. The file names of ai-training have room for
    only one."""
    overwrite: bool = False
    """Replace files with such names that `export_{run}` did not write, for example those of
    captions that you edited after adoption."""


class Store(Closed):
    """Replaced and removed cache files that are kept on this disk.

    Cache files that a build replaces or removes are moved to `.latentmake/store`. If you undo an
    edit or a setting, or an item returns, they are linked from there instead of being encoded
    again. `latentmake status` prints the used size. You can delete any of it at any time. The
    store is a folder on the disk of the project; it has nothing to do with S3.
    """

    shapes: ClassVar[Shapes] = MACHINE

    keep: Annotated[
        ByteSize,
        BeforeValidator(ascii_digits),
        Field(ge=0),
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "integer", "minimum": 0},
                    {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)? *([KMGTP]i?)?B?$"},
                ]
            }
        ),
    ] = Field(cast(ByteSize, "5 GB"), validate_default=True)
    """Largest size of the store, such as `500 MB`. After a successful build the oldest files are
    deleted until the rest fits. `0` keeps nothing. A latent of SDXL at 1024 takes about 260 KB in
    float32."""


class Batch(Closed):
    """Size of encoding jobs.

    A job loads its model once and encodes a batch of items. On a cluster each batch is a job. On
    one machine one job takes all batches of a model; with several GPUs there is one job for each
    GPU, and batches are smaller if a GPU would have none. A killed job loses only the item that it
    was encoding, whatever the size of the batch.

    This is not the batch size of a training, which is `train_batch_size` or `batch_size` of the
    trainer.
    """

    shapes: ClassVar[Shapes] = MACHINE

    items: Annotated[
        Annotated[Number, Field(ge=1)] | Literal["auto"], worded("should be 1 or more, or auto")
    ] = 1024
    """Items (images, clips or captions) of one batch. `auto` takes as many as earlier jobs of the
    same model encoded in `minutes`; before there are any, 1024. A batch is never so small that
    starting the job takes more than a tenth of its time."""
    minutes: Real = Field(10, gt=0)
    """Target length of a batch, with `items: auto`."""


class ClusterJob(Closed):
    """Resources of encoding jobs."""

    shapes: ClassVar[Shapes] = MACHINE

    partition: str | None = Field(None, min_length=1)
    """Partition of this kind of job; by default that of all jobs."""
    gpus: Number = Field(1, ge=0)
    """GPUs of each node. With `0`, encoding jobs run on CPUs."""
    cpus: Number = Field(4, ge=1)
    """CPU cores."""
    mem_mb: Number = Field(16_000, ge=1)
    """Memory in megabytes; each retry gets another half of it."""
    runtime: Number = Field(60, ge=1)
    """Time limit in minutes; each retry gets the same again."""


class TrainingJob(ClusterJob):
    """Resources of trainings."""

    cpus: Number = Field(8, ge=1)
    """CPU cores."""
    mem_mb: Number = Field(48_000, ge=1)
    """Memory in megabytes; each retry gets another half of it."""
    runtime: Number = Field(1440, ge=1)
    """Time limit in minutes; each retry gets the same again."""
    nodes: Number = Field(1, ge=1)
    """Nodes that train together, each with `gpus`, started by `srun` and `accelerate launch`."""


class Cluster(Closed):
    """Resources of SLURM jobs.

    This section is used only with a profile for a cluster, such as `profiles/slurm`. `encode` and
    `train` set the resources of encoding jobs and trainings. See the guide
    [SLURM](../guides/slurm.md).

    ```yaml
    cluster:
      partition: gpu
      encode: {gpus: 1, cpus: 8, runtime: 120}
      train: {gpus: 4, mem_mb: 96000, runtime: 2880}
    ```

    Each retry of a job gets another half of its memory and another full length of its time limit.
    An encoding job also gets twice the time that earlier jobs of its size took, or 2 seconds an
    item if there are none.
    """

    shapes: ClassVar[Shapes] = MACHINE

    partition: str | None = Field(None, min_length=1)
    """Partition of all jobs."""
    account: str | None = Field(None, min_length=1)
    """SLURM account that is charged."""
    encode: ClusterJob = ClusterJob()
    """[Resources of encoding jobs](#encoding-jobs)."""
    train: TrainingJob = TrainingJob()
    """[Resources of trainings](#trainings)."""
