"""Further arguments of external trainers: flags of keys, paths, schedules that end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from latentmake.config.external_trainers import MusubiTrainer, SdScriptsTrainer
from latentmake.trainers.launched.order import depends_on_length, with_paths
from pydantic import ValidationError

FLAGS = [
    (MusubiTrainer, "--output_dir", "latentmake names the results"),
    (MusubiTrainer, "--max_train_steps=5", "set `max_train_steps`"),
    (MusubiTrainer, "--cache_latents", "musubi-tuner has no such flag: two caching scripts"),
    (MusubiTrainer, "--learning_rate", "set `learning_rate`"),
    (MusubiTrainer, "--network_module", "set `network_module`"),
    (MusubiTrainer, "--flash_attn", "set `attention: flash_attn`"),
    (MusubiTrainer, "--dit", "set it in the model"),
    (SdScriptsTrainer, "--max_train_steps", "set `max_train_steps`"),
    (SdScriptsTrainer, "--clip_skip", "set it in the model"),
    (SdScriptsTrainer, "--flip_aug", "it is a key of the dataset"),
    (SdScriptsTrainer, "--seed", "set `seed`"),
]


@pytest.mark.parametrize(("trainer", "flag", "instead"), FLAGS)
def test_a_flag_that_a_key_decides_is_refused_with_what_to_do(
    trainer: Any, flag: str, instead: str
) -> None:
    kind = trainer.__name__.removesuffix("Trainer").lower()
    with pytest.raises(ValidationError, match=f"leave out {flag.partition('=')[0]}: {instead}"):
        trainer.model_validate({"kind": kind, "arguments": [flag, "1"]})


@pytest.mark.parametrize(
    ("flag", "key"),
    [(["--seed", "7"], {"seed": 0}), (["--gradient_checkpointing"], {"gradient_checkpointing": 0})],
)
def test_a_key_and_its_flag_together_are_refused(flag: list[str], key: dict[str, Any]) -> None:
    (name,) = key
    with pytest.raises(ValidationError, match=rf"leave out --{name}: set `{name}`"):
        MusubiTrainer.model_validate({"kind": "musubi", "arguments": flag, **key})


def test_arguments_of_a_network_stand_in_one_place() -> None:
    flags = ["--network_args", "conv_dim=4"]  # as finished runs have them
    for trainer, kind in ((MusubiTrainer, "musubi"), (SdScriptsTrainer, "sdscripts")):
        trainer.model_validate({"kind": kind, "arguments": flags})
        with pytest.raises(ValidationError, match="leave out --network_args: set `network_args`"):
            trainer.model_validate({"kind": kind, "arguments": flags, "network_args": "a=1"})
        for wrong in ({"network_args": ["conv_dim"]}, {"network_module": "networks/loha.py"}):
            with pytest.raises(ValidationError):
                trainer.model_validate({"kind": kind, **wrong})
    two = {"network_args": ["network_reg_dims=a=1"]}  # sd-scripts splits at the first `=` only
    SdScriptsTrainer.model_validate({"kind": "sdscripts", **two})
    with pytest.raises(ValidationError):
        MusubiTrainer.model_validate({"kind": "musubi", **two})


def test_paths_are_made_absolute_and_all_else_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "models").mkdir()
    (tmp_path / "wandb").mkdir()
    (tmp_path / "models/a.safetensors").write_text("")
    (tmp_path / "prompts.txt").write_text("")
    given = {
        "prompts.txt": f"{tmp_path}/prompts.txt",
        "models/a.safetensors": f"{tmp_path}/models/a.safetensors",
        "--vae=./models/a.safetensors": f"--vae={tmp_path}/models/a.safetensors",
        "preset=models/a.safetensors": f"preset={tmp_path}/models/a.safetensors",
        "~/prompts.txt": f"{tmp_path}/prompts.txt",
        "/nowhere/x.txt": "/nowhere/x.txt",
        "wandb": "wandb",  # a word, though a folder bears it too
        "none.txt": "none.txt",
        "0.5": "0.5",
        "betas=0.9,0.99": "betas=0.9,0.99",
        "--gradient_checkpointing": "--gradient_checkpointing",
    }
    assert with_paths([*given]) == [*given.values()]
    named = with_paths(["prompts.txt"], lambda path: path.replace(str(tmp_path), "D:"))
    assert named == ["D:/prompts.txt"]
    elsewhere = ["--vae", "C:/m/vae.safetensors", "--vae=D:\\m x\\t5.pth", "/nowhere/x.txt"]
    words = ["--comment", "x:", "https://host/x.json", "a/b", "note: C:/m"]
    found = ["--vae", "<C:/m/vae.safetensors>", "--vae=<D:\\m x\\t5.pth>", "</nowhere/x.txt>"]
    words += ["conv=" + "1," * 200, "a." + "x" * 300, "y" * 300 + ".txt"]
    assert with_paths([*elsewhere, *words], lambda path: f"<{path}>") == [*found, *words]


@pytest.mark.parametrize(
    ("arguments", "depends"),
    [
        ([], False),
        (["--lr_scheduler", "cosine"], True),
        (["--lr_scheduler=linear"], True),
        (["--lr_scheduler", "constant_with_warmup", "--lr_warmup_steps", "10"], False),
        (["--lr_scheduler", "constant_with_warmup", "--lr_warmup_steps", "0.1"], True),
        (["--lr_scheduler", "adafactor:1e-4"], False),
        (["--lr_scheduler_type", "CosineAnnealingLR"], False),
    ],
)
def test_a_schedule_that_ends_depends_on_the_number_of_steps(
    arguments: list[str], depends: bool
) -> None:
    assert depends_on_length(arguments) == depends
