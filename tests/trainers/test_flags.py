"""Our command lines against the argument parsers of real trainers, read from their sources."""

from __future__ import annotations

import ast
import logging
import math
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import PYTHON, sources
from latentmake.config.architectures import ARCHITECTURES, WAN
from latentmake.config.external_trainers import SdScriptsTrainer
from latentmake.config.machines import ExternalProgram
from latentmake.config.makers import Architecture
from latentmake.config.models import Model
from latentmake.trainers.launched.installation import Installation, flags
from latentmake.trainers.launched.order import Resume, prompt_lines
from latentmake.trainers.musubi.command import caching_arguments
from latentmake.trainers.musubi.order import find
from latentmake.trainers.sdscripts.order import training_arguments as command_arguments
from rows_world import make_row_run
from sdscripts_world import order_of

pytestmark = [pytest.mark.real_trainer, pytest.mark.usefixtures("own_folder")]

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
    settings = ExternalProgram(path=os.fspath(sources(name)), venv=PYTHON)
    return Installation.locate(name.replace("-", "_"), settings, script, name)


def asked_steps(script: str) -> int:
    text = (sources("sd-scripts") / f"{script}.py").read_text(encoding="utf-8")
    own = re.search(r"^ +train_dataset_group\.verify_bucket_reso_steps\((\d+)\)", text, re.M)
    assert own is not None
    inherits = re.search(r"^ +super\(\)\.assert_extra_args\(", text, re.M)
    return math.lcm(int(own[1]), asked_steps("train_network") if inherits else 1)


@pytest.mark.parametrize("row", [WAN, *ARCHITECTURES.values()], ids=lambda row: row.name or "wan")
def test_the_scale_of_latents_is_in_the_file_that_the_page_names(row: Architecture) -> None:
    name, below = ("musubi-tuner", "src") if row.versions else ("sd-scripts", "")
    words, file = row.scale
    text = (sources(name) / below / file).read_text(encoding="utf-8")
    numbers = re.findall(r"-?\d+\.\d+|running_\w+", words)
    assert numbers or "no VAE" in words
    assert all(each in text for each in numbers), file
    if not row.versions and row.scaling_factor is not None:
        ours = f"factor {row.scaling_factor}", f"shift {row.shift_factor}"
        assert all(each in words for each in ours[: 1 + bool(row.shift_factor)])


@pytest.mark.parametrize(("architecture", "script"), SCRIPTS)
def test_bucket_steps_are_those_that_sd_scripts_asks_for(architecture: str, script: str) -> None:
    row = ARCHITECTURES[architecture]
    assert (row.strategies.divisor or row.bucket_divisor) == asked_steps(script)


@pytest.mark.parametrize(("architecture", "script"), SCRIPTS)
def test_sd_scripts_knows_every_flag(architecture: str, script: str, tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"text_{number}.safetensors").write_text("")
    trainer = {
        "script": script,
        "save_every_n_epochs": 1,
        "gradient_checkpointing": True,
        "torch_compile": True,
        "deepspeed": True,
        "samples": {"prompts": ["a cat"]},
    }
    model = {"vae": "text_3.safetensors", "text_arguments": TEXT_ARGUMENTS.get(architecture, [])}
    order = order_of(architecture, trainer=trainer, model=model)
    program = installation("sd-scripts", f"{script}.py")
    assert program.sources_of()[0]
    counted = script.endswith("_network")
    arguments = command_arguments(
        order, order.places, order.trainer.attention, Resume(Path("state"), 1, counted, 5)
    )
    assert flags(program, arguments).verdict == "ok"
    assert "does not know --no_such_flag:" in flags(program, ["--no_such_flag"]).note


