"""Files on the hub that `latentmake init` names: one for each part, by commands that parse."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from huggingface_hub.cli.hf import app
from latentmake.config.architectures import ARCHITECTURES, WAN
from latentmake.words.hub_files import HUB_FILES, PIPELINE, downloads

ROWS = {**ARCHITECTURES, "wan": WAN}
LINES = [
    f"{PIPELINE} --local-dir models",
    *(line for files in HUB_FILES.values() for _, line in downloads(files, Path("a folder"))),
]


@pytest.mark.parametrize("line", dict.fromkeys(LINES))
def test_hf_takes_the_command(line: str) -> None:
    first, *words = shlex.split(line)
    assert first == "hf"
    top = app.make_context("hf", words, resilient_parsing=True)
    name, command, rest = app.resolve_command(top, words)
    values = command.make_context(name, rest, parent=top).params
    assert values["repo_id"].count("/") == 1
    assert values["local_dir"]


@pytest.mark.parametrize("name", [name for name in ROWS if name != "hidream_o1"])
def test_each_encoder_has_a_file(name: str) -> None:
    row = ROWS[name]
    if row.scripts is not None:
        files = (*row.scripts.latents.files, *row.scripts.text.files)
        versions = row.scripts.versions.values()
        needed = {each.key for each in files if each.required}
        needed |= {key for version in versions for key in version.needs}
    else:
        assert row.strategies is not None
        number = len(row.text_encoders) or len(row.strategies.files) - 1
        needed = {"vae", "text", *(f"text.{each}" for each in range(1, number))}
    assert needed <= HUB_FILES[name].keys()
