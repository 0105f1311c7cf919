"""musubi-tuner's own caching scripts know every flag and every task of our rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import PYTHON, sources
from latentmake.config.architectures import ARCHITECTURES, WAN
from latentmake.config.machines import ExternalProgram
from latentmake.config.makers import Architecture
from latentmake.config.models import Model
from latentmake.trainers.launched.installation import Installation, flags
from latentmake.trainers.musubi.command import caching_arguments
from latentmake.trainers.musubi.order import find

pytestmark = pytest.mark.real_trainer

# Those whose tasks differ in arguments of a caching script; each task of a row is asked for.
ROWS = [
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


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_script_knows_each_flag_and_task_of_its_row(row: Architecture) -> None:
    settings = ExternalProgram(path=str(sources("musubi-tuner")), venv=PYTHON)
    program = find(settings, row.scripts)
    for task, version in row.scripts.versions.items():
        for kind in ("latents", "text"):
            model, script = model_of(row, task), row.scripts.caching(kind).name
            further = {"--num_workers": 1, "--skip_existing": True, "--keep_cache": True}
            given = caching_arguments(model, kind, "toml", lambda weights: weights.local, further)
            assert flags(program, given, script).verdict == "ok"
            texts = [Path(program.script(script)).read_text(), *_versions(program)]
            for value in (each for each in version.caching(kind) if each[:1] != "-"):
                assert any(f'"{value}"' in text for text in texts), (task, value)


def _versions(program: Installation) -> Iterator[str]:
    """Yield the sources that list the versions that scripts of their packages take."""
    yield from (path.read_text() for path in program.scripts.glob("*/*_utils.py"))
