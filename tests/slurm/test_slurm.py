"""On a real SLURM cluster of one node (cluster.sh): the same command, jobs in its queue.

tests/slurm/cluster.sh up && pytest tests/slurm
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import world
import yaml
from project import ROOT, Project, Result, wait_until


def is_up() -> bool:
    if shutil.which("sinfo") is None:
        return False
    asked = ["sinfo", "--noheader", "--format=%T"]
    return subprocess.run(asked, capture_output=True, timeout=60, check=False).returncode == 0


pytestmark = pytest.mark.skipif(not is_up(), reason="no SLURM is running: cluster.sh up")

# Shorter waits than the profile's: one node's files are seen at once.
PROFILE = (
    *("--profile", "profiles/slurm", "--latency-wait", "10"),
    *("--slurm-init-seconds-before-status-checks", "2"),
)
CLUSTER = {
    "partition": "test",
    "encode": {"gpus": 1, "cpus": 1, "mem_mb": 1500, "runtime": 20},
    "train": {"gpus": 1, "cpus": 2, "mem_mb": 4000, "runtime": 20},
}

MODULE = """
configfile: "config/config.yaml"
module latentmake:
    snakefile: "Snakefile"
    config: config
use rule * from latentmake as lm_*
"""


class ClusterProject(Project):
    preloads = False  # jobs run where the cluster puts them

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "snakemake", *PROFILE, *arguments]

    @staticmethod
    def environment() -> dict[str, str]:
        values = Project.environment()
        del values["SLURM_CONF"]
        return values


def make(folder: Path, micro: Path, **changes: Any) -> ClusterProject:
    project = ClusterProject.make(folder, {**world.config(), "cluster": CLUSTER, **changes}, micro)
    world.make_dataset(project / "data/shapes")
    assert isinstance(project, ClusterProject)
    project.compute_on_the_cpu()
    return project


def logs(project: Project, kind: str) -> str:
    return "\n".join(
        path.read_text() for path in sorted(project.folder.glob(f"logs/{kind}/**/*.log"))
    )


def submitted(result: Result) -> list[str]:
    return re.findall(
        r"has been submitted with SLURM jobid \d+ \(log: \S*/rule_(\w+)", result.output
    )


def test_a_run_is_trained_and_an_edited_caption_is_one_job_of_one_item(
    tmp_path: Path, micro: Path
) -> None:
    project = make(tmp_path / "project", micro)
    project.configure(lambda values: values["runs"]["tiny"].update(trainer=world.training()))
    result = project.run("train_tiny")
    assert (project / "runs/tiny/pytorch_lora_weights.safetensors").is_file()
    assert submitted(result)[-1] == "train" and len(submitted(result)) == 3
    shutil.rmtree(project / "logs")
    (project / "data/shapes/cat.txt").write_text("something else altogether")
    # As a module of another Snakefile, by a profile that says how many cores there are here.
    (project / "site.smk").write_text(MODULE)
    result = project.run("-s", "site.smk", "--cores", "2", "lm_caches_tiny")
    (rule,) = submitted(result)
    assert rule.startswith("lm_encode_text_") and "gpu=1" in result.output
    assert "text of shapes: 1 encoded\n" in logs(project, "text")
    assert not (project / "logs/latents").exists()
    assert project.run("caches_tiny").idle


def test_texts_wait_for_the_job_of_a_captioner(tmp_path: Path, micro: Path) -> None:
    captioners = {"tiny": {"model": str(ROOT / "data/tiny-captioner")}}
    datasets = {"shapes": {"path": "data/shapes", "captioner": "tiny"}}
    project = make(tmp_path / "project", micro, captioners=captioners, datasets=datasets)
    world.keep(project / "data/shapes", 2)
    for caption in (project / "data/shapes").glob("*.txt"):
        caption.unlink()
    result = project.run("text_tiny")
    first, second = submitted(result)
    assert first.startswith("encode_captions_shapes_tiny")
    assert second.startswith("encode_text_shapes_micro")
    assert "captions of shapes: 2 made\n" in logs(project, "captions")
    assert "text of shapes: 2 encoded\n" in logs(project, "text")
    assert project.run("text_tiny").idle


def test_jobs_side_by_side_never_share_a_gpu(tmp_path: Path, micro: Path) -> None:
    project = make(tmp_path / "project", micro, batch={"items": 1})
    world.keep(project / "data/shapes", 4)
    project.meet_in_script("encode.py", 4)
    result = project.run("latents_tiny")
    assert len(submitted(result)) == 4
    assert sorted(project.met()) == ["0", "1", "2", "3"]


def test_a_cancelled_job_is_retried_and_takes_what_was_finished(
    tmp_path: Path, micro: Path
) -> None:
    project = make(tmp_path / "project", micro)
    project.stop_in_script("encode.py", "/16", 4)
    process = project.start("latents_tiny")
    try:
        wait_until(lambda: len(list((project / "cache").rglob("16/*.safetensors"))) >= 4, process)
        subprocess.run(["scancel", "--state=RUNNING", f"--user={subprocess_user()}"], check=True)
        assert process.wait(timeout=600) == 0, (project / "started.txt").read_text()
    finally:
        process.kill()
    text = logs(project, "latents")
    encoded, kept = map(int, re.findall(r"(\d+) encoded, (\d+) kept", text)[-1])
    assert kept >= 4 and encoded + kept == 12
    assert project.run("latents_tiny").idle


def subprocess_user() -> str:
    return subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()


def test_each_entry_of_the_profile_is_explained() -> None:
    text = (ROOT / "profiles/slurm/config.yaml").read_text()
    assert set(yaml.safe_load(text)) >= {"executor", "jobs", "retries", "slurm-status-command"}
    blocks = [block for block in text.split("\n\n")[1:] if not block.startswith("#")]
    assert [block for block in blocks if "#" not in block] == ["executor: slurm"]
