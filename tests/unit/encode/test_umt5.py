"""umT5 gives Wan's embeddings, whatever form its weights come in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from demo.text import t5_tokenizer
from latentmake.config.weights import TextWeights
from latentmake.encode.encoders.text import TextEncoder, _converted, _inferred, load_umt5
from latentmake.encode.tokenizers import clean_caption
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import (
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
    UMT5ForConditionalGeneration,
)
from wan_world import (
    CAPTIONS,
    State,
    original_umt5,
    refusal,
    save_original,
    shuffled,
    tiny_umt5,
    write_umt5,
)

CPU = torch.device("cpu")
FORMS = ("folder", ".pth", ".safetensors")


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_umt5(tmp_path_factory.mktemp("wan"))


@pytest.fixture(scope="module")
def state() -> State:
    """The weights of the tiny umT5, in the original's names."""
    return original_umt5(tiny_umt5(len(t5_tokenizer(CAPTIONS))).state_dict())


def loaded(
    places: dict[str, Path],
    form: str = "folder",
    dtype: torch.dtype = torch.float32,
    *,
    fp8: bool = False,
    **settings: Any,
) -> TextEncoder:
    weights = TextWeights(
        path=str(places[form]), **{"tokenizer": str(places["tokenizer"]), **settings}
    )
    return load_umt5(weights, CPU, dtype, fp8=fp8)


def states(encoder: TextEncoder, captions: Sequence[str] = CAPTIONS) -> list[torch.Tensor]:
    return [each["hidden_state"] for each in encoder.encode(captions)]


def same(found: TextEncoder, expected: TextEncoder) -> bool:
    """Whether two encoders give the same embeddings to the last bit."""
    return all(map(torch.equal, states(found), states(expected)))


def test_all_forms_give_the_same_embeddings_to_the_last_bit(places: dict[str, Path]) -> None:
    first, *others = (loaded(places, form) for form in FORMS)
    assert [tuple(each.shape) for each in states(first)] == [(4, 24), (8, 24), (1, 24), (41, 24)]
    assert all(each.dtype == torch.bfloat16 for each in states(first))
    assert all(same(other, first) for other in others)
    for network in (each.network for each in (first, *others)):  # the embedding is held once
        assert network.shared.weight.data_ptr() == network.encoder.embed_tokens.weight.data_ptr()
        assert not any(weight.requires_grad for weight in network.parameters())
        assert not network.training


