"""`latentmake doctor` prints what a bug report needs."""

from __future__ import annotations

import subprocess

import yaml
from project import Project


def test_the_doctor_names_versions_trainers_disk_and_the_last_error(built: Project) -> None:
    folder = built / "sd-scripts"
    folder.mkdir()
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    built.configure(lambda values: values.update(sd_scripts={"path": str(folder)}))
    (built / "logs/train").mkdir(parents=True, exist_ok=True)
    (built / "logs/train/tiny.log").write_text("step 1\nerror: loss is NaN\n")
    found = yaml.safe_load(built.ask("doctor").output)
    assert {"latentmake", "python", "torch", "snakemake"} <= found["versions"].keys()
    assert "(not proven" in found["trainers"]["sd_scripts"]
    assert next(iter(found["disk"])) == str(built.folder)
    assert found["last error"] == {"logs/train/tiny.log": ["step 1", "error: loss is NaN"]}
    (built / ".snakemake/log/2999.snakemake.log").write_text("3 of 3 steps (100%) done\n")
    assert yaml.safe_load(built.ask("doctor").output)["last error"] == {}
    (built / "config/config.yaml").write_text("runs: [")
    found = yaml.safe_load(built.ask("doctor").output)
    assert "config.yaml" in found["configuration"] and found["gpu"]["torch"]
