"""The model's section that `latentmake init` writes: a dtype that weights and GPUs suggest."""

from __future__ import annotations

from pathlib import Path

import pytest
from latentmake.config.architectures import ARCHITECTURES
from latentmake.files.safetensors import Tensor
from latentmake.words.found import Found, Model, Part
from latentmake.words.init import _missing, _notes
from latentmake.words.model_section import Section
from latentmake.words.new_config import Run, Size, dtype_of


@pytest.mark.parametrize(
    ("kind", "weights", "capabilities", "dtype"),
    [
        ("sd", "F32", "", "float16"),
        ("sd", "F16", "", "bfloat16"),
        ("sd", "BF16", "", "bfloat16"),
        ("sd", "F32", "8.0", "bfloat16"),
        ("sd", "F32", "9.0\n7.5", "float16"),
        ("sdscripts", "F32", "", "bfloat16"),
    ],
)
def test_the_dtype_of_new_caches_is_that_of_the_weights_or_the_gpus(
    kind: str,
    weights: str,
    capabilities: str,
    dtype: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{capabilities}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    network = Part(tmp_path, {"conv_in.weight": Tensor(weights, (1,), 0, 4)})
    model = Model(ARCHITECTURES["sd1"], None, [network], [network], tmp_path)
    assert dtype_of(Section(model, kind, tmp_path, network=network)) == dtype


@pytest.mark.parametrize(
    ("architecture", "frames", "note", "missing"),
    [
        (
            "hunyuan_video",
            (4, *[33] * 19),
            "waves: 2 of 40 videos are shorter than a clip, and left out",
            "",
        ),
        ("framepack", (36,), "", "waves: all videos are shorter than a clip of 37 frames"),
        ("framepack", (37,), "", ""),
        ("sd1", (), "", ""),
    ],
)
def test_videos_that_are_shorter_than_a_clip_are_named(
    architecture: str, frames: tuple[int, ...], note: str, missing: str, tmp_path: Path
) -> None:
    row = ARCHITECTURES[architecture]
    task = next(iter(row.scripts.versions)) if row.scripts else None
    network = Part(tmp_path, {})
    model = Model(row, task, [network], [network], tmp_path)
    rate = row.scripts.fps if row.scripts else 0.0
    waves = Found("waves", Path("waves"), 40, 40, clips=tuple((each, rate) for each in frames))
    section = Section(model, "musubi", tmp_path)
    run = Run("waves", [waves], section, Size(64, 64.0, ""), None, "", Path("waves.yaml"))
    assert [*_notes(run)] == [note] * bool(note)
    assert [*_missing(run)] == [missing] * bool(missing)
