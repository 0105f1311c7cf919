"""Tokenizers without their networks: truncation of captions, and CLIP's chunks.

All counts are of the text's own tokens: without those that a tokenizer puts around them (CLIP's BOS
and EOS, T5's EOS) and without padding. Nothing is imported before a tokenizer is loaded.
"""

from __future__ import annotations

import html
import math
import re
import threading
from array import array
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from latentmake.config.architectures import ClipOutput
from latentmake.config.weights import TextWeights
from latentmake.errors import ModelError, first_line
from latentmake.models.files import tokenizer_files
from latentmake.models.recipe import END_OF_TEXT, pads_with_zero

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHUNK = 75
"""Tokens of a caption that CLIP sees at once, between BOS and EOS."""

_REMEMBERED = 8192  # captions; those that wait to be encoded are half as many at most


def load(weights: TextWeights, clip: ClipOutput | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a text encoder, of its folder or the hub; raises ModelError.

    Args:
        weights: of the text encoder.
        clip: of a CLIP whose captions are read by the released tokenizer, see `released_clip`. Its
            vocabulary is read, and none of the tokens that were added to it.
    """
    from transformers import AutoTokenizer, CLIPTokenizer

    loader: Any = AutoTokenizer  # whose arguments have no types
    options: dict[str, object] = {"local_files_only": True}
    own = weights.tokenizer
    if own is not None and own.hub is not None:
        place = own.hub
        options = {"revision": own.revision, "subfolder": own.subfolder or ""}
    elif weights.hub is None:
        place = str(tokenizer_files(weights)[0].parent)
    else:
        place = weights.hub
        sibling = (weights.subfolder or "").replace("text_encoder", "tokenizer", 1)
        options = {"revision": weights.revision, "subfolder": own.path if own else sibling}
    if clip is not None:
        loader = CLIPTokenizer
        options |= {"added_tokens_decoder": {}, "pad_token": END_OF_TEXT}
    try:
        found: PreTrainedTokenizerBase = loader.from_pretrained(place, **options)
        if clip is not None and clip.padding is not None:
            found.pad_token = found.convert_ids_to_tokens(clip.padding)
        elif clip is None and pads_with_zero(weights):
            # In the pipelines of diffusers this token is never a part of a word.
            found.add_special_tokens({"pad_token": found.convert_ids_to_tokens(0)})
        found("a")  # of a damaged file, some things fail no earlier
        return found
    except Exception as error:  # each of its libraries has its own for a damaged file
        what = f"cannot be loaded as a tokenizer ({first_line(error)})"
        raise ModelError(what, where=place, hint="name the complete folder of one") from None


def clean_caption(caption: str) -> str:
    """Clean a caption as Wan's tokenizer does (source: Wan 2.1, wan/modules/tokenizers.py).

    Broken Unicode is repaired, HTML entities are resolved twice, white space becomes single spaces.
    """
    import ftfy  # which few jobs need

    text = html.unescape(html.unescape(ftfy.fix_text(caption)))
    return re.sub(r"\s+", " ", text).strip()


class TokenCache:
    """Tokens of captions, each tokenized once while it is remembered; for any number of threads.

    Captions are cut afterwards: what is kept are the first tokens of the text between BOS and EOS,
    as with `truncation=True`. transformers changes the settings of a tokenizer by the arguments of
    each call, and a tokenizer that encodes in another thread refuses that ("Already borrowed").

    Args:
        tokenizer: which no other part of the program may use at the same time.
        cleaned: changes captions before.

    Attributes:
        special: number of tokens around a caption: CLIP's BOS and EOS, T5's EOS.
        padding: the token of padding.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, cleaned: Callable[[str], str] = str
    ) -> None:
        self.tokenizer, self._cleaned = tokenizer, cleaned
        self._lock = threading.Lock()
        bare = list(tokenizer("a", add_special_tokens=False)["input_ids"])
        ids = list(tokenizer("a")["input_ids"])
        places = range(len(ids) - len(bare) + 1)
        self._before = next((at for at in places if ids[at : at + len(bare)] == bare), 0)
        self.special = len(ids) - len(bare)
        self.padding = int(tokenizer.pad_token_id or 0)
        self._uncut = lru_cache(_REMEMBERED)(self._tokenized)

    def _tokenized(self, caption: str) -> array[int]:
        with self._lock:
            found = self.tokenizer(self._cleaned(caption), truncation=False, verbose=False)
        return array("i", found["input_ids"])

    def ids(self, caption: str, longest: int | None = None) -> list[int]:
        """Return a caption's tokens with BOS and EOS, `longest` of all at the most."""
        ids = self._uncut(caption)
        if longest is None or len(ids) <= longest:
            return list(ids)
        end = self.special - self._before
        return [*ids[: longest - end], *ids[len(ids) - end :]]

    def count(self, caption: str) -> int:
        """Return how many tokens a caption has, before it is cut."""
        return len(self._uncut(caption)) - self.special


# -- CLIP's chunks --------------------------------------------------------------------------------


class Row(NamedTuple):
    """A caption's tokens for a network; for CLIP in n chunks of 75.

    Attributes:
        ids: of BOS, the caption's tokens, EOS and padding, [75n + 2].
        mask: 1 for each of them but the padding, [75n + 2].
        chunks: what the network sees, [n][77]; for other networks than CLIP one chunk, `ids`.
    """

    ids: list[int]
    mask: list[int]
    chunks: list[list[int]]


def chunks_needed(
    text: str, tokens: Iterable[TokenCache], max_token_length: int | Literal["auto"]
) -> int:
    """Return the number of chunks of a caption.

    Args:
        text: the caption.
        tokens: of all CLIPs of a model, whose hidden states must have one length.
        max_token_length: 75 for each chunk; auto: as many as the longest needs.
    """
    if isinstance(max_token_length, int):
        return max_token_length // CHUNK
    return max(1, math.ceil(max((each.count(text) for each in tokens), default=0) / CHUNK))


def chunked(text: str, tokens: TokenCache, number: int) -> Row:
    """Cut a caption into tokens for CLIP, as sd-scripts does for its `--max_token_length`.

    Each chunk has the whole row's first and last token around it. Where padding is not by EOS
    (Stable Diffusion 2, SDXL's second encoder), a chunk whose text fills it ends in EOS, and one
    that is nothing but padding begins with EOS. One chunk alone is the usual 77 tokens. What does
    not fit into this number of chunks is cut off.
    """
    length = number * CHUNK + 2
    ids = tokens.ids(text, length)
    end, padding = tokens.tokenizer.eos_token_id, tokens.tokenizer.pad_token_id
    mask = [1] * len(ids) + [0] * (length - len(ids))
    ids += [padding] * (length - len(ids))
    chunks = [
        [ids[0], *ids[start : start + CHUNK], ids[-1]] for start in range(1, len(ids) - 1, CHUNK)
    ]
    if number > 1 and padding != end:
        for chunk in chunks:
            if chunk[-2] not in (end, padding):
                chunk[-1] = end
            if chunk[1] == padding:
                chunk[1] = end
    return Row(ids, mask, chunks)
