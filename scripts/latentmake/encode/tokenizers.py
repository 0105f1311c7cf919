"""Tokenizers without their networks: truncation of captions, and CLIP's chunks.

Counts do not include padding and the tokens that a tokenizer puts around a text (CLIP's BOS and
EOS, T5's EOS). transformers is imported when a tokenizer is loaded.
"""

from __future__ import annotations

import html
import re
from array import array
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from latentmake.base.errors import ModelError, first_line
from latentmake.config.makers import ClipOutput
from latentmake.config.weights import TextWeights
from latentmake.models.cache_recipe import END_OF_TEXT, pads_with_zero
from latentmake.models.files import tokenizer_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHUNK = 75
"""Number of a caption's tokens that CLIP sees at once, between BOS and EOS."""

_REMEMBERED = 8192  # captions; at most half as many wait to be encoded


def load(weights: TextWeights, clip: ClipOutput | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a text encoder from its folder or the hub; raises ModelError.

    Args:
        weights: weights of the text encoder.
        clip: output settings of a CLIP that uses the released tokenizer, see `released_clip`. Then
            only the vocabulary is read; added tokens are ignored.
    """
    from transformers import AutoTokenizer, CLIPTokenizer

    loader: Any = AutoTokenizer  # its arguments have no types
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
        tokenizer: PreTrainedTokenizerBase = loader.from_pretrained(place, **options)
        if clip is not None and clip.padding is not None:
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(clip.padding)
        elif clip is None and pads_with_zero(weights):
            # As a special token it is never part of a word, as in the pipelines of diffusers.
            tokenizer.add_special_tokens({"pad_token": tokenizer.convert_ids_to_tokens(0)})
        tokenizer("a")  # some damage shows only when a text is tokenized
        return tokenizer
    except Exception as error:  # the libraries raise errors of their own types for a damaged file
        what = f"cannot be loaded as a tokenizer ({first_line(error)})"
        raise ModelError(what, where=place, hint="name the complete folder of one") from None


def clean_caption(caption: str) -> str:
    """Clean a caption as Wan's tokenizer does (source: Wan 2.1, wan/modules/tokenizers.py).

    Broken Unicode is repaired, HTML entities are resolved twice, and each run of white space
    becomes a single space.
    """
    import ftfy  # few jobs need it

    text = html.unescape(html.unescape(ftfy.fix_text(caption)))
    return re.sub(r"\s+", " ", text).strip()


class TokenCache:
    """Cache of the tokens of captions; any number of threads may use it.

    The cache keeps complete captions and cuts them afterwards. As with `truncation=True`, the first
    tokens of the text are kept, between BOS and EOS. All calls have the same arguments: other ones
    change the settings of the tokenizer, which fails while another thread encodes ("Already
    borrowed").

    Args:
        tokenizer: tokenizer that nothing else in the program uses.
        cleaned: function that cleans a caption first.

    Attributes:
        special: number of tokens around a caption: CLIP's BOS and EOS, T5's EOS.
        padding: id of the padding token.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, cleaned: Callable[[str], str] = str
    ) -> None:
        self.tokenizer, self._cleaned = tokenizer, cleaned
        bare = list(tokenizer("a", add_special_tokens=False)["input_ids"])
        ids = list(tokenizer("a")["input_ids"])
        places = range(len(ids) - len(bare) + 1)
        self._before = next((at for at in places if ids[at : at + len(bare)] == bare), 0)
        self.special = len(ids) - len(bare)
        self.padding = int(tokenizer.pad_token_id or 0)
        self._uncut = lru_cache(_REMEMBERED)(self._tokenized)

    def _tokenized(self, caption: str) -> array[int]:
        encoding = self.tokenizer(self._cleaned(caption), truncation=False, verbose=False)
        return array("i", encoding["input_ids"])

    def ids(self, caption: str, longest: int | None = None) -> list[int]:
        """Return a caption's tokens with BOS and EOS, at most `longest` in all."""
        ids = self._uncut(caption)
        if longest is None or len(ids) <= longest:
            return list(ids)
        end = self.special - self._before
        return [*ids[: longest - end], *ids[len(ids) - end :]]

    def count(self, caption: str) -> int:
        """Return the number of a caption's tokens before it is cut."""
        return len(self._uncut(caption)) - self.special


# -- CLIP's chunks --------------------------------------------------------------------------------


Row = tuple[list[int], list[list[int]]]
"""Tokens of a caption for a network: their mask (0 for padding), and the ids of each chunk.

A CLIP gets n chunks of 77 ids with a mask of 75n + 2 numbers; other networks get one chunk.
"""


def chunked(text: str, tokens: TokenCache, number: int) -> Row:
    """Cut a caption into chunks of tokens for CLIP, as sd-scripts does for `--max_token_length`.

    Each chunk is put between the first and the last token of the complete row. If the padding token
    is not EOS (Stable Diffusion 2, SDXL's second encoder), a chunk that is full of text ends with
    EOS, and a chunk of padding only begins with EOS. A single chunk is the usual row of 77 tokens.
    Tokens that do not fit into `number` chunks are cut off.
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
    return mask, chunks
