"""What a trainer is asked to do, as one small file, and the record of what it did.

The planner writes the order without importing torch; the trainer reads nothing else but the
manifest and lock named in it. The record, kept beside the trained weights, says what they were
trained on: as long as it equals what the order asks for, there is nothing to train.
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from latentmake import digest
from latentmake.config import SdTrainer, Weights

__all__ = ["Prompt", "TrainingOrder", "Wanted", "read_lock_digest"]

# Settings that shape neither the weights nor the pictures.
_BOOKKEEPING = {"checkpointing_steps", "checkpoints_total_limit"}


class Prompt(BaseModel):
    """A prompt of the sample pictures and the cache file that holds its embedding."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    prompt: str
    text: str


class Wanted(BaseModel):
    """What trained weights must have come from; the same three digests are their record."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    data: str
    settings: str
    weights: str


class TrainingOrder(BaseModel):
    """All that a trainer needs to know; paths are relative to the working directory.

    Attributes:
        run: name of the run.
        manifest: one line an item with the paths of its caches.
        lock: digest of what the manifest names; see `read_lock_digest`.
        output: folder that gets weights, samples, checkpoints and scalars.
        unet: the network that is trained.
        weights: digest of its files, "" where a rule has yet to make them.
        scheduler: folder of the noise schedule.
        vae: decoder of the sample pictures, for a process of its own after training.
        prompts: sample pictures to draw; may be empty.
        captions: how many of the manifest's first captions are drawn besides. Which these are, the
            planner cannot know: an item may be set aside before.
        negative: embedding that guidance leads away from; None without guidance.
        sample_size: width and height of the sample pictures, in pixels.
        planned: when, in nanoseconds: no two orders are the same file to Snakemake.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    run: str
    manifest: str
    lock: str
    output: str
    unet: Weights
    weights: str
    scheduler: str
    vae: Weights
    prompts: list[Prompt]
    captions: int = 0
    negative: str | None
    sample_size: tuple[int, int]
    trainer: SdTrainer
    planned: int = 0

    @classmethod
    def read(cls, path: Path) -> TrainingOrder:
        """Read an order.

        Raises:
            OSError: it cannot be read.
            pydantic.ValidationError: it is not an order.
        """
        return cls.model_validate_json(path.read_bytes())

    def settings_digest(self) -> str:
        """Return the digest of all settings that shape the weights or the pictures."""
        settings = self.trainer.model_dump(mode="json", exclude=_BOOKKEEPING)
        return digest.of_value([settings, self.sample_size])


def read_lock_digest(path: Path) -> str:
    """Return the digest of all keys that a `dataset.lock` holds.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a lock.
    """
    lock = json.loads(path.read_bytes())
    if not isinstance(lock, dict) or not isinstance(lock.get("digest"), str):
        raise ValueError(f"{path} is not a lock")
    return str(lock["digest"])
