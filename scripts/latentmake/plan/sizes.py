"""Size of cache files before the first is encoded, from the encoders' configuration files.

These files give the shapes of latents and embeddings. The size stays unknown until a job has run in
three cases: the files are not on this disk, another program encodes, or the number of tokens
depends on the caption (T5).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from math import ceil

from latentmake.base.errors import UserError
from latentmake.config.models import Model
from latentmake.models.files import network_config, text_tokens, text_width, vae_factor
from latentmake.plan.orders import Order, Target

_HEADER = 800  # least bytes of a cache file besides its tensors
_BYTES = {"float32": 4}  # bytes of a number; other dtypes have 2
_WAN = 8, 4  # pixels and frames that one latent of Wan's VAE stands for


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
