"""What a trainer is asked to do, as one small file, and the record of what it did.

The planner writes the order without importing torch; the trainer reads nothing else but the
manifest and lock named in it. The record, kept beside the trained weights, says what they were
trained on: as long as it equals what the order asks for, there is nothing to train.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from latentmake import digest
from latentmake.config import SdTrainer, Weights
from latentmake.errors import TrainingError

__all__ = ["Prompt", "TextSchedule", "TrainingOrder", "Wanted", "lock_digest", "read_order"]

_Order = TypeVar("_Order", bound=BaseModel)

# Settings that shape neither the weights nor the pictures.
_BOOKKEEPING = {
    "checkpointing_steps",
    "checkpoints_total_limit",
    "dataloader_num_workers",
    "save_every_n_epochs",
    "save_every_n_steps",
}


class Prompt(BaseModel):
    """A prompt of the sample pictures and the cache file that holds its embedding."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    prompt: str
    text: str


class TextSchedule(BaseModel):
    """How a dataset's variants depend on how far the training is.

    Attributes:
        token_warmup_step: until this step (below 1: this share of all) the first half of the
            variants are used, one after the other; afterwards the others.
        caption_dropout_every_n_epochs: in each epoch whose number (from 1) is a multiple of it, the
            empty caption stands in for all; 0 for none.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    token_warmup_step: float = 0.0
    caption_dropout_every_n_epochs: int = 0


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
        lock: digest of what the manifest names; see `lock_digest`.
        output: folder that gets weights, samples, checkpoints and scalars.
        unet: the network that is trained.
        weights: digest of its files, "" where a rule has yet to make them.
        text_projection: None, `new`, or the path of what is trained from the captions' width to the
            network's.
        scheduler: folder of the noise schedule.
        vae: decoder of the sample pictures, for a process of its own after training.
        prompts: sample pictures to draw; may be empty.
        captions: how many of the manifest's first captions are drawn besides. Which these are, the
            planner cannot know: an item may be set aside before.
        negative: embedding that guidance leads away from; None without guidance.
        sample_size: width and height of the sample pictures, in pixels.
        texts: dataset -> how its variants of texts depend on the step; without those that do not.
        planned: when, in nanoseconds: no two orders are the same file to Snakemake.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    run: str
    manifest: str
    lock: str
    output: str
    unet: Weights
    weights: str
    text_projection: str | None = None
    scheduler: str
    vae: Weights
    prompts: list[Prompt]
    captions: int = 0
    negative: str | None
    sample_size: tuple[int, int]
    trainer: SdTrainer
    texts: dict[str, TextSchedule] = {}
    planned: int = 0

    def settings_digest(self) -> str:
        """Return the digest of all settings that shape the weights or the pictures."""
        settings = self.trainer.model_dump(mode="json", exclude=_BOOKKEEPING)
        texts = {name: each.model_dump() for name, each in self.texts.items()}
        return digest.of_value([settings, self.sample_size, *([texts] if texts else [])])


def read_order(path: Path, kind: type[_Order]) -> _Order:
    """Read a training order that a user may have touched.

    Args:
        path: of the order.
        kind: its class.

    Raises:
        TrainingError: it is missing, or not an order.
    """
    mend = "give the build's command again, which writes it anew"
    try:
        return kind.model_validate_json(path.read_bytes())
    except OSError as error:
        raise TrainingError(
            f"the training order cannot be read ({error.strerror})", where=path, mend=mend
        ) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"])) or "the whole"
        raise TrainingError(
            f"is not a training order ({key}: {first['msg']})", where=path, mend=mend
        ) from None


def lock_digest(path: str) -> str:
    """Return the digest of all keys that a `dataset.lock` holds.

    Raises:
        TrainingError: it is missing or damaged.
    """
    try:
        lock = json.loads(Path(path).read_bytes())
    except (OSError, ValueError):
        lock = None
    if not isinstance(lock, dict) or not isinstance(lock.get("digest"), str):
        raise TrainingError(
            "the lock of the run's caches is missing or damaged",
            where=path,
            mend="delete it, and give the build's command again",
        )
    return str(lock["digest"])
