"""Published folders of every architecture: their scripts call the three scripts of the row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from latentmake.config.machines import ExternalProgram, Publish
from latentmake.training.external.musubi.order import MusubiOrder
from latentmake.training.external.musubi.publish import publication
from latentmake.training.external.publish import findings, publish
from rows_world import ROWS, RUN, VERSIONS, make_row_run


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def published(order: MusubiOrder, *, caches: bool) -> MusubiOrder:
    return order.model_copy(
        update={
            "musubi_tuner": ExternalProgram(path="/there/musubi-tuner"),
            "publish": Publish(caches=caches),
        }
    )


@pytest.mark.parametrize(("name", "task"), VERSIONS)
def test_the_scripts_of_the_row_are_called_with_all_that_they_need(
    root: Path, name: str, task: str
) -> None:
    order = published(make_row_run(root, name, task), caches=False)
    assert not [each for each in findings(publication(order)) if each.verdict == "failed"]
    said: list[str] = []
    publish([publication(order)], said.append)
    place, scripts = Path("published") / RUN, ROWS[name]
    text = (place / f"train_{RUN}.json").read_text()
    calls = json.loads(text)["linux"]["calls"]
    rows = (scripts.latents, scripts.text, scripts.training)
    for (called, arguments), script in zip(calls, rows, strict=True):
        assert called == script.name
        for file in script.files:
            if weights := order.model.weights(file.key):
                at = arguments.index(file.flag)
                assert arguments[at + 1] == f"{root}/{weights.path}"
    assert {*scripts.versions[task].training} <= {*calls[-1][1]}
    assert name == "wan" or "wan" not in text.lower()
    assert name == "wan" or not any("Wan" in line for line in said)
    items = {path.name for path in (place / f"{RUN}_64").iterdir()}
    assert {"red.txt", "blue.txt"} <= items
    assert (place / f"{RUN}_64_control").is_dir() == bool(order.version.controls[0])


@pytest.mark.parametrize("name", ROWS)
def test_a_new_setting_of_a_script_drops_its_caches(root: Path, name: str) -> None:
    order = published(make_row_run(root, name, next(iter(ROWS[name].versions))), caches=False)
    publish([publication(order)], print)
    made = Path("published") / RUN / f"{RUN}_64_cache"
    caches = [*Path("cache").rglob("*.safetensors")]
    for cache in caches:
        (made / cache.name).write_bytes(cache.read_bytes())
    publish([publication(order)], print)
    assert len([*made.glob("*.safetensors")]) == len(caches)
    if order.model.spec.encodes:
        changed = order.model.model_copy(update={"fp8_t5": True})
    else:
        changed = order.model.model_copy(update={"text_arguments": ["--fp8_llm"]})
    publish([publication(order.model_copy(update={"model": changed}))], print)
    left = [path.name for path in made.glob("*.safetensors")]
    assert len(left) == 2 and not any("_te" in each for each in left)


def test_a_control_takes_the_caches_of_its_item_along(root: Path) -> None:
    order = published(make_row_run(root, "qwen_image_edit", "edit-2509"), caches=False)
    publish([publication(order)], print)
    made = Path("published") / RUN / f"{RUN}_64_cache"
    for cache in Path("cache").rglob("*.safetensors"):
        (made / cache.name).write_bytes(cache.read_bytes())
    Path("control/red.png").write_bytes(Path("control/blue.png").read_bytes())
    publish([publication(order)], print)
    left = {path.name for path in made.glob("*.safetensors")}
    assert left == {"blue_0080x0064_qie.safetensors", "blue_qie_te.safetensors"}
