"""sd-scripts' own tool reads the header of our weights."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from conftest import Find
from latentmake.runs.order import RunFiles
from latentmake.trainers.sd.unet import KOHYA_WEIGHTS
from trainer_world import trained

pytestmark = [pytest.mark.real_trainer, pytest.mark.usefixtures("own_folder")]


def test_the_tool_that_shows_metadata_shows_ours(tmp_path: Path, trainer: Find) -> None:
    scripts = trainer("sd-scripts", "train_network.py")
    order = trained(tmp_path, steps=1, title="My cats", trigger="sks cat")
    weights = RunFiles(order).output / KOHYA_WEIGHTS
    (tmp_path / "show.py").write_text(
        "import runpy, sys\n"
        "from library import sai_model_spec\n"
        f"sys.argv[1:] = ['--model', {str(weights)!r}]\n"
        f"runpy.run_path({str(scripts.folder / 'tools/show_metadata.py')!r})\n"
        "metadata = sai_model_spec.load_metadata_from_safetensors(sys.argv[2])\n"
        "print(sai_model_spec.get_title(metadata))\n"
    )
    shown = subprocess.run(
        [scripts.python, "show.py"],
        cwd=tmp_path,
        env=scripts.environment(),
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    said, title = json.JSONDecoder().raw_decode(shown[shown.index("{") :])[0], "My cats"
    assert said["modelspec.title"] == title and said["modelspec.trigger_phrase"] == "sks cat"
    assert said["modelspec.architecture"] == "stable-diffusion-v1/lora"
    assert shown.splitlines()[-1] == title
