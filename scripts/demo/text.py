"""Text encoders of the tiny models: tokenizers learnt from captions, and small networks.

The umT5 encoder stays untrained: with a fixed seed, it is a fixed random feature map of the tokens,
and a network can learn from it. The CLIP encoder is trained for some seconds to predict the
pictures of its captions, similar to the original. With it, a UNet follows captions after a tenth
of the steps.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)

from demo.descent import descend

HIDDEN_SIZE = 32
"""Width of the umT5 encoder's states."""

_CLIP_SIZE = 64
_CLIP_BATCH = 32
_CLIP_RATE = 3e-3
_THUMBNAIL = 8  # side of a thumbnail in pixels
_UNKNOWN = 20  # most random letters behind a caption
_TOKENS = 77  # length that CLIP was trained with, and that trainers of Stable Diffusion expect
_CLIP_VOCABULARY = 1024
_CLIP_BOS, _CLIP_EOS = "<|startoftext|>", "<|endoftext|>"
_END_OF_WORD = "</w>"
_START_OF_WORD = "▁"
_T5_TOKENS = 512
_T5_SPECIAL = ("<pad>", "</s>", "<unk>")


def clip_tokenizer(captions: Sequence[str]) -> CLIPTokenizer:
    """Return a CLIP tokenizer with byte pairs learnt from captions.

    As in the original, the vocabulary begins with all 256 bytes and all bytes at the end of a word.
    Therefore no text has an unknown token (source: openai/CLIP, simple_tokenizer.py).
    """
    learner = Tokenizer(models.BPE(end_of_word_suffix=_END_OF_WORD))
    # Split texts in the same way as a CLIP tokenizer, so that it can use the merges.
    own = CLIPTokenizer().backend_tokenizer
    learner.normalizer = own.normalizer
    learner.pre_tokenizer = own.pre_tokenizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    learner.train_from_iterator(
        captions,
        trainers.BpeTrainer(
            vocab_size=_CLIP_VOCABULARY - 2,
            initial_alphabet=alphabet,
            # As special tokens, these have fixed numbers. Otherwise their numbers follow the order
            # of a hash table, which differs each time, and the numbers decide between pairs that
            # are equally frequent.
            special_tokens=[letter + _END_OF_WORD for letter in alphabet],
            end_of_word_suffix=_END_OF_WORD,
            show_progress=False,
        ),
    )
    learnt = json.loads(learner.to_str())["model"]["merges"]
    merges: list[tuple[str, str]] = [(first, second) for first, second in learnt]
    pieces = [*alphabet, *(letter + _END_OF_WORD for letter in alphabet)]
    pieces += [first + second for first, second in merges]
    pieces += [_CLIP_BOS, _CLIP_EOS]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    arguments: dict[str, Any] = {"vocab": vocabulary, "merges": merges}
    return CLIPTokenizer(model_max_length=_TOKENS, **arguments)


def clip_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    """Return an untrained CLIP text encoder: tokens [batch, 77] to [batch, 77, 64].

    The weights come from torch's global generator.
    """
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=_CLIP_SIZE,
        intermediate_size=2 * _CLIP_SIZE,
        projection_dim=_CLIP_SIZE,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=_TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModel(config).eval()


def train_clip(
    encoder: CLIPTextModel, tokens: Tensor, pictures: Tensor, steps: int, generator: torch.Generator
) -> None:
    """Train a CLIP text encoder so that a linear map of its states predicts thumbnails.

    Args:
        encoder: encoder that is changed in place.
        tokens: tokens of the captions, [count, 77].
        pictures: pictures of the captions, [count, 3, height, width].
        steps: number of optimizer steps.
        generator: generator for the batches.
    """
    thumbnails = functional.adaptive_avg_pool2d(pictures, _THUMBNAIL).flatten(1)
    head = nn.Linear(_CLIP_SIZE, thumbnails.shape[1])
    ends = (tokens != tokens[0, -1]).sum(1, keepdim=True)
    # Attention is causal, so the tokens after this length do not affect the states that are used.
    length = int(ends.max()) + _UNKNOWN + 4
    places = torch.arange(length)

    def loss() -> Tensor:
        chosen = torch.randint(len(tokens), (_CLIP_BATCH,), generator=generator)
        # Random letters behind the caption act as an unknown word. The encoder learns to ignore it.
        letters = torch.randint(256, (_CLIP_BATCH, length), generator=generator)
        added = torch.randint(_UNKNOWN + 1, (_CLIP_BATCH, 1), generator=generator)
        unknown = (places >= ends[chosen]) & (places < ends[chosen] + added)
        read = torch.where(unknown, letters, tokens[chosen, :length])
        states = encoder(input_ids=read).last_hidden_state[:, -4:]
        return functional.mse_loss(head(states.mean(1)), thumbnails[chosen])

    both = nn.ModuleList([encoder, head])
    descend(both, loss, steps, name="tiny CLIP", learning_rate=_CLIP_RATE)


def t5_tokenizer(captions: Sequence[str]) -> T5Tokenizer:
    """Return a T5 tokenizer with the words of captions and the printable ASCII letters as pieces.

    The score of a word is the logarithm of its share of all words. Letters score less than any
    word. All other characters become `<unk>`. The trainer of `tokenizers` is not used, because its
    pieces differ from run to run.
    """
    counts = Counter(word.strip(",") for caption in captions for word in caption.split())
    total = sum(counts.values())
    pieces = dict.fromkeys(_T5_SPECIAL, 0.0)
    for word, count in sorted(counts.items(), key=lambda entry: (-entry[1], entry[0])):
        pieces[_START_OF_WORD + word] = math.log(count / total)
    least = min(pieces.values()) - 1
    for letter in (_START_OF_WORD, *map(chr, range(ord("!"), ord("~") + 1))):
        pieces.setdefault(letter, least)
    arguments: dict[str, Any] = {"vocab": list(pieces.items()), "extra_ids": 0}
    return T5Tokenizer(model_max_length=_T5_TOKENS, **arguments)


def umt5_encoder(tokenizer: T5Tokenizer) -> UMT5EncoderModel:
    """Return an untrained umT5 encoder: tokens [batch, length] to [batch, length, `HIDDEN_SIZE`].

    The weights come from torch's global generator.
    """
    config = UMT5Config(
        vocab_size=len(tokenizer),
        d_model=HIDDEN_SIZE,
        d_kv=HIDDEN_SIZE // 4,
        d_ff=2 * HIDDEN_SIZE,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
    )
    return UMT5EncoderModel(config).eval()


def save_slow_files(tokenizer: CLIPTokenizer, folder: Path) -> None:
    """Write `vocab.json` and `merges.txt`, which older loaders of CLIP tokenizers need."""
    model: Any = tokenizer.backend_tokenizer.model
    model.save(str(folder))
