"""Our command lines against the argument parsers of real trainers, read from their sources."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

import pytest
from conftest import FOLDERS, PYTHON, sources
from latentmake.config.architectures import ARCHITECTURES
from latentmake.config.datasets import Dataset
from latentmake.config.external_trainers import SdScriptsTrainer
from latentmake.config.machines import ExternalProgram, Publish
from latentmake.config.models import Model
from latentmake.training.external.installation import Installation, Program
from latentmake.training.external.order import Resume
from latentmake.training.external.sdscripts.order import SdScriptsOrder
from latentmake.training.external.sdscripts.order import local_arguments as command_arguments

pytestmark = pytest.mark.real_trainer

ENCODERS = {"sd1": 1, "sd2": 1, "sdxl": 2, "sd3": 3, "flux": 2}
ENCODERS |= {"lumina": 1, "hunyuan_image": 2, "anima": 1}
TEXT_ARGUMENTS = {
    "lumina": ["--system_prompt", "draw", "--gemma2_max_token_length", "64"],
    "anima": ["--qwen3_max_token_length", "64", "--t5_max_token_length", "64"],
}
SCRIPTS = [
    *(("sd1", "train_network"), ("sd1", "fine_tune"), ("sd2", "train_network")),
    *(("sdxl", "sdxl_train_network"), ("sdxl", "sdxl_train")),
    *(("sd3", "sd3_train_network"), ("flux", "flux_train_network")),
    *(("lumina", "lumina_train_network"), ("hunyuan_image", "hunyuan_image_train_network")),
    ("anima", "anima_train_network"),
]


def installation(name: str, script: str) -> Installation:
    program = Program(name, name, FOLDERS[name][1], script, name)
    return Installation.locate(program, os.fspath(sources(name)), PYTHON)


def asked_steps(script: str) -> int:
    text = (sources("sd-scripts") / f"{script}.py").read_text(encoding="utf-8")
    own = re.search(r"^ +train_dataset_group\.verify_bucket_reso_steps\((\d+)\)", text, re.M)
    assert own is not None
    inherits = re.search(r"^ +super\(\)\.assert_extra_args\(", text, re.M)
    return math.lcm(int(own[1]), asked_steps("train_network") if inherits else 1)


@pytest.mark.parametrize(("architecture", "script"), SCRIPTS)
def test_bucket_steps_are_those_that_sd_scripts_asks_for(architecture: str, script: str) -> None:
    row = ARCHITECTURES[architecture]
    assert row.strategies is not None
    assert (row.strategies.divisor or row.bucket_divisor) == asked_steps(script)


@pytest.mark.parametrize(("architecture", "script"), SCRIPTS)
def test_sd_scripts_knows_every_flag(
    architecture: str, script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(4):
        (tmp_path / f"text_{number}.safetensors").write_text("")
    trainer = {
        "script": script,
        "save_every_n_epochs": 1,
        "gradient_checkpointing": True,
        "torch_compile": True,
        "deepspeed": True,
    }
    order = SdScriptsOrder(
        run="cats",
        manifest="manifest.jsonl",
        lock="dataset.lock",
        output="runs/cats",
        datasets={"a": Dataset(path="data")},
        resolutions=[(512, 512)],
        model_name="big",
        model=Model.model_validate(
            {
                "vae": "text_3.safetensors",
                "text": [f"text_{each}.safetensors" for each in range(ENCODERS[architecture])],
                "architecture": architecture,
                "layout": "sdscripts",
                "checkpoint": "base.safetensors",
                "text_arguments": TEXT_ARGUMENTS.get(architecture, []),
            }
        ),
        trainer=SdScriptsTrainer.model_validate({"kind": "sdscripts", **trainer}),
        sd_scripts=ExternalProgram(path="sd-scripts"),
        publish=Publish(),
    )
    program = installation("sd-scripts", f"{script}.py")
    assert program.sources.flags
    counted = script.endswith("_network")
    arguments = command_arguments(order, Resume(Path("state"), 1, counted, 5))
    assert program.missing_flags(arguments) == []
    assert program.missing_flags(["--no_such_flag"]) == ["--no_such_flag"]
