"""Processes of a training share the cores of their machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from latentmake.training.loop import launch
from trainer_world import make_order, train, write_order


@pytest.mark.parametrize(("gpus", "each"), [(True, "2"), (False, "8")])
def test_each_process_gets_its_share_of_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: bool, each: str
) -> None:
    """Four processes, or one where there is no GPU."""
    seen: list[str] = []

    def launched(command: list[str], **_: Any) -> None:
        seen.extend(command)
        raise KeyboardInterrupt  # there are no four GPUs to go on with

    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    monkeypatch.setattr(launch, "run_child", launched)
    path = write_order(make_order(tmp_path), tmp_path / "order.json")
    log, receipt = tmp_path / "log", tmp_path / "receipt.json"
    with pytest.raises(KeyboardInterrupt):
        train(path, log=log, receipt=receipt, processes=4, threads=8)
    assert seen[seen.index("--num_cpu_threads_per_process") + 1] == each
