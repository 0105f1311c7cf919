"""Projections after a text encoder: plain ones, a pipeline's own class, and what they rebuild."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from latentmake.base.errors import ModelError
from latentmake.config.models import Model
from latentmake.config.weights import TextWeights
from latentmake.encode.encoders.local_state import write_projection
from latentmake.encode.encoders.text import load_text_encoder
from latentmake.models import cache_recipe
from latentmake.models.files import text_width
from safetensors.torch import load_file, save_file
from test_encoders import CAPTIONS, CPU, t5_tokenizer, tiny

WIDE, NARROW = 16, 6
PIPELINE = """
from diffusers import DiffusionPipeline


class StableDiffusionT5Pipeline(DiffusionPipeline):
    def __init__(self, text_encoder, unet, t5_projection):
        super().__init__()
        self.register_modules(text_encoder=text_encoder, unet=unet, t5_projection=t5_projection)
"""
LAYER = """
import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config


class Projection(ModelMixin, ConfigMixin):
    @register_to_config
    def __init__(self, wide=16, narrow=6, scaling_factor=2.0):
        super().__init__()
        self.first = torch.nn.Linear(wide, wide)
        self.second = torch.nn.Linear(wide, narrow)

    def forward(self, states):
        return self.second(torch.relu(self.first(states))) * self.config.scaling_factor
"""


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    tokenizer = t5_tokenizer(CAPTIONS)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    tiny("t5", len(tokenizer)).save_pretrained(tmp_path / "text_encoder")
    return tmp_path / "text_encoder"


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    """A pipeline's folder whose projection is a class of its own."""
    folder = tmp_path / "pipeline"
    (folder / "t5_projection").mkdir(parents=True)
    (folder / "pipeline.py").write_text(PIPELINE)
    (folder / "t5_projection/layer.py").write_text(LAYER)
    (folder / "t5_projection/config.json").write_text(
        json.dumps(
            {"_class_name": "Projection", "wide": WIDE, "narrow": NARROW, "scaling_factor": 2.0}
        )
    )
    torch.manual_seed(3)
    tensors = {
        "first.weight": torch.randn(WIDE, WIDE),
        "first.bias": torch.randn(WIDE),
        "second.weight": torch.randn(NARROW, WIDE),
        "second.bias": torch.randn(NARROW),
    }
    save_file(tensors, folder / "t5_projection/diffusion_pytorch_model.safetensors")
    (folder / "model_index.json").write_text(
        json.dumps(
            {
                "_class_name": ["pipeline", "StableDiffusionT5Pipeline"],
                "text_encoder": ["transformers", "T5EncoderModel"],
                "unet": ["diffusers", "UNet2DConditionModel"],
                "t5_projection": ["layer", "Projection"],
            }
        )
    )
    return folder


def encode(encoder: Path, **settings: Any) -> list[torch.Tensor]:
    weights = TextWeights(path=str(encoder), **settings)
    loaded = load_text_encoder(weights, CPU, torch.float32)
    return [each["hidden_state"] for each in loaded.encode(CAPTIONS)]


@pytest.mark.parametrize("bias", [True, False])
def test_embeddings_go_through_a_linear_layer(encoder: Path, tmp_path: Path, bias: bool) -> None:
    layer = torch.nn.Linear(WIDE, NARROW, bias=bias)
    write_projection(layer, tmp_path / "projection")
    for place in (tmp_path / "projection", tmp_path / "projection/model.safetensors"):
        projected = encode(encoder, projection=str(place))
        for plain, narrow in zip(encode(encoder), projected, strict=True):
            with torch.no_grad():
                torch.testing.assert_close(narrow, layer(plain), rtol=1e-5, atol=1e-6)


def test_code_of_a_pipeline_runs_only_where_it_is_trusted(encoder: Path, pipeline: Path) -> None:
    with pytest.raises(ModelError, match="trust_remote_code"):
        encode(encoder, projection=str(pipeline))
    projected = encode(encoder, projection=str(pipeline), trust_remote_code=True)
    state = load_file(pipeline / "t5_projection/diffusion_pytorch_model.safetensors")
    for plain, narrow in zip(encode(encoder), projected, strict=True):
        inner = torch.relu(plain @ state["first.weight"].T + state["first.bias"])
        expected = 2 * (inner @ state["second.weight"].T + state["second.bias"])
        torch.testing.assert_close(narrow, expected, rtol=1e-5, atol=1e-5)


def test_a_projection_is_part_of_the_recipe_and_its_width_that_of_caches(
    encoder: Path, pipeline: Path, tmp_path: Path
) -> None:
    def digest(**settings: Any) -> str:
        text = TextWeights(path=str(encoder), **settings)
        return json.dumps(cache_recipe.make("text", None, Model(vae="vae", text=[text])))

    write_projection(torch.nn.Linear(WIDE, NARROW), tmp_path / "a")
    write_projection(torch.nn.Linear(WIDE, NARROW), tmp_path / "b")
    seen = {
        digest(),
        digest(projection=str(tmp_path / "a")),
        digest(projection=str(tmp_path / "b")),
    }
    trusted = {"projection": str(pipeline), "trust_remote_code": True}
    seen.add(digest(**trusted))
    (pipeline / "t5_projection/layer.py").write_text(LAYER.replace("relu", "tanh"))
    seen.add(digest(**trusted))
    assert len(seen) == 5
    assert text_width(TextWeights(path=str(encoder))) == WIDE
    assert text_width(TextWeights(path=str(encoder), projection=str(tmp_path / "a"))) == NARROW
    assert text_width(TextWeights(path=str(encoder), **trusted)) is None
    # Where it lies does not matter.
    (tmp_path / "a").rename(tmp_path / "moved")
    assert digest(projection=str(tmp_path / "moved")) in seen


def test_a_projection_that_is_missing_or_damaged_is_named(
    encoder: Path, pipeline: Path, tmp_path: Path
) -> None:
    (pipeline / "t5_projection/layer.py").write_text("this is no Python")
    (tmp_path / "empty").mkdir()
    for path, words in {
        pipeline: "its projection cannot be loaded",
        tmp_path / "none": "this model does not exist",
        tmp_path / "empty": "holds no projection",
    }.items():
        with pytest.raises(ModelError, match=words) as error:
            encode(encoder, projection=str(path), trust_remote_code=path == pipeline)
        assert "\n" not in str(error.value)
