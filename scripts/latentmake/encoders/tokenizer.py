"""Tokenizers of text encoders, from a folder on disk or from the hub."""

from __future__ import annotations

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from latentmake.config import TextWeights
from latentmake.weights import tokenizer_files, tokenizer_folder

__all__ = ["load_tokenizer"]


def load_tokenizer(weights: TextWeights) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a text encoder.

    Raises:
        ModelError: its files are missing.
        OSError, ValueError: they cannot be read.
    """
    if weights.hub is not None:
        folder = weights.tokenizer or (weights.subfolder or "").replace(
            "text_encoder", "tokenizer", 1
        )
        return AutoTokenizer.from_pretrained(
            weights.hub, revision=weights.revision, subfolder=folder
        )
    tokenizer_files(weights)  # names what is missing
    return AutoTokenizer.from_pretrained(tokenizer_folder(weights), local_files_only=True)
