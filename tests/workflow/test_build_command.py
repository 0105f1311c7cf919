"""`latentmake build` finds the configuration, and says in our words alone what a build does."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import preloaded
import pytest
import yaml
from latentmake.base.errors import ConfigError
from latentmake.commands.build import _resolved, _with_profiles
from latentmake.commands.project import HOME
from project import Project, wait_until

SNAKEMAKE = re.compile(
    r"rule |jobid|wildcards|(?<!--)profile|Complete log|Job stats|Provided|Select jobs|DAG"
    r"|Exception|WorkflowError|(?<!`)[Ss]nakemake|steps \(|Nothing to be done|Traceback"
    r"|Terminating|Elapsed"
)
WEIGHTS = "tiny: weights in runs/tiny/pytorch_lora_weights.safetensors"
PICTURES = "tiny: sample pictures in runs/tiny/samples.png"


def command(project: Project, *arguments: str) -> dict[str, Any]:
    """Return what starts `latentmake build` in a project."""
    preload = preloaded.environment() if project.preloads else {}
    paths = [preload.get("PYTHONPATH"), str(project / "scripts")]
    return {
        "args": [sys.executable, "-m", "latentmake", "build", *arguments],
        "cwd": project.folder,
        "env": {
            **project.environment(),
            **preload,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        },
        "stderr": subprocess.STDOUT,
        "text": True,
    }


def build(project: Project, *arguments: str, status: int = 0) -> list[str]:
    """Run `latentmake build`; return its lines, of which none is Snakemake's."""
    done = subprocess.run(**command(project, *arguments), stdout=subprocess.PIPE, timeout=600)
    assert done.returncode == status, done.stdout
    assert not SNAKEMAKE.search(done.stdout), done.stdout
    return [line for line in done.stdout.splitlines() if line]


def edit(project: Project, text: str = "an edited caption") -> None:
    (project / "data/shapes/ant.txt").write_text(text)


def test_a_build_shows_the_plan_and_ends_with_results_and_what_is_next(trained: Project) -> None:
    assert build(trained, "tiny")[-3:] == ["tiny: up to date, nothing to do", WEIGHTS, PICTURES]
    edit(trained)
    before = trained.snapshot()
    planned = build(trained, "tiny", "-n")
    assert "1 target to make (0 latents, 1 text), in 1 job" in planned
    assert planned[-1].startswith("training of tiny: ") and trained.snapshot() == before
    lines = build(trained, "tiny", "--", "--cores", "1", "--keep-going")
    assert lines[: len(planned)] == planned
    assert re.fullmatch(r"text of shapes: logs/text/shapes/\w+\.log", lines[len(planned)])
    assert "training of tiny: logs/train/tiny.log" in lines
    next_ = "next: compare tiny with its previous result: latentmake compare tiny"
    assert lines[-4:] == ["1 text encoded, 0 latents", WEIGHTS, PICTURES, next_]


def test_a_failed_build_ends_with_what_is_wrong_where_and_how_much_is_finished(
    trained: Project,
) -> None:
    edit(trained)
    picture = trained / "data/shapes/cat.png"
    picture.write_bytes(picture.read_bytes()[:90])
    lines = build(trained, "train_tiny", status=1)
    fault, log, finished = lines[-3:]
    assert fault.startswith("failed: 1 of 1 items are faulty: data/shapes/cat.png: is damaged")
    assert re.fullmatch(r"log: logs/latents/shapes/\w+\.log", log)
    assert finished == "finished: 1 of 3 cache files; the same command goes on"
    assert sum("data/shapes/cat.png" in line for line in lines) == 2  # once while it encodes
    stops = build(trained, "tiny", "-n")[-1]
    assert stops.startswith("the training of tiny will not start: 1 picture is faulty; repair it")
    checked = trained.ask("check", check=False).output.splitlines()
    assert checked[-1] == stops
    # With the plain command too, these are the last lines, and no exception stands before them.
    result = trained.run("train_tiny", check=False)
    assert result.output.splitlines()[-3:][0] == fault
    assert result.output.count("cat.png: is damaged") == 4  # plan, item, job, last lines
    assert "Exception" not in result.output and "Error in rule" not in result.output


def test_an_interrupted_build_ends_with_one_line(trained: Project) -> None:
    edit(trained)
    trained.preloads = False
    trained.stop_in_script("train.py", "/tiny", 1)
    output = trained / "started.txt"
    with output.open("w") as file:
        running = subprocess.Popen(**command(trained, "tiny"), stdout=file, start_new_session=True)
        wait_until(lambda: "training of tiny: logs" in output.read_text(), running)
        running.send_signal(signal.SIGINT)
        assert running.wait(timeout=120) == 130
    said = output.read_text()
    assert not SNAKEMAKE.search(said), said
    last = "interrupted; finished: 1 of 1 cache files; the same command goes on"
    assert said.splitlines()[-1] == last


