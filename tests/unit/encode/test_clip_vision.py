"""The CLIP image encoder gives what Wan sees of a first frame, from any form of its weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from latentmake.config.weights import Weights
from latentmake.encode.encoders.wan import ClipVision, _converted, _inferred, load_clip_vision
from safetensors.torch import save_file
from torch.nn import functional
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
)
from wan_world import (
    original_clip,
    refusal,
    save_original,
    shuffled,
    tiny_clip_vision,
    write_clip_vision,
)

CPU = torch.device("cpu")
FORMS = ("folder", ".pth", ".safetensors")
ROUNDING = {"rtol": 2**-9, "atol": 2e-3}  # float16 has 11 bits
WIDTH, SIDE = 160, 28
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
TEXT = {
    "vocab_size": 20, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "max_position_embeddings": 8,
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_clip_vision(tmp_path_factory.mktemp("wan"))


def frames(height: int = 48, width: int = 64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (2, height, width, 3), generator=generator).byte()


def loaded(path: Path, **settings: Any) -> ClipVision:
    return load_clip_vision(Weights(path=str(path), **settings), CPU)


def test_all_forms_give_the_same_to_the_last_bit(places: dict[str, Path]) -> None:
    found = [loaded(places[form]).encode(frames()) for form in FORMS]
    assert found[0].shape == (2, 5, WIDTH)
    assert found[0].dtype == torch.float16
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("size", [(28, 28), (48, 64), (20, 90)])
@torch.no_grad()
def test_it_gives_the_output_of_the_block_before_the_last(
    places: dict[str, Path], size: tuple[int, int]
) -> None:
    signal = frames(*size).permute(0, 3, 1, 2).float() / 127.5 - 1
    signal = functional.interpolate(signal, (SIDE, SIDE), mode="bicubic", align_corners=False)
    mean, std = (torch.tensor(each).reshape(1, 3, 1, 1) for each in (MEAN, STD))
    network = CLIPVisionModel.from_pretrained(places["folder"]).eval()
    states = network(((signal + 1) / 2 - mean) / std, output_hidden_states=True).hidden_states
    found = loaded(places[".pth"]).encode(frames(*size)).float()
    torch.testing.assert_close(found, states[-2], **ROUNDING)
    assert not torch.allclose(found, states[-1], atol=0.1)


def test_the_image_half_of_a_whole_clip_serves(places: dict[str, Path], tmp_path: Path) -> None:
    vision = CLIPVisionConfig.from_pretrained(places["folder"])
    torch.manual_seed(0)
    both = CLIPConfig(text_config=TEXT, vision_config=vision.to_dict(), projection_dim=12)
    models = {"whole": CLIPModel(both), "projected": CLIPVisionModelWithProjection(vision)}
    for name, model in models.items():
        model.vision_model.load_state_dict(tiny_clip_vision().state_dict())
        model.save_pretrained(tmp_path / name)
    # As ComfyUI's clip_vision_h.safetensors has it.
    single = tmp_path / "projected" / "model.safetensors"
    found = [loaded(path) for path in (tmp_path / "whole", tmp_path / "projected", single)]
    found.append(loaded(single, config=str(tmp_path / "projected")))
    expected = loaded(places["folder"]).encode(frames())
    assert all(torch.equal(each.encode(frames()), expected) for each in found)


def test_older_files_of_transformers_with_positions_serve(
    places: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(places["folder"], tmp_path / "clip")
    path = tmp_path / "clip" / "model.safetensors"
    state = {
        f"vision_model.{name}": value for name, value in tiny_clip_vision().state_dict().items()
    }
    state["vision_model.embeddings.position_ids"] = torch.arange(5)[None]
    save_file(state, path)
    expected = loaded(places["folder"]).encode(frames())
    assert torch.equal(loaded(tmp_path / "clip").encode(frames()), expected)


def test_the_true_clip_is_known_by_its_shapes() -> None:
    true = {
        "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32,
        "num_attention_heads": 16, "patch_size": 14, "image_size": 224, "hidden_act": "gelu",
    }  # fmt: skip
    with torch.device("meta"):
        state = original_clip(CLIPVisionModel(CLIPVisionConfig(**true)).state_dict())
    assert state["visual.pos_embedding"].shape == (1, 257, 1280)
    assert state["visual.transformer.31.attn.to_qkv.weight"].shape == (3840, 1280)
    assert _inferred(_converted(state)) == true


def test_another_clip_without_a_configuration_is_refused(tmp_path: Path) -> None:
    settings = CLIPVisionConfig(
        hidden_size=64, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        image_size=28, patch_size=14,
    )  # fmt: skip
    small = shuffled(CLIPVisionModel(settings))
    paths = save_original(original_clip(small.state_dict()), tmp_path / "small")
    assert "width 64, which is no ViT-huge" in refusal(lambda: loaded(paths[".pth"]))
