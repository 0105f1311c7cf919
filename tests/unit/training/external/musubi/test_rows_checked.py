"""Checks and settings of runs of every architecture: all that differs is read from its row."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from latentmake.config.architectures import WAN
from latentmake.config.external_trainers import MusubiTrainer
from latentmake.training.checks import Finding
from latentmake.training.external.musubi.check import data_findings
from latentmake.training.external.musubi.networks import networks
from latentmake.training.external.musubi.order import MusubiOrder
from latentmake.training.external.order import with_defaults
from publish_world import order_of
from rows_world import DIT_NAMES, ROWS, VERSIONS, latents_of, make_row_run
from safetensors import safe_open
from safetensors.torch import load_file, save_file


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def failed(order: MusubiOrder) -> list[Finding]:
    return [each for each in data_findings(order) if each.verdict == "failed"]


def rewrite(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file(tensors, path, metadata)


def file_of(order: MusubiOrder, ending: str) -> Path:
    return next(Path("cache").rglob(f"red*{ending}"))


@pytest.mark.parametrize(("name", "task"), VERSIONS)
def test_caches_as_its_scripts_write_them_are_sound(root: Path, name: str, task: str) -> None:
    order = make_row_run(root, name, task)
    assert failed(order) == []
    assert [each.fault or each.doubt for each in networks(order.model)] == [""]


@pytest.mark.parametrize("name", ROWS)
def test_each_tensor_of_a_text_is_demanded(root: Path, name: str) -> None:
    order = make_row_run(root, name, next(iter(ROWS[name].versions)))
    path = file_of(order, order.layout.text_ending or "")
    tensors = load_file(path)
    for beginning in ROWS[name].tensors:
        rewrite(
            path,
            {key: x for key, x in tensors.items() if not key.startswith(beginning)}
            or {"other": torch.ones(1)},
        )
        (found,) = failed(order)
        assert f"({beginning.strip('_')})" in found.note
    rewrite(path, tensors)
    assert not failed(order)


@pytest.mark.parametrize(("name", "task"), VERSIONS)
def test_each_tensor_that_a_version_needs_is_demanded(root: Path, name: str, task: str) -> None:
    order = make_row_run(root, name, task)
    path = file_of(order, order.layout.latents_ending)
    tensors = load_file(path)
    for beginning in ("latents_", *order.version.tensors):
        left = {key: x for key, x in tensors.items() if not key.startswith(beginning)}
        rewrite(path, left or {"other": torch.ones(1)})
        (found,) = failed(order)
        assert f"holds no {beginning.strip('_')}" in found.note


@pytest.mark.parametrize("name", ROWS)
def test_latents_of_another_size_or_vae_are_noticed(root: Path, name: str) -> None:
    order = make_row_run(root, name, next(iter(ROWS[name].versions)))
    path = file_of(order, order.layout.latents_ending)
    sides = 64 // ROWS[name].pixels
    tensors, size = load_file(path), f"{sides}x{sides}"
    key = next(key for key in tensors if key.startswith("latents_") and size in key)
    smaller = key.replace(size, f"{sides - 1}x{sides}")
    shape = list(tensors[key].shape)
    shape[shape.index(sides, 0 if ROWS[name].channels == {} else 1)] = sides - 1
    changed = tensors | {smaller: torch.ones(shape, dtype=torch.bfloat16)}
    del changed[key]
    rewrite(path, changed)
    assert "where the trainer expects" in failed(order)[0].note
    if channels := ROWS[name].channels.get("latents"):
        shape = [channels + 1 if x == channels else x for x in tensors[key].shape]
        rewrite(path, tensors | {key: torch.ones(shape, dtype=torch.bfloat16)})
        assert "with the shape" in failed(order)[0].note


CONTROLLED = [
    (n, t) for n, t in VERSIONS if ROWS[n].versions[t].controls[0] and ROWS[n].control_latents
]


@pytest.mark.parametrize(("name", "task"), CONTROLLED)
def test_controls_are_counted(root: Path, name: str, task: str) -> None:
    order = make_row_run(root, name, task)
    path = file_of(order, order.layout.latents_ending)
    more = latents_of(name, task, controls=3, video=False)
    if len(more) > len(load_file(path)):
        rewrite(path, more)
        assert "holds latents of 3 controls, not of 1" in failed(order)[0].note
    rewrite(path, {key: x for key, x in more.items() if "control" not in key})
    assert "latents_control" in failed(order)[0].note


@pytest.mark.parametrize("name", ROWS)
def test_a_network_of_another_architecture_is_named(root: Path, name: str) -> None:
    order = make_row_run(root, name, next(iter(ROWS[name].versions)))
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
    import re

    for name, tensor in DIT_NAMES.items():
        if name == "ideogram4":
            continue
        found = {ROWS[other].mark for other in ROWS if re.search(ROWS[other].mark, tensor)}
        assert found == {ROWS[name].mark}, name


@pytest.mark.parametrize("name", ROWS)
def test_defaults_come_from_the_row_where_none_are_set(name: str) -> None:
    scripts = ROWS[name]
    found = with_defaults(MusubiTrainer(kind="musubi"), scripts.settings)
    assert found["defaults"] == scripts.settings
    keys = {key: each for key, each in scripts.settings.items() if not key.startswith("--")}
    assert {key: getattr(found["trainer"], key) for key in keys} == keys
    own = MusubiTrainer(kind="musubi", timestep_sampling="sigma", discrete_flow_shift=None)
    own = with_defaults(own, scripts.settings)["trainer"]
    assert (own.timestep_sampling, own.discrete_flow_shift) == ("sigma", None)


def test_a_network_without_the_header_that_its_script_demands_is_refused(root: Path) -> None:
    order = make_row_run(root, "ideogram4", "")
    tensors = load_file("models/dit.safetensors")
    save_file(tensors, "models/dit.safetensors", {"model_type": "ideogram4_uncond"})
    assert "`ideogram4_cond` is demanded" in next(networks(order.model)).fault


def test_settings_of_finished_wan_runs_have_the_digests_of_earlier_versions() -> None:
    plain = "592ea814fd56ef15888c1510785db7f7dcf5ad3092535a6f615de38c41f7f1f7"
    other = "8890f7b0d97575ae0e4f67c5200de7cec5951fa6fb1a87f00dcbdebaf87f3484"
    assert order_of().settings_digest() == plain
    changed = order_of(model={"task": "i2v-14B"}, trainer={"network_dim": 4, "fp8_base": True})
    assert changed.settings_digest() == other
