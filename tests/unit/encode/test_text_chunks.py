"""Each architecture's embeddings are what its rules, read plainly, say they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from latentmake.base.errors import ModelError
from latentmake.config.models import Model
from latentmake.encode import tokenizers
from latentmake.pages import captions
from pydantic import ValidationError
from refusals import refused
from text_world import (
    EXTRA,
    ROUNDING,
    WIDTH,
    Read,
    encoders_of,
    letters,
    make_texts,
    model_of,
    tokenizer_of,
)
from transformers import T5EncoderModel

LENGTHS = (0, 10, 75, 76, 150, 200, 225)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    make_texts(folder)
    return folder


def plain_row(kind: str, caption: str, number: int) -> tuple[list[int], int]:
    """BOS, the caption, EOS and padding, 75n + 2 of them; and how many are no padding."""
    tokenizer = tokenizer_of(kind)
    own = tokenizer(caption, add_special_tokens=False)["input_ids"][: 75 * number]
    row = [tokenizer.bos_token_id, *own, tokenizer.eos_token_id]
    return row + [tokenizer.pad_token_id] * (75 * number + 2 - len(row)), len(row)


def plain_chunks(kind: str, caption: str, number: int) -> list[list[int]]:
    """The chunks that the rules for Stable Diffusion 1 and for the others make of a caption."""
    tokenizer = tokenizer_of(kind)
    end, padding = tokenizer.eos_token_id, tokenizer.pad_token_id
    row, _ = plain_row(kind, caption, number)
    if number == 1:
        return [row]
    chunks = []
    for index in range(number):
        chunk = [row[0], *row[1 + 75 * index : 76 + 75 * index], row[-1]]
        if kind != "clip":
            if chunk[75] != end and chunk[75] != padding:
                chunk[76] = end
            if chunk[1] == padding:
                chunk[1] = end
        chunks.append(chunk)
    return chunks


def plain_states(reads: list[Read], layer: int | None, normalised: bool) -> torch.Tensor:
    """Put the chunks' states together again."""
    states = [each.last if layer is None else each.states[-layer] for each in reads]
    if layer is not None and normalised:
        states = [each.normalised(state) for each, state in zip(reads, states, strict=True)]
    parts = [state[1:76] for state in states]
    return torch.cat([states[0][:1], *parts, states[-1][76:]])


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize(
    ("architecture", "skip"),
    [("sd1", None), ("sd1", 1), ("sd1", 2), ("sd2", None), ("sd2", 3), ("sdxl", None)],
)
def test_hidden_states_and_pooled_are_those_of_a_plain_reading_of_the_rules(
    root: Path, architecture: str, skip: int | None, number: int
) -> None:
    changes = {} if skip is None else {"clip_skip": skip}
    texts = encoders_of(root, architecture, max_token_length=75 * number, **changes)
    captions = [letters(length) for length in LENGTHS]
    kinds = {"sd1": ["clip"], "sd2": ["open"], "sdxl": ["clip", "big"]}[architecture]
    sdxl = architecture == "sdxl"
    for caption, found in zip(captions, texts.encode(captions), strict=True):
        for name, kind in zip(("text_encoder", "text_encoder_2"), kinds, strict=False):
            chunks = plain_chunks(kind, caption, number)
            reads = [Read(root, kind, chunk) for chunk in chunks]
            expected = plain_states(reads, 2 if sdxl else skip, normalised=not sdxl)
            assert expected.shape == (75 * number + 2, WIDTH)
            torch.testing.assert_close(found[f"{name}.hidden_state"], expected, **ROUNDING)
            _, length = plain_row(kind, caption, number)
            mask = found[f"{name}.attention_mask"]
            assert mask.dtype == torch.int64
            assert mask.tolist() == [1] * length + [0] * (75 * number + 2 - length)
            if sdxl and kind == "clip":
                assert f"{name}.pooled" not in found
                continue
            end = reads[0].last[chunks[0].index(tokenizer_of(kind).eos_token_id)]
            pooled = reads[0].projected(end) if sdxl else end
            torch.testing.assert_close(found[f"{name}.pooled"], pooled, **ROUNDING)


def test_the_first_end_is_pooled_whatever_higher_ids_stand_before_it(root: Path) -> None:
    caption = f"a {EXTRA} b"
    (found,) = encoders_of(root, "sdxl").encode([caption])
    (chunk,) = plain_chunks("big", caption, 1)
    assert max(chunk) > tokenizer_of("big").eos_token_id
    read = Read(root, "big", chunk)
    end = read.projected(read.last[chunk.index(tokenizer_of("big").eos_token_id)])
    torch.testing.assert_close(found["text_encoder_2.pooled"], end, **ROUNDING)


