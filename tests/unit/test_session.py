"""A pipe or a device in the place of a file that the configuration names ends in one line."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import world
from latentmake import digest
from latentmake.config.root import parse
from latentmake.errors import ConfigError, UserError
from latentmake.index.memo import Memo
from latentmake.plan.facts import Facts
from latentmake.reports.images import Pictures
from latentmake.session import Session
from latentmake.training.sd.unet import read_schedule
from latentmake.training.wan.generation import _image

Values = dict[str, Any]

_GUARD = 30  # seconds, after which a test that hangs is ended; no result depends on it
_MEMORY = 16 << 30  # bytes of address space, for one that reads for ever


@pytest.fixture(params=["pipe", "device"])
def odd(
    request: pytest.FixtureRequest,
    micro: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[str], str]]:
    """Make a pipe or a device of a name; whoever waits for it, or reads it for ever, is ended."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(micro, "models/micro")
    world.make_dataset(Path("data/shapes"))

    def make(name: str) -> str:
        Path(name).unlink(missing_ok=True)
        if request.param == "pipe":
            os.mkfifo(name)
        else:
            Path(name).symlink_to("/dev/zero")
        return name

    def hung(*_: object) -> None:
        pytest.fail("it waits for ever")

    before, limits = signal.signal(signal.SIGALRM, hung), resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, limits[1]))
    signal.alarm(_GUARD)
    try:
        yield make
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _dataset(key: str) -> Callable[[Values, str], object]:
    return lambda values, path: values["datasets"]["shapes"].update({key: path})


def _model(key: str) -> Callable[[Values, str], object]:
    return lambda values, path: values["models"]["micro"].update({key: path})


def _text(key: str) -> Callable[[Values, str], object]:
    place = "models/micro/text_encoder"
    return lambda values, path: _model("text")(values, [{"path": place, key: path}])  # type: ignore[arg-type]


def _trainer(key: str) -> Callable[[Values, str], object]:
    return lambda values, path: values["runs"]["tiny"]["trainer"].update({key: path})


def _samples(key: str) -> Callable[[Values, str], object]:
    return lambda values, path: values["runs"]["tiny"]["trainer"]["samples"].update({key: path})


def _vae_config(values: Values, path: str) -> None:
    shutil.copy("models/micro/vae/diffusion_pytorch_model.safetensors", "one.safetensors")
    values["models"]["micro"]["vae"] = {"path": "one.safetensors", "config": path}


def _there(values: Values, path: str) -> None:
    """The file lies in the model's folder."""


KEYS: dict[str, tuple[str, Callable[[Values, str], object]]] = {
    "a dataset's list": ("x.jsonl", _dataset("path")),
    "a dataset's list as JSON": ("x.json", _dataset("path")),
    "a dataset's folder": ("x", _dataset("path")),
    "metadata_file": ("x.json", _dataset("metadata_file")),
    "metadata_file of lines": ("x.jsonl", _dataset("metadata_file")),
    "metadata_file as a table": ("x.csv", _dataset("metadata_file")),
    "vae": ("x.safetensors", _model("vae")),
    "vae.config": ("x.json", _vae_config),
    "text": ("x.safetensors", _model("text")),
    "text.tokenizer": ("x", _text("tokenizer")),
    "text.projection": ("x.safetensors", _text("projection")),
    "unet": ("x.safetensors", _model("unet")),
    "scheduler": ("x", _model("scheduler")),
    "text_projection": ("x.safetensors", _model("text_projection")),
    "prompt_file": ("x.txt", _samples("prompt_file")),
    "accelerate_config": ("x.yaml", _trainer("accelerate_config")),
    "accelerate_config as JSON": ("x.json", _trainer("accelerate_config")),
    "resume_from_checkpoint": ("x", _trainer("resume_from_checkpoint")),
    "the VAE's configuration": ("models/micro/vae/config.json", _there),
    "the text encoder's configuration": ("models/micro/text_encoder/config.json", _there),
    "the UNet's configuration": ("models/micro/unet/config.json", _there),
    "the UNet's weights": ("models/micro/unet/diffusion_pytorch_model.safetensors", _there),
    "the schedule": ("models/micro/scheduler/scheduler_config.json", _there),
}


@pytest.mark.parametrize("key", KEYS)
def test_a_pipe_or_device_that_a_key_names_ends_in_one_line(
    key: str, odd: Callable[[str], str]
) -> None:
    name, put = KEYS[key]
    values = world.config()
    values["runs"]["tiny"]["trainer"] = world.training()
    put(values, odd(name))
    with pytest.raises((UserError, SystemExit)) as caught:
        Session(values, targets=["train_tiny"], main=True, dry=True)
    line = str(caught.value)
    assert line.startswith("error: ") and "\n" not in line


def test_a_pipe_or_device_elsewhere_is_no_content(odd: Callable[[str], str]) -> None:
    facts = Facts(parse(world.config()), Memo(None))
    with pytest.raises(OSError, match="is no regular file"):
        digest.of_file(Path(odd("x")))
    with pytest.raises(ConfigError, match=r"x.png cannot be read \(is no regular file\); check"):
        _image(facts, "tiny", odd("x.png"))
    with pytest.raises(UserError, match="this noise schedule is missing or damaged"):
        read_schedule(odd("schedule.json"), None)
    assert Pictures(1).add(Path(odd("y.png"))) == "cannot be read (is no regular file)"