@torch.no_grad()
def test_embeddings_are_those_of_transformers(places: dict[str, Path]) -> None:
    network = UMT5EncoderModel.from_pretrained(places["folder"]).eval()
    for caption, found in zip(CAPTIONS, states(loaded(places, ".pth")), strict=True):
        tokens = t5_tokenizer(CAPTIONS)(caption, return_tensors="pt")["input_ids"]
        expected = network(tokens).last_hidden_state[0]
        # Half a step of bfloat16, which has 8 bits.
        torch.testing.assert_close(found.float(), expected, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_in_8_bits_give_much_the_same(
    places: dict[str, Path], form: str, dtype: torch.dtype
) -> None:
    expected = states(loaded(places, form, dtype))
    found = states(loaded(places, form, dtype, fp8=True))
    for one, two in zip(expected, found, strict=True):
        flat = (each.float().flatten() for each in (one, two))
        assert functional.cosine_similarity(*flat, dim=0) > 0.99
        assert one.shape == two.shape and not torch.equal(one, two)


def test_8_bits_are_kept_as_such_for_linear_layers_alone(
    places: dict[str, Path], state: State
) -> None:
    network = loaded(places, ".pth", torch.bfloat16, fp8=True).network
    linear = [name for name in state if "attn." in name or "ffn." in name]
    packed = {name: value for name, value in network.named_buffers() if "packed" in name}
    assert len(packed) == len(linear) == 3 * 7
    first = packed["encoder.block.0.layer.0.SelfAttention.q.packed"]
    expected = state["blocks.0.attn.q.weight"].to(torch.float8_e4m3fn)
    assert torch.equal(first.view(torch.float8_e4m3fn).float(), expected.float())
    assert {value.dtype for value in network.parameters()} == {torch.bfloat16}
    assert len(list(network.parameters())) == len(state) - len(linear)


@pytest.mark.parametrize(
    ("caption", "cleaned"),
    [
        ("  a  red\n\tcircle ", "a red circle"),
        ("salt &amp;amp; pepper", "salt & pepper"),
        ("schÃ¶n", "schön"),
        ("&amp;lt;b&amp;gt; &nbsp; end", "<b> end"),
        ("“curly” ﬁne", '"curly" fine'),
        ("", ""),
    ],
)
def test_captions_are_cleaned_as_wan_does(caption: str, cleaned: str) -> None:
    assert clean_caption(caption) == cleaned


def test_captions_are_cleaned_counted_whole_and_kept_up_to_the_limit(
    places: dict[str, Path],
) -> None:
    encoder = loaded(places)
    dirty, clean = states(encoder, ["  a   red &amp;amp;\ncircle", "a red & circle"])
    assert torch.equal(dirty, clean)
    assert encoder.tokens.count("  a   red &amp;amp;\ncircle") == len(clean) - 1  # without EOS
    long = "circle " * 600
    assert encoder.tokens.count(long) == 600
    (found,) = states(encoder, [long])
    assert encoder.max_length == 512 and found.shape == (512, 24)
    # The end token is kept.
    assert torch.equal(found, states(encoder, ["circle " * 511])[0])
    assert loaded(places, max_length=1000).max_length == 512
    short = loaded(places, max_length=5)
    assert short.max_length == 5 and [len(each) for each in states(short)] == [4, 5, 1, 5]


def test_a_whole_models_encoder_serves(places: dict[str, Path], tmp_path: Path) -> None:
    torch.manual_seed(0)
    settings = UMT5Config.from_pretrained(places["folder"])
    settings.is_encoder_decoder = True
    whole, part = shuffled(UMT5ForConditionalGeneration(settings)), UMT5EncoderModel(settings)
    whole.save_pretrained(tmp_path / "whole")
    state = whole.state_dict().items()
    part.load_state_dict({x: y for x, y in state if x.startswith(("shared.", "encoder."))})
    part.save_pretrained(tmp_path / "part")
    assert same(*(loaded({**places, "folder": tmp_path / x}) for x in ("whole", "part")))


def test_a_single_file_in_the_names_of_transformers_serves(
    places: dict[str, Path], tmp_path: Path
) -> None:
    state = load_file(places["folder"] / "model.safetensors")
    # ComfyUI's file carries the tokenizer, too.
    save_file(
        {**state, "spiece_model": torch.zeros(9, dtype=torch.uint8)}, tmp_path / "a.safetensors"
    )
    for settings in ({}, {"config": str(places["folder"])}):
        one = loaded({**places, "folder": tmp_path / "a.safetensors"}, **settings)
        assert same(one, loaded(places))


def test_the_true_umt5_is_known_by_its_shapes() -> None:
    true = {
        "vocab_size": 256384, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24,
        "num_heads": 64, "relative_attention_num_buckets": 32, "feed_forward_proj": "gated-gelu",
    }  # fmt: skip
    with torch.device("meta"):
        whole = UMT5EncoderModel(UMT5Config(**true))
    state = original_umt5(whole.state_dict())
    assert len(state) == 242
    assert state["blocks.23.pos_embedding.embedding.weight"].shape == (32, 64)
    assert _inferred(_converted(state)) == true


def test_t5_is_refused(places: dict[str, Path], tmp_path: Path) -> None:
    settings = T5Config(
        vocab_size=30, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    T5EncoderModel(settings).save_pretrained(tmp_path / "t5")
    assert "is t5, not umt5" in refusal(lambda: loaded({**places, "folder": tmp_path / "t5"}))
    single = {**places, "folder": tmp_path / "t5" / "model.safetensors"}
    line = refusal(lambda: loaded(single))
    assert "lacks encoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight" in line


def test_scaled_8_bits_are_refused(places: dict[str, Path], state: State, tmp_path: Path) -> None:
    scaled = {**state, "blocks.0.attn.q.scale_weight": torch.ones(1)}
    paths = save_original(scaled, tmp_path / "scaled")
    assert "in 8 bits with scales" in refusal(lambda: loaded({**places, **paths}, ".pth"))


def test_a_tokenizer_of_the_hub_is_loaded_like_a_folder(places: dict[str, Path]) -> None:
    # What transformers finds on the disk under the id's name it takes from there.
    tokenizer = {
        "hub": str(places["tokenizer"].parent),
        "subfolder": places["tokenizer"].name,
        "revision": "1" * 40,
    }
    assert same(loaded(places, ".pth", tokenizer=tokenizer), loaded(places))
    missing = {**tokenizer, "subfolder": "nowhere"}
    line = refusal(lambda: loaded(places, ".pth", tokenizer=missing))
    assert "cannot be loaded as a tokenizer" in line and tokenizer["hub"] in line
