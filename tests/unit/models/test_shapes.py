"""The shapes that configurations tell are those that the encoders give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from latentmake.config.weights import TextWeights
from latentmake.encode.encoders.text import load_text_encoder
from latentmake.models.files import text_tokens, text_width

CPU = torch.device("cpu")


def configured(folder: Path, config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def text(folder: Path, **more: Any) -> TextWeights:
    return TextWeights(path=str(folder), **more)


@pytest.mark.parametrize("max_length", [None, 20, 200])
def test_embeddings_of_clip_are_as_told(micro: Path, max_length: int | None) -> None:
    place = text(micro / "text_encoder", max_length=max_length)
    (found,) = load_text_encoder(place, CPU, torch.float32).encode(["a red circle"])
    tokens = text_tokens(place)
    assert tokens is not None and tokens[1]
    assert found["hidden_state"].shape == (tokens[0], text_width(place))


def test_embeddings_of_t5_are_as_told(tmp_path: Path) -> None:
    place = configured(tmp_path / "t5", {"model_type": "t5", "d_model": 4096})
    assert text_width(text(place)) == 4096
    assert text_tokens(text(place)) == (512, False)
    assert text_tokens(text(place, max_length=256)) == (256, False)


def test_of_a_whole_clip_the_text_half_counts(tmp_path: Path) -> None:
    half = {"model_type": "clip_text_model", "hidden_size": 768, "max_position_embeddings": 77}
    whole = {"model_type": "clip", "hidden_size": 1024, "text_config": half}
    place = configured(tmp_path / "clip", whole)
    assert text_width(text(place)) == 768
    assert text_tokens(text(place)) == (77, True)


def test_nothing_is_told_of_what_lies_elsewhere(tmp_path: Path) -> None:
    hub = {"hub": "somebody/something", "revision": "1" * 40}
    assert text_width(TextWeights(**hub)) is None
