"""Tokens of a text that each encoder of a model keeps, for pages about captions.

All counts are of the text's own tokens: without those that a tokenizer puts around them (CLIP's BOS
and EOS, T5's EOS) and without padding.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from latentmake.config.models import Model
from latentmake.exchange.shapes import text_tokens
from latentmake.layouts.layout import encoder_name
from latentmake.models.files import T5_LENGTH

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CLIP_SPECIAL, _T5_SPECIAL = 2, 1


class Cut(NamedTuple):
    """Part of a text that an encoder sees.

    Attributes:
        tokens: number in the text.
        kept: number seen, from the first.
        rest: text of the others; empty where all are seen.
        words: words that are not seen completely, without commas.
    """

    tokens: int
    kept: int
    rest: str
    words: tuple[str, ...]


def cut(text: str, tokenizer: PreTrainedTokenizerBase, limit: int | None) -> Cut:
    """Return the parts of a text that an encoder sees and does not see.

    Args:
        text: as the tokenizer gets it; of Wan, after `caches.tokenizers.clean_caption`.
        tokenizer: the encoder's. One without offsets gives the rest in its own spelling.
        limit: tokens that the encoder keeps, as in `limits`; None: all.
    """
    placed = bool(tokenizer.is_fast)
    options = {"add_special_tokens": False, "truncation": False, "verbose": False}
    found = tokenizer(text, return_offsets_mapping=placed, **options)
    ids = found["input_ids"]
    if limit is None or len(ids) <= limit:
        return Cut(len(ids), len(ids), "", ())
    if not placed:
        text, start = tokenizer.decode(ids[limit:], skip_special_tokens=True), 0
    else:
        start = found["offset_mapping"][limit][0]
    words = (each for each in re.finditer(r"[^\s,]+", text) if each.end() > start)
    return Cut(len(ids), limit, text[start:].strip(), tuple(each[0] for each in words))


class Limit(NamedTuple):
    """Number of tokens that an encoder keeps.

    Attributes:
        encoder: its name in cache files, such as text_encoder_2; of Wan, umT5.
        tokens: None where it keeps all, or no configuration on this disk says.
    """

    encoder: str
    tokens: int | None


def limits(model: Model) -> list[Limit]:
    """Return how many tokens each text encoder of a model keeps of a caption.

    Raises:
        ModelError: a configuration cannot be read.
    """
    kinds = model.spec.text_encoders or [""] * len(model.text)
    found = []
    for number, (kind, place) in enumerate(zip(kinds, model.text, strict=True)):
        name, longest = encoder_name(number), place.max_length or T5_LENGTH
        if kind == "umT5":
            found.append(Limit(kind, min(longest, T5_LENGTH) - _T5_SPECIAL))
        elif kind == "T5":
            found.append(Limit(name, longest - _T5_SPECIAL))
        elif kind:
            tokens = model.max_token_length
            found.append(Limit(name, tokens if isinstance(tokens, int) else None))
        elif (own := text_tokens(place)) is None:
            found.append(Limit(name, None))
        else:
            special = _CLIP_SPECIAL if own.padded else _T5_SPECIAL
            found.append(Limit(name, own.longest - special))
    return found
