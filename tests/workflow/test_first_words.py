"""What a command says before anything is planned: of its configuration, targets and folders."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from project import Project, Result


def fails(result: Result, *words: str) -> None:
    """Check that a command ended with one line that holds all these words, and no traceback."""
    assert result.returncode == 1
    lines = [line for line in result.output.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and all(word in lines[0] for word in words), result.output
    assert "Traceback" not in result.output and "Exception" not in result.output
    assert 'File "' not in result.output and "usage:" not in result.output


def test_a_configuration_that_is_no_yaml_is_one_line_with_its_line(
    fresh: Callable[[], Project], tmp_path: Path
) -> None:
    project = fresh()
    own, good = tmp_path / "own.yaml", (project / "config/config.yaml").read_bytes()
    for data, words in (
        (good + b"models: {}\n", ["`models` occurs twice", "write it once"]),
        (good + b"batch: {items: [1}\n", ["but got '}'"]),
        (good + b"\xe4: 1\n", ["0xe4 is not UTF-8"]),
    ):
        line = f"line {len(good.splitlines()) + 1}: "
        (project / "config/config.yaml").write_bytes(data)
        fails(project.run("-n", "all", check=False), "error: config/config.yaml, ", line, *words)
    own.write_bytes(data)
    (project / "config/config.yaml").write_bytes(good)
    command = ["-n", "all", "--configfile", str(own)]
    fails(project.run(*command, check=False), f"error: {own}, ", line, *words)
    (project / "config/config.yaml").write_bytes(b"")
    fails(project.run("-n", check=False), "error: config/config.yaml: is empty")
    fails(project.run("-n", "--configfile", "nix.yaml", check=False), "nix.yaml: there is no such")
    fails(project.run("-n", "--configfile", "all", check=False), "write it before --configfile")


def test_another_folder_without_a_configuration_is_told_of_configfile(
    fresh: Callable[[], Project], tmp_path: Path
) -> None:
    project = fresh()
    words = ["config/config.yaml: there is no such file in ", "--configfile FILE"]
    snakefile = str(project / "Snakefile")
    fails(project.run("-n", "-s", snakefile, check=False, cwd=tmp_path), *words)
    fails(project.run("-n", "-d", str(tmp_path), check=False), *words)


def test_a_target_that_there_is_not_is_one_line(fresh: Callable[[], Project]) -> None:
    project = fresh()
    listed = "targets: all, train_{run}, caches_{run}, "
    for target, words in {
        "trian_tiny": ["did you mean `train_tiny`?"],
        "caches_tinny": ["there is no run `tinny`", "did you mean `caches_tiny`?"],
        "clean": [listed, "runs: tiny"],
        "cache/shapes/micro/65/ant.latents.safetensors": ["not a multiple of the VAE's factor 8"],
        "cache/shapes/micro/99999/ant.latents.safetensors": ["there is no such resolution"],
        "cache/shapes/micro/16/antt.latents.safetensors": ["no item has a cache file"],
        "cache/shapes/mikro/16/ant.latents.safetensors": ["did you mean `micro`?"],
    }.items():
        if target.startswith("cache/"):  # which the plan looks for
            line = project.refusal(target)
            assert all(word in line for word in (f"error: {target}: ", *words)), line
        else:
            fails(project.run("-n", target, check=False), f"error: {target}: ", *words)


def test_folders_that_snakemake_needs_are_looked_at_first(fresh: Callable[[], Project]) -> None:
    project = fresh()
    for name in (".snakemake", "logs"):
        shutil.rmtree(project / name, ignore_errors=True)
        (project / name).touch()
        result = project.run("caches_tiny", check=False)
        fails(result, f"error: {name}: a file lies where a folder belongs")
        (project / name).unlink()
    braces = project.folder.with_name("my {project}")
    project.folder.rename(braces)
    fails(Project(braces).run("-n", check=False), "my {project}: ", "braces", "rename the folder")


def test_without_cores_all_are_used_and_given_ones_count(built: Project) -> None:
    project = built
    (project / "data/shapes/ant.txt").write_text("a caption")
    alone = [each for each in project.command() if each not in ("--cores", "1")]
    project.command = lambda *arguments: [*alone, *arguments]  # type: ignore[method-assign]
    assert f"Provided cores: {os.cpu_count()}" in project.run("caches_tiny").output
    for number, cores in enumerate((["--cores", "1"], ["-j", "1"], ["-c", "1"])):
        (project / "data/shapes/ant.txt").write_text(f"caption {number}")
        assert "Provided cores: 1" in project.run("text_tiny", *cores).output


def test_a_dry_run_says_nothing_of_records_that_are_not_kept(built: Project) -> None:
    result = built.run("-n", "caches_tiny")
    assert result.idle and "provenance" not in result.output and "metadata" not in result.output
