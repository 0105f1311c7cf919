"""Training scripts of every architecture: their own parsers, checks and datasets take our runs."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import answer_of, output_of, sources
from latentmake.data.memo import Memo
from latentmake.runs.findings import checklist
from latentmake.trainers.launched.order import Resume
from latentmake.trainers.musubi.backend import Musubi
from latentmake.trainers.musubi.command import training_arguments
from latentmake.trainers.musubi.deploy import training_toml
from latentmake.trainers.musubi.order import MusubiOrder
from refused_settings import REFUSED, TAKEN
from rows_world import ROWS, RUN, VERSIONS, make_row_run

pytestmark = [pytest.mark.real_trainer, pytest.mark.usefixtures("own_folder")]

# Each script's `main` as it is, up to the point where it would load networks.
PARSE = """# preloaded
import contextlib, importlib, io, json, sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from musubi_tuner.training import trainer_base


def train(self, args):
    found["arguments"] = {key: str(value) for key, value in vars(args).items()}
    found["goes_on"] = self._validate_args_and_init(args)
    if Path(args.dataset_config).is_file():
        group, _, _ = self._build_dataset(args)
        found["items"] = group.num_train_items
        found["tensors"] = sorted({key for each in range(len(group)) for key in group[each]})


trainer_base.NetworkTrainer.train = train
answers = []
for script, arguments in json.loads(Path(sys.argv[2]).read_text()):
    found, said = {}, io.StringIO()
    module = importlib.import_module(f"musubi_tuner.{Path(script).stem}")
    sys.argv[:] = [script, *arguments]
    with contextlib.redirect_stderr(said):
        try:
            module.main()
        except SystemExit:
            found["error"] = said.getvalue().splitlines()[-1]
        except Exception as error:
            found["error"] = f"{type(error).__name__}: {error}"
    answers.append(found)
