"""`latentmake show` and `doctor` print what a person, or a bug report, needs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from latentmake.files import npz
from latentmake.files.cachefile import read_header, stamp
from project import Project


def shown(project: Project, path: str) -> Any:
    """Return what is shown, by people's form and JSON; the former leaves out what is empty."""
    readable = yaml.safe_load(project.ask("show", path).output)
    values = json.loads(project.ask("show", path, "--json").output)
    assert len(readable) <= len(values)
    return readable


def test_each_file_of_a_build_is_shown(built: Project) -> None:
    latents = sorted(built.latents("bee"))[0]
    header = read_header(built / latents)
    found = shown(built, latents)
    assert (found["key"], found["source"]) == (header.key, header.source)
    assert found["recipe"]["kind"] == "latents" and found["tensors"]["latents"].startswith("F32 [4")
    assert {row["stem"] for row in shown(built, "runs/tiny/manifest.jsonl")} >= {"ant", "bee"}
    assert shown(built, "runs/tiny/dataset.lock")["counts"]
    folder = built / ".latentmake/orders"
    orders = [path for path in folder.glob("*.json") if path.name.count(".") == 1]
    for order in orders:
        name = str(order.relative_to(built.folder))
        assert shown(built, name)["items"][0]["targets"][0]["path"].startswith("cache/")
        receipt = name.replace(".json", ".receipt.json")
        assert shown(built, receipt)["counts"]["encoded"] > 0
    assert orders
    (order,) = (built / ".latentmake/runs").glob("tiny.*.manifest.json")
    found = shown(built, str(order.relative_to(built.folder)))
    assert found["run"] == "tiny" and found["items"][0]["item"]["files"][0]["path"].startswith(
        "data/shapes/"
    )
    built.ask("status")  # which takes what jobs read into the memo
    found = shown(built, "data/shapes/ant.png")["digest"]
    assert len(found["value"]) == 64 and found["is_current"]


def test_an_npz_file_is_shown(template: Project, tmp_path: Path) -> None:
    metadata = stamp(key="k" * 64, source="s" * 64, recipe={"kind": "latents"})
    arrays = {"latents_8x8": np.zeros((4, 8, 8), np.float32)}
    (tmp_path / "a.npz").write_bytes(npz.serialize(arrays, metadata))
    found = shown(template, str(tmp_path / "a.npz"))
    assert found["key"] == "k" * 64 and found["recipe"] == {"kind": "latents"}
    assert found["tensors"] == {"latents_8x8": "F32 [4, 8, 8]"}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gone.json", "there is no such file"),
        ("notes.txt", "is no order, receipt, lock, manifest or cache file"),
        ("half.json", "cannot be read"),
    ],
)
def test_another_file_is_answered_in_one_line(
    template: Project, tmp_path: Path, name: str, words: str
) -> None:
    (tmp_path / "notes.txt").write_text("milk")
    (tmp_path / "half.json").write_text('{"a": ')
    said = template.ask("show", str(tmp_path / name), check=False)
    assert said.returncode == 2 and words in said.output and said.output.count("\n") == 1


def test_the_doctor_names_versions_trainers_disk_and_the_last_error(built: Project) -> None:
    folder = built / "sd-scripts"
    folder.mkdir()
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    built.configure(lambda values: values.update(sd_scripts={"path": str(folder)}))
    (built / "logs/train").mkdir(parents=True, exist_ok=True)
    (built / "logs/train/tiny.log").write_text("step 1\nerror: loss is NaN\n")
    found = json.loads(built.ask("doctor", "--json").output)
    assert {"latentmake", "python", "torch", "snakemake"} <= found["versions"].keys()
    assert "(not proven" in found["trainers"]["sd_scripts"]
    assert next(iter(found["disk"])) == str(built.folder)
    assert found["last error"] == {"logs/train/tiny.log": ["step 1", "error: loss is NaN"]}
    (built / "config/config.yaml").write_text("runs: [")
    found = yaml.safe_load(built.ask("doctor").output)
    assert "config.yaml" in found["configuration"] and found["gpu"]["torch"]
