"""An update of the real musubi-tuner: what its caching scripts import makes caches stale."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from conftest import sources
from latentmake.config.machines import ExternalProgram
from latentmake.config.models import Model
from latentmake.trainers.musubi.order import program_digest

pytestmark = [pytest.mark.real_trainer, pytest.mark.usefixtures("own_folder")]


CASES: list[tuple[dict[str, object], str, str, tuple[str, ...]]] = [
    (
        {"architecture": "z_image"},
        "zimage/zimage_autoencoder.py",
        "zimage_cache_text_encoder_outputs.py",
        ("zimage_train_network.py", "zimage/zimage_model.py", "qwen_image/qwen_image_utils.py"),
    ),
    (
        {"architecture": "flux_2_klein_4b", "task": "klein-4b"},
        "flux_2_cache_latents.py",
        "flux_2_cache_text_encoder_outputs.py",
        ("flux_2_train_network.py", "networks/lora_flux_2.py", "networks/lora.py"),
    ),
    (
        {"task": "t2v-14B", "encoder": "musubi"},
        "wan_cache_latents.py",
        "wan_cache_text_encoder_outputs.py",
        ("wan_train_network.py", "wan_generate_video.py", "flux_2_cache_latents.py"),
    ),
]
"""A model, and the files that its latents, its embeddings, and neither of them depend on."""


def append(path: Path) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write("\n# of another version\n")


@pytest.mark.parametrize(("keys", "latents", "text", "neither"), CASES)
def test_a_changed_source_is_told_by_the_caches_that_it_makes(
    keys: dict[str, object], latents: str, text: str, neither: tuple[str, ...], tmp_path: Path
) -> None:
    folder = tmp_path / "musubi-tuner"
    shutil.copytree(sources("musubi-tuner") / "src", folder / "src")
    package = folder / "src/musubi_tuner"
    model = Model.model_validate({"vae": "vae", "text": "text", **keys})
    tuner = ExternalProgram(path=str(folder), venv=sys.prefix)

    def digests() -> dict[str, str]:
        return {kind: program_digest(tuner, model, kind) for kind in ("latents", "text")}

    before = digests()
    for path in neither:
        append(package / path)
    assert digests() == before
    for kind, path in (("latents", latents), ("text", text)):
        append(package / path)
        after = digests()
        assert {each for each in after if after[each] != before[each]} == {kind}
        before = after
