"""Estimates of the time and size of jobs, from past jobs and from the encoders' configuration.

Before the first job, the encoders' configuration files give the shapes of latents and embeddings.
The size stays unknown until a job has run in three cases: the files are not on this disk, another
program encodes, or the number of tokens depends on the caption (T5).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from math import ceil
from typing import Annotated, NamedTuple, TypeVar

from pydantic import Field, TypeAdapter

from latentmake.base.errors import UserError
from latentmake.config.machines import Cluster, Resources
from latentmake.config.models import Model
from latentmake.data.memo import Memo
from latentmake.models.files import network_config, text_tokens, text_width, vae_factor
from latentmake.plan.orders import Order, Target

_Group = TypeVar("_Group", bound=Hashable)
# Without past jobs: seconds that an item takes, and items of a batch.
_UNKNOWN_SECONDS, _UNKNOWN_ITEMS = 2.0, 1024
_HEADER = 800  # least bytes of a cache file besides its tensors
_BYTES = {"float32": 4}  # bytes of a number; other dtypes have 2
_WAN = 8, 4  # pixels and frames that one latent of Wan's VAE stands for

Amount = Annotated[float, Field(ge=0, le=1e18)]  # a larger value means damage, and would overflow


class Past(NamedTuple):
    """Sums over past jobs of a kind and model; a job counts twice as much as the one before it."""

    targets: Amount = 0.0  # cache files that were encoded, or linked to an equal one
    seconds: Amount = 0.0  # from the first encoded item to the end
    size: Amount = 0.0  # bytes of the files; a file with several names counts once
    starting: Amount = 0.0  # seconds from the start of the last job to its first encoded item
    words: str = ""  # text on the bottleneck of the last job that was not short
    pixels: Amount = 0.0  # pixels of the files; 0 for texts and for jobs of releases before 0.4

    def time(self, targets: float) -> float:
        """Return the seconds that a number of targets takes, without the start of the job."""
        return targets * self.seconds / (self.targets or 1)


_PAST = TypeAdapter(Past).validate_json


def past_jobs(memo: Memo, work: str) -> Past | None:
    """Return the sums over past jobs of a kind and model; None if none has run here."""
    try:
        return _PAST(memo.rates.get(work) or "")
    except ValueError:  # missing, or in the form of an earlier release
        return None


def learn_job(memo: Memo, work: str, job: Past) -> None:
    """Remember a job of a kind and model; ignore it if it encoded no targets."""
    if job.targets > 0 and job.seconds > 0:
        old = past_jobs(memo, work) or Past()
        new = Past(
            old.targets / 2 + job.targets,
            old.seconds / 2 + job.seconds,
            old.size / 2 + job.size,
            job.starting or old.starting,
            job.words or old.words,
            (old.pixels or old.targets * job.pixels / job.targets) / 2 + job.pixels,
        )
        memo.rates.learn(work, None, json.dumps(new._asdict()))


def batch_items(memo: Memo, work: str, minutes: float, targets: float) -> int:
    """Return the number of items that a job of a kind and model encodes in some minutes.

    `targets` is the number of targets per item. A batch is at least so long that starting the job
    takes at most a tenth of its time.
    """
    past = past_jobs(memo, work)
    if past is None:
        return _UNKNOWN_ITEMS
    seconds = max(minutes * 60 - past.starting, 9 * past.starting)
    return max(1, int(seconds / past.time(targets)))


def estimates(
    memo: Memo, orders: Iterable[Order], group: Callable[[Order, str], _Group]
) -> dict[_Group, Past]:
    """Return sums over the targets that some orders encode; `group` maps order and part to a group.

    Seconds are estimated from past jobs. Bytes are estimated from past jobs, or else from the
    shapes of latents and embeddings. Unknown values are 0.
    """
    sums: dict[_Group, Past] = {}
    for order in (order for order in orders if not order.reuses):
        past, parts = past_jobs(memo, order.work), dict[str, list[Target]]()
        for target in order.targets:
            parts.setdefault(target.part, []).append(target)
        for part, targets in parts.items():
            old, number = sums.get(name := group(order, part), Past()), len(targets)
            if past is None:
                seconds, size = 0.0, bytes_of(order, targets)
            else:
                # The ratio of these targets to the past jobs: of pixels if known, else of numbers.
                share, amount = number / (past.targets or 1), sum(t.pixels for t in targets)
                if amount and past.pixels:
                    share = amount / past.pixels
                seconds, size = share * past.seconds, share * past.size
            sums[name] = Past(old.targets + number, old.seconds + seconds, old.size + size)
    return sums


def resources_of(
    cluster: Cluster, kind: str, orders: Sequence[Order], memo: Memo | None
) -> Resources:
    """Return the cluster resources of a job of a kind (`encode`, `train`) with some orders.

    `memo` has the sums over past jobs; None in a process that does not plan.
    """
    past = past_jobs(memo, orders[0].work) if memo is not None and orders else None
    seconds = _UNKNOWN_SECONDS * max(1, sum(len(order.items) for order in orders))
    if past is not None:
        seconds = past.starting + past.time(sum(len(order.paths) for order in orders))
    return cluster.resources(kind, seconds if kind == "encode" else 0.0)


# -- sizes before the first job ------------------------------------------------------------------


def bytes_of(order: Order, targets: Iterable[Target]) -> float:
    """Return the bytes of some targets of an order; 0 if unknown."""
    model, listed = order.model_settings, [*targets]
    numbers: float | None = None
    with suppress(UserError, ValueError, TypeError, KeyError):  # other checks report a bad file
        if not order.is_external:
            is_text = order.kind == "text"
            numbers = _of_texts(model, len(listed)) if is_text else _of_latents(model, listed)
    if numbers is None:
        return 0.0
    copies = 2 if order.kind == "latents" and order.dataset_settings.flip_aug else 1
    size = _BYTES.get(str(order.recipe.get("dtype")), 2)
    return numbers * size * copies + _HEADER * len(listed)


def _of_latents(model: Model, targets: Iterable[Target]) -> float | None:
    """Return the count of numbers in the latents of targets, at their requested sizes."""
    if (config := network_config(model.vae)) is None:
        return None
    channels = int(config.get("z_dim") or config.get("latent_channels", 4))
    factor, span = _WAN if "z_dim" in config else (vae_factor(model.vae), 1)
    total = 0.0
    for target in targets:
        if target.size is None or not factor:
            return None
        frames = ceil((target.clip.frames if target.clip else 1) / span)
        total += channels * frames * target.size.width * target.size.height / factor**2
    return total


def _of_texts(model: Model, count: int) -> float | None:
    """Return the count of numbers in the embeddings of `count` texts."""
    total = 0
    for weights in model.text:
        width, tokens = text_width(weights), text_tokens(weights)
        if width is None or tokens is None or not tokens[1]:
            return None
        total += width * tokens[0]
    return float(total * count)
