"""`latentmake init` knows the networks that the trainers themselves make."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from conftest import Weights
from latentmake.trainers.init.local_models import model_at

pytestmark = pytest.mark.real_trainer


@pytest.mark.parametrize(
    "family",
    [
        *("z_image", "flux_kontext", "flux_2_klein_4b", "krea2", "ideogram4", "kandinsky5"),
        *("qwen_image", "qwen_image_edit", "qwen_image_layered"),
    ],
)
def test_a_network_is_known_by_its_tensors(
    tiny_weights: Weights, tmp_path: Path, family: str
) -> None:
    (weights,) = tiny_weights(f"{family}_dit").glob("*.safetensors")
    named = shutil.copy(weights, tmp_path / f"{family}.safetensors")
    assert model_at(Path(named)).architecture.name == family