print(json.dumps(answers))
"""


def answers(venv: Path, calls: Sequence[tuple[str, list[str]]], folder: Path) -> list[Any]:
    """Return what the scripts make of their command lines, all in one process."""
    source = sources("musubi-tuner") / "src"
    (folder / "calls.json").write_text(json.dumps(calls))
    command = [venv / "bin/python", "-c", PARSE, source, folder / "calls.json"]
    found: list[Any] = answer_of(*command, cwd=folder, paths=[source])
    return found


def run_of(folder: Path, name: str, task: str, **trainer: Any) -> MusubiOrder:
    """Make a run below a folder of its own, which becomes the working directory."""
    folder.mkdir(parents=True)
    os.chdir(folder)
    return make_row_run(folder, name, task, tuner=sources("musubi-tuner"), **trainer)


def call_of(order: MusubiOrder) -> tuple[str, list[str]]:
    return order.scripts.training.name, training_arguments(order, order.places, "sdpa", Resume())


def check(order: MusubiOrder, venv: Path, memory: Memo) -> None:
    """Look at the checklist of a run: it is complete, and nothing has failed."""
    assert order.program is not None
    program = order.program.model_copy(update={"venv": os.fspath(venv)})
    order = order.model_copy(update={"program": program})
    found = [*Musubi().data_findings(order), *Musubi().preflight(order, memory)]
    assert not [each for each in found if each.verdict == "failed"], checklist(found)
    assert {each.what for each in found} >= {
        *("images and captions", "foreign caches", "cache folders", "model: dit", "arguments"),
        *("musubi-tuner", "environment", "mixed precision", "attention"),
    }


def test_the_real_script_of_each_version_takes_its_command_and_finds_its_items(
    tmp_path: Path, forked_venv: Path
) -> None:
    calls, memory = [], Memo(tmp_path / "memo.sqlite")
    samples = {"prompts": ["a cat"], "every": 5}
    for name, task in VERSIONS:
        order = run_of(tmp_path / f"{name}-{task}", name, task, network_dim=4, samples=samples)
        check(order, forked_venv, memory)
        calls.append(call_of(order))
        Path(order.output, "dataset.toml").write_text(training_toml(order))
        files = [*order.scripts.latents.files, *order.scripts.text.files]
        assert {file.flag for file in files if file.required} <= {*calls[-1][1], "--dit"}
    for (name, task), found in zip(VERSIONS, answers(forked_venv, calls, tmp_path), strict=True):
        assert "error" not in found, (name, task, found["error"])
        assert found["goes_on"] and found["items"] == 2, (name, task)
        place, scripts, arguments = tmp_path / f"{name}-{task}", ROWS[name], found["arguments"]
        expected = {
            "dit": f"{place}/models/dit.safetensors",
            "dataset_config": f"{place}/runs/{RUN}/dataset.toml",
            "output_dir": f"{place}/runs/{RUN}/output",
            "output_name": RUN,
            "network_module": scripts.network,
            "network_alpha": "4.0",  # the rank, where the guide has no other
            "mixed_precision": "bf16",
            "max_train_epochs": "2",
            "sdpa": "True",
            "optimizer_type": "adamw",
        }
        recommended = {key.removeprefix("--"): each for key, each in scripts.settings.items()}
        expected |= {key: str(each) for key, each in recommended.items() if each is not None}
        expected["network_dim"] = "4"
        flags = scripts.versions[task].training
        for flag, value in zip(flags, (*flags[1:], "--"), strict=False):
            if flag.startswith("--"):
                expected[flag[2:]] = "True" if value.startswith("--") else value
        assert {key: arguments[key] for key in expected} == expected, (name, task)
        # The names by which its training asks for what the caches hold.
        held = {key.strip("_").removeprefix("varlen_") for key in scripts.tensors}
        held |= {"latents", *(key.strip("_") for key in scripts.versions[task].tensors)}
        assert all(any(each.startswith(key) for each in found["tensors"]) for key in held), name


def test_the_real_scripts_refuse_what_we_refuse_and_take_what_we_take(
    tmp_path: Path, forked_venv: Path
) -> None:
    # Precisions that a script does not look at, weights that it would ruin, and attentions that end
    # at the first batch: ours alone.
    silent = {("qwen_image", "mixed_precision"), ("ideogram4", "fp8_base")}
    silent |= {("z_image", "timestep_boundary")}
    silent |= {("kandinsky5", "network_module"), ("krea2", "network_module")}  # once it has loaded
    refused = [(name, changes) for name, changes, _ in REFUSED]
    refused = [(name, given) for name, given in refused if (name, next(iter(given))) not in silent]
    refused = [each for each in refused if not {"attention", "batch_size"} & {*each[1]}]
    calls = []
    for number, (name, changes) in enumerate([*refused, *TAKEN]):
        task = next(iter(ROWS[name].versions))
        calls.append(call_of(run_of(tmp_path / str(number), name, task, **changes)))
    found = answers(forked_venv, calls, tmp_path)
    for (name, changes), answer in zip(refused, found, strict=False):
        assert "error" in answer, (name, changes)
    for (name, changes), answer in zip(TAKEN, found[len(refused) :], strict=True):
        assert answer.get("goes_on"), (name, changes, answer.get("error"))


ATTENTIONS = """# preloaded
import sys
sys.path.insert(0, sys.argv[1])
import torch
from musubi_tuner.frame_pack.hunyuan_video_packed import attn_varlen_func
from musubi_tuner.hunyuan_model.attention import attention as older
from musubi_tuner.modules.attention import AttentionParams, attention

def three():
    return [torch.zeros(2, 4, 1, 8) for _ in "qkv"]

ends = torch.tensor([0, 4, 8])
params = AttentionParams.create_attention_params("flash3", False)
for call in (
    lambda: attention(three(), attn_params=params),
    lambda: older(three(), mode="flash3"),
    lambda: older(three(), mode="xformers", cu_seqlens_q=ends),
    lambda: attn_varlen_func(*three(), ends, ends, 4, 4, ends, attn_mode="torch"),
    lambda: attn_varlen_func(*three(), ends, ends, 4, 4, [4, 4], attn_mode="torch",
                             split_attn=True),
):
    try:
        call()
        print("taken")
    except Exception as error:
        print(type(error).__name__)
"""


def test_the_real_networks_refuse_the_attentions_that_we_refuse(forked_venv: Path) -> None:
    source = sources("musubi-tuner") / "src"
    found = output_of(forked_venv / "bin/python", "-c", ATTENTIONS, source, paths=[source])
    assert found.split("\n")[-6:-1] == [
        "ValueError",
        "KeyError",
        "AssertionError",
        "NotImplementedError",
        "taken",
    ]
