"""SLURM resource requests, and the size of jobs."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from latentmake.config.fields import Closed, Number, Real, worded
from latentmake.config.shapes import MACHINE, Shapes


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