def test_the_configuration_is_the_one_that_has_the_run(built: Project) -> None:
    cats = built.config
    cats["runs"] = {"cats": cats["runs"]["tiny"]}
    (built / "cats.yaml").write_text(yaml.safe_dump(cats))
    (built / "notes.yaml").write_text("- no configuration")
    planned = build(built, "-n", "caches_cats")
    assert planned[2].split() == ["shapes", "micro", "latents", "16", "6"]
    name = "cache/shapes/micro/16/ant.latents.safetensors"
    (line,) = build(built, name, "-n", status=2)
    assert line.startswith(f"error: {name}: several configurations have it: config/config.yaml, ")
    assert "name one: latentmake build " in line
    assert build(built, name, "-c", "cats.yaml", "-n") == [f"{name}: up to date, nothing to do"]


def test_a_run_that_no_configuration_has_is_one_line(built: Project) -> None:
    shutil.copy(built / "config/config.yaml", built / "own.yaml")
    (built / "config/config.yaml").unlink()
    (line,) = build(built, "tinny", status=2)
    words = "no configuration here has this run; did you mean `tiny` of own.yaml?"
    assert line == f"error: tinny: {words}"
    (line,) = build(built, "caches_tiny", "--", "--no-such-option", status=2)
    assert "--no-such-option" in line and "options after `--`" in line
    (line,) = build(built, "caches_tiny", "--profile", "mine", status=2)
    what, hint = "is no folder with a config.yaml", "name `slurm`, or a folder of your own"
    assert line == f"error: --profile mine: {what}; {hint}"
    (built / "own.yaml").write_text("runs: {tiny: [}")
    (line,) = build(built, "tiny", status=2)
    assert line.startswith("error: own.yaml, line 1: ")
    (built / "own.yaml").unlink()
    (line,) = build(built, "tiny", status=2)
    assert "there is no configuration; write one: `latentmake init FOLDER`" in line


def test_a_target_is_found_by_its_run_its_dataset_or_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").mkdir()
    for file, run, data in (("a.yaml", "cats", "pets"), ("config/b.yaml", "text_b", "shapes")):
        values = {"runs": {run: {}}, "datasets": {data: {}}, "models": {"sd": {}}}
        (tmp_path / file).write_text(yaml.safe_dump(values))
    for targets, names, file in (
        (["cats"], ["train_cats"], "a.yaml"),
        (["text_cats", "cats"], ["text_cats", "train_cats"], "a.yaml"),
        (["runs/cats/dataset.lock"], ["runs/cats/dataset.lock"], "a.yaml"),
        (["reports/evaluate_cats.html"], ["reports/evaluate_cats.html"], "a.yaml"),
        (["cache/pets/sd/64/x.safetensors"], ["cache/pets/sd/64/x.safetensors"], "a.yaml"),
        (["text_b"], ["train_text_b"], "config/b.yaml"),
    ):
        assert [(x, str(y)) for x, [y] in [_resolved(targets, [])]] == [(names, file)]
    with pytest.raises(ConfigError, match="no configuration has all of them"):
        _resolved(["cats", "text_b"], [])
    with pytest.raises(ConfigError, match=r"runs: cats \(a.yaml\), text_b \(config/b.yaml\)"):
        _resolved(["something"], [])
    for file in ("a.yaml", "config/b.yaml"):
        assert _resolved(["all"], [tmp_path / file])[0] == ["all"]


def test_a_profile_of_ours_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    slurm = str(HOME / "profiles/slurm")
    for given, found in (
        (["--profile", "slurm"], ["--profile", slurm]),
        (["--profile=slurm", "-F"], [f"--profile={slurm}", "-F"]),
        (["--profile", "mine", "slurm"], ["--profile", "mine", "slurm"]),
    ):
        assert _with_profiles(given) == found
    (tmp_path / "slurm").mkdir()
    assert _with_profiles(["--profile", "slurm"]) == ["--profile", "slurm"]


def test_a_build_whose_jobs_snakemake_leaves_out_is_not_up_to_date(trained: Project) -> None:
    edit(trained)
    graph = trained / "scripts/latentmake/graph.py"
    check = '        if word == "manifest":\n'
    graph.write_text(graph.read_text().replace(check, f"{check}            raise ValueError\n"))
    built = subprocess.run(**command(trained, "tiny"), stdout=subprocess.PIPE, timeout=600)
    line = "error: Snakemake left out the jobs of this plan; add `{}--debug-dag` to see the error"
    assert built.returncode == 2
    assert built.stdout.splitlines()[-1] == line.format("-- --quiet progress ")
    done = trained.run("train_tiny", check=False)
    assert done.returncode == 1 and done.one_line("left out") == line.format("")
    assert trained.run("train_tiny", "--until", "latents", check=False).returncode == 0
