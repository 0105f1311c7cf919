"""Estimates of the time and size of targets, from past jobs and from the encoders' configuration.

Before the first job, the encoders' configuration files give the shapes of latents and embeddings.
The size stays unknown until a job has run in three cases: the files are not on this disk, another
program encodes, or the number of tokens depends on the caption (T5).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import ceil
from typing import TypeVar

from latentmake.base.errors import UserError
from latentmake.base.machine import Need, duration, human
from latentmake.config.models import Model
from latentmake.layouts.layout import kind_of
from latentmake.models.files import network_config, text_tokens, text_width, vae_factor
from latentmake.plan.estimates import Past, past_jobs
from latentmake.plan.facts import Facts
from latentmake.plan.judge import PartState
from latentmake.plan.orders import Order, Part, Target

_Group = TypeVar("_Group", bound=Hashable)
_HEADER = 800  # least bytes of a cache file besides its tensors
_BYTES = {"float32": 4}  # bytes of a number; other dtypes have 2
_WAN = 8, 4  # pixels and frames that one latent of Wan's VAE stands for

ToMake = Iterable[tuple[Part, Sequence[Target]]]
"""Targets that would be made, by part."""


def to_make(parts: Mapping[Part, PartState]) -> Iterator[tuple[Part, list[Target]]]:
    """Yield the stale targets of parts."""
    for part, state in parts.items():
        yield part, state.to_make


def ordered(orders: Iterable[Order]) -> Iterator[tuple[Part, list[Target]]]:
    """Yield the targets of orders, by part."""
    for order in orders:
        parts = dict[str, list[Target]]()
        for target in order.targets:
            parts.setdefault(target.part, []).append(target)
        for name, targets in parts.items():
            yield Part(order.dataset, order.model, name), targets


def work_of(part: Part) -> str:
    """Return kind and model of a part, see `Order.work`."""
    return f"{kind_of(part.name)} {part.model}"


def estimates(facts: Facts, made: ToMake, group: Callable[[Part], _Group]) -> dict[_Group, Past]:
    """Return sums over the targets that are encoded, not linked; `group` is the group of a part.

    Seconds are estimated from past jobs. Bytes are estimated from past jobs, or else from the
    shapes of latents and embeddings. Unknown values are 0.
    """
    sums: dict[_Group, Past] = {}
    for part, several in made:
        targets = [target for target in several if not target.at_hand]
        if not targets:
            continue
        past = past_jobs(facts.memo, work_of(part))
        old, number = sums.get(name := group(part), Past()), len(targets)
        if past is None:
            seconds, size = 0.0, bytes_of(facts, part, targets)
        else:
            # The ratio of these targets to the past jobs: of pixels if known, else of numbers.
            share, amount = number / (past.targets or 1), sum(t.pixels for t in targets)
            if amount and past.pixels:
                share = amount / past.pixels
            seconds, size = share * past.seconds, share * past.size
        sums[name] = Past(old.targets + number, old.seconds + seconds, old.size + size)
    return sums


def estimate_lines(facts: Facts, made: ToMake) -> Iterator[str]:
    """Yield a line for each kind and model: estimated time and bytes, where they are known."""
    sums = estimates(facts, made, work_of)
    for work, rest in sums.items():
        what = work.replace(" ", " of ")
        if past := past_jobs(facts.memo, work):
            time = duration((past.starting + rest.seconds) / 60)
            yield f"{what}: about {time}, {human(rest.size)}"
        elif rest.size:
            yield f"{what}: about {human(rest.size)}"


def disk_needs(facts: Facts, made: ToMake) -> list[Need]:
    """Return the disk space that some targets need, as far as it is known."""
    sums = {work: past.size for work, past in estimates(facts, made, work_of).items() if past.size}
    return [Need(work.replace(" ", " of "), "cache", round(sums[work])) for work in sums]


def bytes_of(facts: Facts, part: Part, targets: Sequence[Target]) -> float:
    """Return the bytes of some targets of a part; 0 if unknown."""
    model, data = facts.config.models[part.model], facts.config.datasets.get(part.dataset)
    is_text = kind_of(part.name) == "text"
    numbers: float | None = None
    with suppress(UserError, ValueError, TypeError, KeyError):  # other checks report a bad file
        if facts.config.encoding_program(model) is None:
            numbers = _of_texts(model, len(targets)) if is_text else _of_latents(model, targets)
    if numbers is None:
        return 0.0
    copies = 2 if not is_text and data is not None and data.flip_aug else 1
    recipe = facts.recipe(part.dataset, part.model, kind_of(part.name))
    return numbers * _BYTES.get(str(recipe.get("dtype")), 2) * copies + _HEADER * len(targets)


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
