"""The checklist of the trainer `wan` names its networks, and a fault of each."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from latentmake.training.backend import Finding
from latentmake.training.wan.dit import WanOrder
from latentmake.training.wan.plan import Wan
from PIL import Image
from wan_trainer_world import make_order


def checked(order: WanOrder, *, current: bool = False) -> dict[str, Finding]:
    return {each.what: each for each in Wan().check(order, current=current)}


def test_both_networks_are_listed_and_a_broken_one_fails(tmp_path: Path) -> None:
    networks = ("dit", "dit_high_noise")
    order = make_order(tmp_path, networks=networks, task="t2v-A14B", boundary=0.875)
    found = checked(order)
    assert [found[f"model: {name}"].verdict for name in networks] == ["ok", "ok"]
    assert found["model: dit"].note == f"{tmp_path / 'dit'}: Wan DiT"
    assert found["environment"].verdict == "ok"
    (tmp_path / "dit_high_noise/diffusion_pytorch_model.safetensors").write_bytes(b"")
    found = checked(order)
    assert found["model: dit"].verdict == "ok"
    assert found["model: dit_high_noise"].verdict == "failed"
    assert "is cut short" in found["model: dit_high_noise"].note


def test_images_that_became_white_are_named(tmp_path: Path) -> None:
    deep = np.linspace(0, 65535, 64).reshape(8, 8).astype(np.uint16)
    rows = []
    for name, values in (("a", deep), ("b", (deep >> 8).astype(np.uint8))):
        Image.fromarray(values).save(tmp_path / f"{name}.png")
        row = {"dataset": "d", "stem": name, "source": f"{tmp_path}/{name}.png"}
        rows.append(json.dumps(row))
    (tmp_path / "manifest.jsonl").write_text("\n".join(rows))
    order = make_order(tmp_path).model_copy(update={"manifest": f"{tmp_path}/manifest.jsonl"})
    note = checked(order, current=True)["16-bit images"].note
    assert note.startswith("1 image is 16-bit greyscale")
    assert note.endswith(f"white: {tmp_path}/a.png; save with 8 bits")


def test_a_network_of_another_task_fails(tmp_path: Path) -> None:
    order = make_order(tmp_path).model_copy(update={"needs_clip": True, "task": "i2v-14B"})
    note = checked(order)["model: dit"].note
    assert "is a Wan DiT of 16 input channels; i2v-14B has 36" in note


@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_8_bit_adamw_needs_its_package(tmp_path: Path) -> None:
    order = make_order(tmp_path, optimizer="adamw8bit")
    found = checked(order)["environment"]
    assert found.verdict == "failed"
    assert "bitsandbytes is not installed" in found.note
