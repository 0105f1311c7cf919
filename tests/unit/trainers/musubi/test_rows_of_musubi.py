"""Runs of every architecture are checked and published by what their rows say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from controlled_world import listed
from latentmake.config.architectures import WAN
from latentmake.config.machines import ExternalProgram, Publish
from latentmake.trainers.launched.publish import publish
from latentmake.trainers.musubi.checks import networks
from latentmake.trainers.musubi.order import MusubiOrder
from latentmake.trainers.musubi.publish import MusubiPublication
from publish_world import order_of
from rows_world import DIT_NAMES, ROWS, RUN, VERSIONS, make_row_run
from safetensors.torch import save_file
from video_world import write_video


def published(order: MusubiOrder, *, caches: bool) -> MusubiOrder:
    return order.model_copy(
        update={
            "program": ExternalProgram(path="/there/musubi-tuner"),
            "publish": Publish(caches=caches),
        }
    )


@pytest.mark.parametrize(("name", "task"), VERSIONS)
def test_the_scripts_of_the_row_are_called_with_all_that_they_need(
    working: Path, name: str, task: str
) -> None:
    order = published(make_row_run(working, name, task), caches=False)
    assert not [each for each in MusubiPublication(order).findings() if each.verdict == "failed"]
    said: list[str] = []
    publish(MusubiPublication(order), said.append)
    place, scripts = Path("published") / RUN, ROWS[name]
    text = (place / f"train_{RUN}.json").read_text()
    calls = json.loads(text)["linux"]["calls"]
    rows = (scripts.latents, scripts.text, scripts.training)
    for (called, arguments), script in zip(calls, rows, strict=True):
        assert called == script.name
        for file in script.files:
            if weights := order.model.weights(file.key):
                at = arguments.index(file.flag)
                assert arguments[at + 1] == f"{working}/{weights.path}"
    assert {*scripts.versions[task].training} <= {*calls[-1][1]}
    assert name == "wan" or "wan" not in text.lower()
    assert name == "wan" or not any("Wan" in line for line in said)
    items = {path.name for path in (place / f"{RUN}_64").iterdir()}
    assert {"red.txt", "blue.txt"} <= items
    assert (place / f"{RUN}_64_control").is_dir() == bool(order.model.version.controls[0])


def test_a_control_takes_the_caches_of_its_item_along(working: Path) -> None:
    order = published(make_row_run(working, "qwen_image_edit", "edit-2509"), caches=False)
    publish(MusubiPublication(order), print)
    made = Path("published") / RUN / f"{RUN}_64_cache"
    for cache in Path("cache").rglob("*.safetensors"):
        (made / cache.name).write_bytes(cache.read_bytes())
    Path("control/red.png").write_bytes(Path("control/blue.png").read_bytes())
    publish(MusubiPublication(order), print)
    left = {path.name for path in made.glob("*.safetensors")}
    assert left == {"blue_0080x0064_qie.safetensors", "blue_qie_te.safetensors"}


@pytest.mark.parametrize(("name", "task"), VERSIONS)
def test_the_network_of_each_version_is_known(working: Path, name: str, task: str) -> None:
    order = make_row_run(working, name, task)
    assert [each.fault or each.doubt for each in networks(order.model)] == [""]


@pytest.mark.parametrize("name", ROWS)
def test_a_network_of_another_architecture_is_named(working: Path, name: str) -> None:
    order = make_row_run(working, name, next(iter(ROWS[name].versions)))
    other = "z_image" if name != "z_image" else "krea2"
    save_file({DIT_NAMES[other]: torch.ones(2, 2)}, "models/dit.safetensors")
    (found,) = networks(order.model)
    if order.model.spec is WAN:
        assert found.fault or found.doubt
    else:
        assert found.fault == f"is a {ROWS[other].title} DiT, not a {ROWS[name].title} DiT"
    save_file({"lora_unet_a.lora_down.weight": torch.ones(2, 2)}, "models/dit.safetensors")
    assert "is a LoRA" in next(networks(order.model)).fault
    Path("models/dit.safetensors").write_bytes(b"x" * 30)
    assert next(networks(order.model)).fault


def test_names_of_a_dit_tell_its_architecture_alone() -> None:
    for name, tensor in DIT_NAMES.items():
        if name == "ideogram4":
            continue
        found = {ROWS[other].mark for other in ROWS if re.search(ROWS[other].mark, tensor)}
        assert found == {ROWS[name].mark}, name


def test_settings_of_finished_wan_runs_have_the_digests_of_earlier_versions() -> None:
    plain = "592ea814fd56ef15888c1510785db7f7dcf5ad3092535a6f615de38c41f7f1f7"
    other = "8890f7b0d97575ae0e4f67c5200de7cec5951fa6fb1a87f00dcbdebaf87f3484"
    assert order_of().settings_digest() == plain
    changed = order_of(model={"task": "i2v-14B"}, trainer={"network_dim": 4, "fp8_base": True})
    assert changed.settings_digest() == other


def test_a_video_whose_row_names_a_part_of_it_is_a_fault(working: Path) -> None:
    write_video(working / "film.mp4", "libx264", 20)
    row = {"video_path": f"{working}/film.mp4", "caption": "a film", "first_frame": 1}
    Path("films.jsonl").write_text(json.dumps(row))
    model = {"architecture": "kandinsky5", "task": "k5-pro-t2v-5s-sd"}
    _, (fault,) = listed(**model, path="films.jsonl", target_frames=[5])
    assert "musubi-tuner's own scripts read videos from their first frame" in fault.line
