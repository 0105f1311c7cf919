"""A part of a checkpoint is the network of a pipeline's folder, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import checkpoint_world
import pytest
import torch
from checkpoint_world import Kind
from latentmake.config.models import Model
from latentmake.config.weights import Weights
from latentmake.encode.encoders.text import text_encoders
from latentmake.trainers.sd.network import load_unet

CPU = torch.device("cpu")
CAPTIONS = ["a red circle", "", "one two three " * 40]


class Written:
    """A small model as a folder and as a file."""

    def __init__(self, root: Path, tokenizer: Path, kind: Kind) -> None:
        self.kind, self.folder, self.file = kind, root / "pipe", root / "model.safetensors"
        checkpoint_world.write(self.folder, self.file, tokenizer, kind)

    def part(self, name: str) -> Weights:
        return Weights(path=str(self.file), subfolder=name)


@pytest.fixture(scope="module", params=["sd1", "sd2", "sdxl"])
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, micro: Path
) -> Written:
    return Written(tmp_path_factory.mktemp(request.param), micro / "tokenizer", request.param)


def test_embeddings_are_those_of_the_folder(written: Written) -> None:
    folders = ["text_encoder", "text_encoder_2"][: 2 if written.kind == "sdxl" else 1]
    for architecture in {written.kind, None if written.kind != "sdxl" else written.kind}:
        own: dict[str, Any] = {"architecture": architecture}
        places = [str(written.folder / name) for name in folders]
        folder = Model.model_validate({"vae": "-", "text": places, **own})
        tokens = {"tokenizer": str(written.folder / "tokenizer")}
        file = Model.model_validate({"checkpoint": str(written.file), "text": tokens, **own})
        both = [text_encoders(model, CPU, torch.float32) for model in (folder, file)]
        for theirs, ours in zip(*(each.encode(CAPTIONS) for each in both), strict=True):
            assert theirs.keys() == ours.keys()
            for name, value in theirs.items():
                if name == "text_encoder_2.pooled":  # one row: its last bit follows the address
                    assert torch.allclose(ours[name], value, atol=1e-5)
                else:
                    assert torch.equal(ours[name], value), name


def test_the_unet_is_that_of_the_folder(written: Written) -> None:
    if written.kind == "sdxl":
        return  # which is refused in both forms
    folder = load_unet(Weights(path=str(written.folder / "unet")))
    file = load_unet(written.part("unet"))
    assert not file.training and {each.dtype for each in file.parameters()} == {torch.float32}
    assert folder.state_dict().keys() == file.state_dict().keys()
    for name, value in folder.state_dict().items():
        assert torch.equal(value, file.state_dict()[name]), name
    noise, text = torch.randn(2, 4, 8, 8), torch.randn(2, 77, folder.config.cross_attention_dim)
    with torch.inference_mode():
        first, second = (unet(noise, 500, text).sample for unet in (folder, file))
    assert torch.equal(first, second)