@pytest.mark.parametrize(
    ("program", "module", "scale", "frames"),
    [
        ("musubi-tuner", "src/musubi_tuner/training/sampling_prompts.py", "cfg_scale", 17),
        ("sd-scripts", "library/train_util.py", "scale", None),
    ],
)
def test_a_line_of_the_prompt_file_says_what_samples_say(
    program: str,
    module: str,
    scale: str,
    frames: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both programs' own parsers of the file, alone: their modules import far more."""
    samples: dict[str, Any] = {
        "prompts": ["a cat\nsleeps", "a dog --D 7", "#1 dad"],
        "negative_prompt": "grey,\n  dull\n",
        "num_inference_steps": 12,
        "guidance_scale": 4.5,
        "resolution": [96, 64],
        "seed": 3,
        "frames": 17,
    }
    order = make_row_run(tmp_path, "hunyuan_video", "", samples=samples)
    if frames is None:
        kept = {key: value for key, value in samples.items() if key != "frames"}
        trainer = SdScriptsTrainer.model_validate({"kind": "sdscripts", "samples": kept})
        order = order.model_copy(update={"trainer": trainer})
    tree = ast.parse((sources(program) / module).read_bytes())
    wanted = ("line_to_prompt_dict", "load_prompts")
    found = [each for each in tree.body if getattr(each, "name", "") in wanted]
    names: dict[str, Any] = {"re": re, "logger": logging.getLogger(), "Dict": dict, "List": list}
    exec(compile(ast.Module(found, []), module, "exec"), names)
    parser = SimpleNamespace(line_to_prompt_dict=names["line_to_prompt_dict"])
    for module in ("library", "library.train_util"):  # sd-scripts imports it once more
        monkeypatch.setitem(sys.modules, module, parser)
    (tmp_path / "prompts.txt").write_text(prompt_lines(order))
    read = names["load_prompts"](str(tmp_path / "prompts.txt"))
    said = {"width": 96, "height": 64, "sample_steps": 12, "negative_prompt": "grey, dull"}
    said |= {scale: 4.5, "seed": 3} | ({"frame_count": frames} if frames else {})
    own: list[dict[str, Any]] = [{"prompt": "a cat sleeps"}, {"prompt": "a dog", "seed": 7}]
    own.append({"prompt": "#1 dad"})
    assert read == [said | each | {"enum": number} for number, each in enumerate(own)]


# -- caching scripts of musubi-tuner --------------------------------------------------------------

# Those whose tasks differ in arguments of a caching script; each task of a row is asked for.
CACHING_ROWS = [
    row
    for row in (WAN, *ARCHITECTURES.values())
    if any(each.latents or each.text for each in row.versions.values())
]


def model_of(row: Architecture, task: str) -> Model:
    """Return a model with every key that the row's scripts take."""
    scripts = row.scripts
    files = (*scripts.latents.files, *scripts.text.files)
    keys = {file.key for file in files if file.required} | {*scripts.versions[task].needs}
    values: dict[str, object] = {key: "weights" for key in keys if not key.startswith("text")}
    texts = {file.key for file in scripts.text.files if file.key.startswith("text")}
    values["text"] = ["weights"] * len(texts)
    values["task"] = task or None
    if row is WAN:
        values["encoder"] = "musubi"
    else:
        values["architecture"] = row.name
    if scripts.latents.dtype_flag:
        values["vae_dtype"] = "float32"
    return Model.model_validate({key: each for key, each in values.items() if each is not None})


@pytest.mark.parametrize("row", CACHING_ROWS, ids=lambda row: row.name)
def test_a_script_knows_each_flag_and_task_of_its_row(row: Architecture) -> None:
    settings = ExternalProgram(path=str(sources("musubi-tuner")), venv=PYTHON)
    program = find(settings, row.scripts)
    for task, version in row.scripts.versions.items():
        for kind in ("latents", "text"):
            model, script = model_of(row, task), row.scripts.caching(kind).name
            further = {"--num_workers": 1, "--skip_existing": True, "--keep_cache": True}
            given = caching_arguments(model, kind, "toml", lambda weights: weights.local, further)
            assert flags(program, given, script).verdict == "ok"
            sources_of_versions = program.scripts.glob("*/*_utils.py")
            texts = [path.read_text() for path in (program.script(script), *sources_of_versions)]
            for value in (each for each in version.caching(kind) if each[:1] != "-"):
                assert any(f'"{value}"' in text for text in texts), (task, value)