@pytest.mark.parametrize("architecture", ["sd1", "sd2", "sdxl"])
def test_auto_gives_each_caption_of_a_batch_as_many_chunks_as_it_needs(
    root: Path, architecture: str
) -> None:
    numbers = {0: 1, 76: 2, 75: 1, 225: 3, 300: 4}
    captions = [letters(length) for length in numbers]
    found = encoders_of(root, architecture, max_token_length="auto").encode(captions)
    for tensors, number, caption in zip(found, numbers.values(), captions, strict=True):
        assert {len(each) for name, each in tensors.items() if "pooled" not in name} == {
            75 * number + 2
        }
        if number < 4:
            fixed = encoders_of(root, architecture, max_token_length=75 * number)
            torch.testing.assert_close(tensors, fixed.encode([caption])[0], **ROUNDING)


def test_a_token_that_the_network_lacks_is_refused_in_a_line(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = encoders_of(root, "sd1")
    (encoder,) = texts._encoders.values()
    embeddings: Any = encoder.network.get_input_embeddings()
    monkeypatch.setattr(embeddings, "weight", torch.nn.Parameter(embeddings.weight[:5]))
    with pytest.raises(ModelError, match=r"has 5 tokens, and its tokenizer gave the number \d+;"):
        texts.encode(["a cat"])


def test_encoders_that_count_differently_get_equally_many_chunks(root: Path) -> None:
    caption = EXTRA * 30  # 90 tokens to one of them, 30 to the other
    texts = encoders_of(root, "sdxl", max_token_length="auto")
    (found,) = texts.encode([caption])
    assert len(found["text_encoder.hidden_state"]) == 75 * 2 + 2
    assert len(found["text_encoder_2.hidden_state"]) == 75 * 2 + 2
    assert list(texts.cutting(caption)) == []


def refusal(root: Path, architecture: str, **changes: Any) -> str:
    return refused(lambda: encoders_of(root, architecture, **changes), kind=ModelError)


def test_what_an_architecture_cannot_use_is_refused_in_a_line(root: Path) -> None:
    encoders_of(root, "sd1", clip_skip=4)
    assert "has 4 layers" in refusal(root, "sd1", clip_skip=5)
    assert "lacks text_projection.weight" in refusal(root, "sdxl", kinds=("clip", "open"))
    assert "its model_type is t5" in refusal(root, "sdxl", kinds=("clip", "t5"))
    assert "its model_type is clip" in refusal(root, "flux", kinds=("clip", "clip"))


@pytest.mark.parametrize("masked", [False, True])
def test_sd3_keeps_both_clips_last_layer_but_one_and_projected_vectors(
    root: Path, masked: bool
) -> None:
    texts = encoders_of(root, "sd3", apply_lg_attn_mask=masked)
    captions = [letters(length) for length in (0, 30, 90)]
    for caption, found in zip(captions, texts.encode(captions), strict=True):
        for name, kind in (("text_encoder", "projecting"), ("text_encoder_2", "big")):
            (chunk,) = plain_chunks(kind, caption, 1)
            _, length = plain_row(kind, caption, 1)
            mask = [1] * length + [0] * (77 - length)
            read = Read(root, kind, chunk, mask if masked else None)
            hidden, pooled = found[f"{name}.hidden_state"], found[f"{name}.pooled"]
            torch.testing.assert_close(hidden, read.states[-2], **ROUNDING)
            end = read.last[chunk.index(tokenizer_of(kind).eos_token_id)]
            torch.testing.assert_close(pooled, read.projected(end), **ROUNDING)
            assert found[f"{name}.attention_mask"].tolist() == mask


@pytest.mark.parametrize("kind", ["clip", "projecting"])
def test_flux_keeps_the_unprojected_vector(root: Path, kind: str) -> None:
    (found,) = encoders_of(root, "flux", kinds=(kind, "t5")).encode([letters(30)])
    (chunk,) = plain_chunks(kind, letters(30), 1)
    read = Read(root, kind, chunk)
    end = read.last[chunk.index(tokenizer_of(kind).eos_token_id)]
    torch.testing.assert_close(found["text_encoder.pooled"], end, **ROUNDING)


@torch.no_grad()
def t5_states(root: Path, ids: list[int], mask: list[int]) -> torch.Tensor:
    model = T5EncoderModel.from_pretrained(root / "t5" / "text_encoder").eval()
    return model(torch.tensor([ids]), torch.tensor([mask])).last_hidden_state[0]


@pytest.mark.parametrize("architecture", ["sd3", "flux"])
def test_t5_is_filled_up_and_sees_the_padding_for_sdscripts_alone(
    root: Path, architecture: str
) -> None:
    name = {"sd3": "text_encoder_3", "flux": "text_encoder_2"}[architecture]
    tokenizer = tokenizers.load(model_of(root, architecture).text[-1])
    captions = [letters(9), letters(12), letters(60)]
    cases: dict[str, dict[str, Any]] = {
        "plain": {},
        "seen": {"layout": "sdscripts"},
        "masked": {"layout": "sdscripts", "apply_t5_attn_mask": True},
    }
    for case, changes in cases.items():
        texts = encoders_of(root, architecture, t5_length=40, **changes)
        for caption, found in zip(captions, texts.encode(captions), strict=True):
            ids = [*tokenizer(caption, add_special_tokens=False)["input_ids"][:39], 1]
            padding = [] if case == "plain" else [0] * (40 - len(ids))
            mask = [1] * len(ids) + [0] * len(padding)
            assert found[f"{name}.attention_mask"].tolist() == mask
            seen = [1] * len(mask) if case == "seen" else mask
            expected = t5_states(root, ids + padding, seen)
            torch.testing.assert_close(found[f"{name}.hidden_state"], expected, **ROUNDING)


def test_what_is_cut_off_is_told_with_its_words() -> None:
    tokenizer = tokenizer_of("clip")
    text = "one, Two, thrée four"  # of 3 + 1 + 3 + 1 + 6 + 4 tokens, é being two bytes
    assert captions.cut(text, tokenizer, None) == (18, 18, "", ())
    assert captions.cut(text, tokenizer, 18) == (18, 18, "", ())
    assert captions.cut(text, tokenizer, 14) == (18, 14, "four", ("four",))
    assert captions.cut(text, tokenizer, 8) == (18, 8, "thrée four", ("thrée", "four"))
    assert captions.cut(text, tokenizer, 5) == (18, 5, "wo, thrée four", ("Two", "thrée", "four"))
    # The first byte of é is kept, the other is not.
    assert captions.cut(text, tokenizer, 12)[2] == "ée four"


def test_a_tokenizer_that_knows_no_places_tells_the_rest_as_it_spells_it() -> None:
    from transformers import ByT5Tokenizer

    tokenizer = ByT5Tokenizer()
    assert not tokenizer.is_fast
    assert captions.cut("one two three", tokenizer, 8) == (13, 8, "three", ("three",))


def test_limits_are_what_the_encoders_keep(root: Path) -> None:
    def told(architecture: str | None, **changes: Any) -> list[tuple[str, int | None]]:
        model = model_of(root, architecture, **changes)
        loaded = encoders_of(root, architecture, **changes)
        found = [*captions.limits(model).items()]
        caption = letters(600)
        assert list(loaded.cutting(caption)) == [each for each in found if each[1] is not None]
        return found

    assert told("sd1") == [("text_encoder", 75)]
    assert told("sdxl", max_token_length=225) == [("text_encoder", 225), ("text_encoder_2", 225)]
    assert told("sd2", max_token_length="auto") == [("text_encoder", None)]
    assert told("flux", t5_length=100) == [("text_encoder", 75), ("text_encoder_2", 99)]
    assert told("flux")[1] == ("text_encoder_2", 511)
    assert told(None, kinds=("clip", "t5")) == [("text_encoder", 75), ("text_encoder_2", 511)]


@pytest.mark.parametrize("content", [None, "{", '{"model": 5}'])
def test_a_tokenizer_that_is_missing_or_damaged_is_named(
    tmp_path: Path, content: str | None
) -> None:
    folder = tmp_path / "clip" / "tokenizer"
    folder.mkdir(parents=True)
    if content is not None:
        (folder / "tokenizer.json").write_text(content)
    place = model_of(tmp_path, "sd1").text[0]
    line = refused(lambda: tokenizers.load(place), kind=ModelError)
    assert line.startswith(f"{tmp_path}/clip/t")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"ai_training": {"text": [".a", ".b"]}}, "leave out `architecture`"),
        ({"text": [{"path": "one", "max_length": 20}, "two"]}, "leave out CLIP-L.s `max_length`"),
    ],
    ids=str,
)
def test_what_contradicts_an_architecture_is_refused(change: dict[str, Any], line: str) -> None:
    model = {"vae": "vae", "text": ["one", "two"], "architecture": "flux"}
    fitting = {
        "ai_training": {"latents": ".a"},
        "text": ["one", {"path": "two", "max_length": 256}],
    }
    Model.model_validate(model | fitting)
    with pytest.raises(ValidationError, match=line):
        Model.model_validate(model | change)
