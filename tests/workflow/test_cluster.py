"""Several GPUs on one machine, and what a cluster's profile must not do while planning."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import world
from project import Project

TOOLS = ("sbatch", "squeue", "sacct", "sinfo", "scancel", "srun", "scontrol", "sacctmgr")


def test_as_many_jobs_run_as_there_are_gpus_each_with_its_own(fresh: Callable[[], Project]) -> None:
    project = fresh()
    world.keep(project / "data/shapes", 4)  # one more than there are GPUs
    project.configure(lambda values: values.update(batch={"items": 1}))
    project.meet_in_script("encode.py", 3)
    project.compute_on_the_cpu()
    done = project.run("--cores", "4", "latents_tiny", CUDA_VISIBLE_DEVICES="0,1,2")
    gpus = project.met()
    assert sorted(gpus) == ["0", "1", "2"]
    logs = [path.read_text() for path in (project / "logs/latents/shapes").glob("*.log")]
    assert sorted(re.findall(r"^GPU: (\d)$", "\n".join(logs), re.MULTILINE)) == sorted(gpus)
    assert "waiting for a GPU" not in done.output


def test_a_profile_asks_no_cluster_for_a_dry_run_and_submits_what_the_configuration_asks_for(
    fresh: Callable[[], Project], tmp_path: Path
) -> None:
    project = fresh()
    jobs = {"encode": {"constraint": "a100|h100"}, "qos": "night", "partition": "gpu"}
    project.configure(lambda values: values.update(cluster={"constraint": "ib", **jobs}))
    # A site's profile may say how many cores there are here: jobs run where the executor says.
    site, profile = project / "site/config.yaml", project / "profiles/slurm/config.yaml"
    site.parent.mkdir()
    site.write_text(f"{profile.read_text()}\ncores: 2\n")
    called, tools = tmp_path / "called.txt", tmp_path / "tools"
    tools.mkdir()
    for name in TOOLS:
        (tools / name).write_text(f'#!/bin/sh\necho {name} "$@" >>{called}\nexit 1\n')
        (tools / name).chmod(0o755)

    def asked(*arguments: str) -> tuple[subprocess.CompletedProcess[str], set[str]]:
        called.unlink(missing_ok=True)
        command = project.command(*arguments, "caches_tiny", "--profile", "site")
        done = subprocess.run(
            [each for each in command if each not in ("--cores", "1")],
            cwd=project.folder,
            env={**project.environment(), "PATH": f"{tools}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=False,
        )
        return done, set(called.read_text().splitlines()) if called.exists() else set()

    done, calls = asked("-n", "-p")
    assert done.returncode == 0, done.stdout + done.stderr
    # The plugin asks that when it is imported, for the text of its help; no answer does as well.
    assert calls <= {"scontrol show config"}
    assert "encode_latents_shapes" in done.stdout + done.stderr
    assert done.stdout.count("gpu=1") == 2
    assert re.search(r"shapes\s+micro\s+latents 16\s+\.\s+6", done.stderr)
    done, calls = asked("--retries", "0")
    submitted = [call for call in calls if call.startswith("sbatch ")]
    assert done.returncode and len(submitted) == 2, done.stdout + done.stderr
    for call in submitted:  # sbatch reads -C as --constraint
        assert " --gpus=1" in call
        assert " -C a100|h100 " in call and " --qos=night " in call and " -p gpu " in call


def test_a_source_edited_after_the_plan_is_reported_and_has_its_own_key(
    built: Project,
) -> None:
    # A wrapper edits the caption between planning and the job, as a user might on a busy cluster.
    caption = built / "data/shapes/ant.txt"
    caption.write_text("edited before the plan")
    entry = built / "scripts/encode.py"
    entry.write_text(
        "open('data/shapes/ant.txt', 'w').write('edited after the plan')\n"
        + entry.read_text(encoding="utf-8").replace('"""', "#", 2)
    )
    output = built.run("text_tiny").output
    assert re.search(r"data/shapes/ant.txt: was edited after this build was planned", output)
    path = built / "cache/shapes/micro/text/ant.text.safetensors"
    assert b"edited after the plan" in path.read_bytes()
    assert built.run("text_tiny").idle


@pytest.mark.parametrize("seconds", [-3600, 3600], ids=["behind", "ahead"])
def test_a_node_whose_clock_is_wrong_rebuilds_nothing(
    seconds: int, fresh: Callable[[], Project]
) -> None:
    project = fresh()
    entry = project / "scripts/encode.py"
    # What the node of a shared file system would write, an hour off.
    late = (
        "    import os, time\n"
        "    for path in snakemake.output:\n"
        f"        os.utime(path, (time.time() + {seconds},) * 2)\n"
    )
    entry.write_text(entry.read_text(encoding="utf-8") + late)
    project.run("caches_tiny")
    assert project.run("caches_tiny").idle
    before = project.snapshot()
    (project / "data/shapes/ant.txt").write_text("a purple circle")
    project.run("caches_tiny")
    assert project.changed(before).content == project.texts("ant")
    assert project.run("caches_tiny").idle
