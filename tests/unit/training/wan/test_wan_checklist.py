"""The checklist of the trainer `wan` names its networks, and a fault of each."""

from __future__ import annotations

from pathlib import Path

from latentmake.training.backend import Finding
from latentmake.training.wan.dit import WanOrder
from latentmake.training.wan.plan import Wan
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
