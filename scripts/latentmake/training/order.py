"""Order of a training, and digests of everything that shapes its result.

The planner writes the order without importing torch; the trainer reads nothing else but the
manifest and lock named in it. The digests are kept beside the trained weights: as long as they
equal those of the order, there is nothing to train.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from latentmake import digest
from latentmake.config import SdTrainer, Weights
from latentmake.config.shapes import shaping
from latentmake.errors import TrainingError
from latentmake.training.json_file import JsonFile

__all__ = [
    "TRAINER_VERSION",
    "Prompt",
    "TextSchedule",
    "TrainingOrder",
    "Wanted",
    "lock_digest",
    "read_order",
    "rows_of",
]

TRAINER_VERSION = 1
"""Raised when the trainer `sd`, given the same, would train other weights, or a default changes."""

_Order = TypeVar("_Order", bound=BaseModel)
_Row = TypeVar("_Row")


class Prompt(BaseModel):
    """A prompt of the sample pictures, and the cache file of its embedding."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    prompt: str
    text: str


class TextSchedule(BaseModel):
    """Dependence of a dataset's caption variants on the step.

    Attributes:
        token_warmup_step: until this step (below 1: this share of all) the first half of the
            variants are used, one after the other; afterwards the others.
        caption_dropout_every_n_epochs: in each epoch whose number (from 1) is a multiple of it, the
            empty caption replaces all; 0 for none.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    token_warmup_step: float = 0.0
    caption_dropout_every_n_epochs: int = 0


class Wanted(JsonFile):
    """Digests of everything that shapes trained weights.

    Attributes:
        data: of the manifest's caches.
        settings: of all settings that shape the weights.
        weights: of the network that is trained, and its noise schedule.
        resumed: of the checkpoint that the training began with; "" for none.
        version: of the trainer; a record without it is of version 1.
    """

    data: str
    settings: str
    weights: str
    resumed: str = ""
    version: int = 1


class TrainingOrder(BaseModel):
    """Everything that the trainer `sd` needs to know; paths are relative to the working directory.

    Attributes:
        run: name of the run.
        manifest: path; one line an item with the paths of its caches.
        lock: path; digest of the caches that the manifest names, see `lock_digest`.
        output: folder of weights, samples, checkpoints and scalars.
        unet: the network that is trained.
        weights: digest of its files, "" where a rule has yet to make them.
        resumed: digest of the checkpoint `resume_from_checkpoint`, "" where there is none yet.
        text_projection: None, `new`, or the path of a projection from the captions' width to the
            network's.
        scheduler: folder of the noise schedule; "" for that of the network's hub repository.
        vae: decoder of the sample pictures, for a process of its own after training.
        prompts: of the sample pictures; may be empty.
        captions: number of the manifest's first captions that are drawn too. The planner cannot
            know them: items may be skipped before.
        negative: embedding that guidance leads away from; None without guidance.
        sample_size: width and height of the sample pictures, in pixels.
        texts: dataset -> dependence of its caption variants on the step, where there is one.
        planned: time, in nanoseconds: no two orders are the same file to Snakemake.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: Literal["sd"] = "sd"
    run: str
    manifest: str
    lock: str
    output: str
    unet: Weights
    weights: str
    resumed: str = ""
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
        """Return the digest of all settings that shape the weights.

        A key with its default is left out: a release that adds keys trains nothing again.
        """
        fields = type(self.trainer).model_fields
        settings = {
            key: value
            for key, value in shaping(self.trainer, "weights").items()
            # Of a checkpoint the content counts, see `Wanted.resumed`.
            if key != "resume_from_checkpoint" and value != fields[key].default
        }
        texts = {name: each.model_dump() for name, each in self.texts.items()}
        return digest.of_value([settings, *([texts] if texts else [])])

    def pictures_digest(self) -> str:
        """Return the digest of all that shapes the sample pictures besides the weights.

        The VAE that decodes them is the one that encoded the data, and counts there.
        """
        samples = self.trainer.samples
        return digest.of_value([self._shown(), samples.prompts, samples.every])

    def picture_keys(self) -> list[str]:
        """Return a digest for each prompt's picture: equal ones of a step are the same picture."""
        shown = self._shown()
        return [digest.of_value([*shown, *each]) for each in self.occurrences()]

    def occurrences(self) -> list[tuple[str, int]]:
        """Return each prompt, and how many equal ones come before it."""
        seen: Counter[str] = Counter()
        found = []
        for each in self.prompts:
            found.append((each.prompt, seen[each.prompt]))
            seen[each.prompt] += 1
        return found

    def _shown(self) -> list[object]:
        """Return the settings that shape each sample picture, besides weights and prompt."""
        samples = self.trainer.samples
        negative = samples.negative_prompt if samples.guidance_scale > 1 else None
        size = [*self.sample_size]
        return [samples.seed, samples.num_inference_steps, samples.guidance_scale, negative, size]


def read_order(path: Path, kind: type[_Order]) -> _Order:
    """Read a training order that a user may have touched.

    Raises:
        TrainingError: it is missing, or not an order.
    """
    hint = "give the build's command again, which writes it anew"
    try:
        return kind.model_validate_json(path.read_bytes())
    except OSError as error:
        raise TrainingError(
            f"the training order cannot be read ({error.strerror})", where=path, hint=hint
        ) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"])) or "the file"
        raise TrainingError(
            f"is not a training order ({key}: {first['msg']})", where=path, hint=hint
        ) from None


def lock_digest(path: str) -> str:
    """Return the digest of all keys that a `dataset.lock` holds, of items that train.

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
            hint="delete it, and give the build's command again",
        )
    return str(lock.get("trained") or lock["digest"])


def rows_of(manifest: Path, kind: Callable[..., _Row]) -> Iterator[_Row]:
    """Yield the items of a run's manifest, without skipped ones.

    Args:
        manifest: one line an item.
        kind: makes a row of a line's values.

    Raises:
        TrainingError: it is missing or damaged.
    """
    try:
        with manifest.open(encoding="utf-8") as lines:
            for line in lines:
                row: dict[str, Any] = json.loads(line)
                if "aside" not in row:
                    yield kind(**row)
    except (OSError, ValueError, TypeError) as error:
        raise TrainingError(
            f"the manifest cannot be read ({error})",
            where=manifest,
            hint="give the build's command again, which writes it anew",
        ) from None
