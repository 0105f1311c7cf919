"""Checks and settings of runs of every architecture: all that differs is read from its row."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from latentmake.config.architectures import WAN
from latentmake.training.external.musubi.checks import networks
from publish_world import order_of
from rows_world import DIT_NAMES, ROWS, VERSIONS, make_row_run
from safetensors.torch import save_file


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("name", "task"), VERSIONS)
def test_the_network_of_each_version_is_known(root: Path, name: str, task: str) -> None:
    order = make_row_run(root, name, task)
    assert [each.fault or each.doubt for each in networks(order.model)] == [""]


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


def test_settings_of_finished_wan_runs_have_the_digests_of_earlier_versions() -> None:
    plain = "592ea814fd56ef15888c1510785db7f7dcf5ad3092535a6f615de38c41f7f1f7"
    other = "8890f7b0d97575ae0e4f67c5200de7cec5951fa6fb1a87f00dcbdebaf87f3484"
    assert order_of().settings_digest() == plain
    changed = order_of(model={"task": "i2v-14B"}, trainer={"network_dim": 4, "fp8_base": True})
    assert changed.settings_digest() == other
