"""SLURM resource requests, and the size of jobs."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from latentmake.config.fields import Closed, Number, Real, worded
from latentmake.config.shapes import MACHINE, Shapes


class Batch(Closed):
    """Size of batches: encoding jobs of a cluster, parts of jobs on one machine."""

    shapes: ClassVar[Shapes] = MACHINE

    items: Annotated[
        Annotated[Number, Field(ge=1)] | Literal["auto"], worded("should be 1 or more, or auto")
    ] = 1024
    """Items (images, captions) of one batch; auto: as many as past jobs of the same model did in
    `minutes`."""
    minutes: Real = Field(10, gt=0)
    """With `items: auto`: how long a batch shall take."""


class ClusterJob(Closed):
    """Resource requests of one kind of job."""

    shapes: ClassVar[Shapes] = MACHINE

    partition: str | None = Field(None, min_length=1)
    """Its partition; by default that of all jobs."""
    gpus: Number = Field(1, ge=0)
    """GPUs of each of its nodes."""
    cpus: Number = Field(4, ge=1)
    """CPU cores."""
    mem_mb: Number = Field(16_000, ge=1)
    """Memory in megabytes; half as much again with each retry."""
    runtime: Number = Field(60, ge=1)
    """Time limit in minutes; as much again with each retry."""


class TrainingJob(ClusterJob):
    """Resource requests of a training."""

    cpus: Number = Field(8, ge=1)
    """CPU cores."""
    mem_mb: Number = Field(48_000, ge=1)
    """Memory in megabytes; half as much again with each retry."""
    runtime: Number = Field(1440, ge=1)
    """Time limit in minutes; as much again with each retry."""
    nodes: Number = Field(1, ge=1)
    """Nodes that train together."""


class Cluster(Closed):
    """SLURM resource requests; ignored for local runs."""

    shapes: ClassVar[Shapes] = MACHINE

    partition: str | None = Field(None, min_length=1)
    """Partition of all jobs."""
    account: str | None = Field(None, min_length=1)
    """Account that is charged."""
    encode: ClusterJob = ClusterJob()
    """Encoding jobs."""
    train: TrainingJob = TrainingJob()
    """Trainings."""
