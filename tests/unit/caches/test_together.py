"""Captions are padded and cut as transformers does it, whichever threads encode them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from demo.text import clip_tokenizer, t5_tokenizer
from hypothesis import assume, given
from hypothesis import strategies as st
from latentmake.caches.encoders import text
from latentmake.caches.tokenizers import TokenCache
from latentmake.config.weights import TextWeights
from text_world import letters, make_texts, model_of
from torch.nn.utils.rnn import pad_sequence
from transformers import ByT5Tokenizer
from wan_world import write_umt5

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
WORDS = [letters(7 * number)[-7:] for number in range(1, 9)]
CAPTIONS = ["", *(" ".join(WORDS[:count]) for count in range(1, 8))]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("together")
    make_texts(folder)
    write_umt5(folder / "wan")
    return folder


def t5(root: Path, dtype: torch.dtype = torch.float32) -> text.TextEncoder:
    return text.load_text_encoder(TextWeights(path=f"{root}/t5/text_encoder"), CPU, dtype)


def of_wan(root: Path, dtype: torch.dtype = torch.float32) -> text.TextEncoder:
    folder = root / "wan"
    weights = TextWeights(path=f"{folder}/text_encoder", tokenizer=f"{folder}/tokenizer")
    return text.load_umt5(weights, CPU, dtype)


@pytest.mark.parametrize("kind", ["T5", "umT5"])
@pytest.mark.parametrize("lengths", [[4, 9, 2], [5, 5, 5]])
@torch.inference_mode()
def test_padding_is_hidden_as_by_a_mask_that_transformers_makes_itself(
    root: Path, kind: str, lengths: list[int]
) -> None:
    network = (t5 if kind == "T5" else of_wan)(root).network
    rows = [torch.arange(3, 3 + length) for length in lengths]
    ids, mask = (
        pad_sequence(x, batch_first=True) for x in (rows, list(map(torch.ones_like, rows)))
    )
    theirs = network(input_ids=ids, attention_mask=mask).last_hidden_state
    for implementation in ("sdpa", "eager"):
        network.set_attn_implementation(implementation)
        ours = network(input_ids=ids, attention_mask=text.hiding(mask, network)).last_hidden_state
        assert torch.allclose(ours, theirs, atol=1e-5)
        assert implementation == "eager" or torch.equal(ours, theirs)


# -- side by side ---------------------------------------------------------------------------------

# Of several lengths, each of them several times.
MIXED = [" ".join(WORDS[at % 7 : at % 7 + 1 + at % 3]) for at in range(24)]


def test_threads_that_encode_side_by_side_change_nothing(root: Path) -> None:
    def bits(found: Any) -> list[bytes]:
        return [each.float().numpy().tobytes() for each in found]

    plain, wan = t5(root), of_wan(root)
    several = text.text_encoders(model_of(root, "flux", t5_length=12), CPU, torch.float32)
    jobs: list[Callable[[str], list[bytes]]] = [
        lambda caption: bits(plain.encode([caption])[0].values()),
        lambda caption: bits(wan.encode([caption])[0].values()),
        lambda caption: bits(several.encode([caption])[0].values()),
        lambda caption: [repr(list(several.cutting(caption))).encode()],
    ]
    work = [(job, caption) for caption in [*MIXED, letters(30)] for job in jobs]
    expected = [job(caption) for job, caption in work]
    with ThreadPoolExecutor(6, initializer=lambda: torch.set_num_threads(1)) as pool:
        found = list(pool.map(lambda each: each[0](each[1]), work))
    assert found == expected


# -- tokens ---------------------------------------------------------------------------------------

TOKENIZERS = {
    "CLIP": clip_tokenizer(CAPTIONS), "T5": t5_tokenizer(CAPTIONS), "ByT5": ByT5Tokenizer()
}  # fmt: skip


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(caption=st.text("ab </s>é,\n<|endoftext|>", max_size=40), longest=st.integers(3, 30))
def test_tokens_are_cut_as_transformers_cuts_them(kind: str, caption: str, longest: int) -> None:
    assume(kind != "ByT5" or "</s>" not in caption)  # it adds no second EOS
    tokenizer = TOKENIZERS[kind]
    whole = tokenizer(caption)["input_ids"]
    cut = tokenizer(caption, truncation=True, max_length=longest, padding="max_length")
    kept = [
        token for token, own in zip(cut["input_ids"], cut["attention_mask"], strict=True) if own
    ]
    cache = TokenCache(tokenizer)  # whose tokenizer was set to cut and pad
    assert cache.ids(caption, longest) == kept
    assert cache.ids(caption) == whole
    bare = tokenizer(caption, add_special_tokens=False)["input_ids"]
    assert cache.count(caption) == len(bare)


def test_a_caption_is_tokenized_once_while_it_is_remembered(root: Path) -> None:
    encoder = t5(root)
    for caption in MIXED * 2:
        encoder.row(caption)
        encoder.encode([caption])
        encoder.tokens.count(caption)
    assert encoder.tokens._uncut.cache_info().misses == len(set(MIXED))
