"""Results of a batch equal those of samples alone to a tolerance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from demo.text import clip_tokenizer, t5_tokenizer
from exact_world import TOLERANCE, error, narrow_vae, pictures
from hypothesis import assume, given
from hypothesis import strategies as st
from latentmake.config.weights import TextWeights
from latentmake.encode.encoders import text
from latentmake.encode.encoders.vae import encode_images
from latentmake.encode.encoders.wan import WanVae
from latentmake.encode.tokenizers import TokenCache
from text_world import letters, make_texts, model_of
from torch.nn.utils.rnn import pad_sequence
from transformers import ByT5Tokenizer
from wan_world import tiny_wan_vae, write_umt5

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
COUNTS = (2, 4, 8)
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


class Case(NamedTuple):
    """An encoder: eight inputs, and its results for some of them in one batch."""

    inputs: Sequence[Any]
    encode: Callable[[Sequence[Any]], list[torch.Tensor]]


def of_pictures(name: str, dtype: torch.dtype) -> Case:
    noise = torch.randint(0, 256, (5, 64, 64, 3), generator=torch.Generator().manual_seed(1))
    inputs = torch.cat([*pictures(64).values(), noise.to(torch.uint8)])
    network = tiny_wan_vae(4) if name == "VAE of Wan" else narrow_vae(flux=name == "VAE of Flux")
    torch.nn.Module.to(network, dtype)  # diffusers' own warns
    if name != "VAE of Wan":
        return Case(inputs, lambda some: list(encode_images(network, torch.stack(list(some)))))
    vae = WanVae(network)
    return Case(
        inputs, lambda some: list(vae.encode(torch.stack(list(some))[:, None], torch.float32))
    )


def of_captions(root: Path, kind: str, dtype: torch.dtype) -> Case:
    if kind == "umT5":
        encoder = of_wan(root, dtype)
        encoder.network.to(dtype)
    elif kind == "CLIP":
        encoder = text.text_encoders(model_of(root, "sd1"), CPU, dtype)._encoders["text_encoder"]
    else:
        encoder = t5(root, dtype)
    return Case(CAPTIONS, lambda some: [each["hidden_state"] for each in encoder.encode(some)])


def case_of(root: Path, name: str, dtype: torch.dtype) -> Case:
    of_a_vae = name.startswith("VAE")
    return of_pictures(name, dtype) if of_a_vae else of_captions(root, name, dtype)


ENCODERS = ("VAE", "VAE of Flux", "VAE of Wan", "CLIP", "T5", "umT5")


@pytest.mark.parametrize("name", ENCODERS)
@torch.inference_mode()
def test_a_batch_differs_from_samples_alone_by_less_than_the_tolerance(
    root: Path, name: str
) -> None:
    exact = case_of(root, name, torch.float64)
    truth = [exact.encode([each])[0] for each in exact.inputs]
    for dtype, tolerance in TOLERANCE.items():
        if name == "umT5":
            tolerance = TOLERANCE[torch.bfloat16]  # in which its results are stored
        case = case_of(root, name, dtype)
        alone = [case.encode([each])[0] for each in case.inputs]
        off = max(error(one, two) for one, two in zip(alone, truth, strict=True))
        for count in COUNTS:
            batch = case.encode(case.inputs[:count])
            for one, two, three in zip(batch, alone, truth, strict=False):
                assert error(one, two.double()) < tolerance
                assert error(one, three) < off + tolerance / 2  # as near to the truth


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
