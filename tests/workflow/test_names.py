"""Names of files and folders, and places from which the build is called."""

from __future__ import annotations

import os
import site
import subprocess
import venv
from pathlib import Path

import world
import yaml
from project import NOTHING, Counts, Project

STEMS = [
    *("a b", "ümlaut ß", "br{x}ace", "{stem}", "sub folder/dänn/it's #1 (50%)", "-dash", "日本"),
    *("of <sks>", "<logs>/*", "no" + "o" * 30),
]


def test_names_with_spaces_umlauts_braces_and_folders(micro: Path, tmp_path: Path) -> None:
    config = world.config()
    config["datasets"]["shapes"]["path"] = "data/schöne {Bilder} 1"
    config["runs"]["tiny"]["resolutions"] = [16]
    project = Project.make(tmp_path / "my prüject", config, micro)
    folder = project / "data/schöne {Bilder} 1"
    for number, stem in enumerate(STEMS):
        world.draw(folder / f"{stem}.png", number)
        (folder / f"{stem}.txt").write_text(f"picture {number}")
    result = project.run("caches_tiny")
    assert result.encoded() == Counts(encoded=2 * len(STEMS))
    assert {row["stem"] for row in project.manifest()} == set(STEMS)
    expected = project.texts(*STEMS) | project.latents(*STEMS, resolutions=(16,))
    assert set(project.cache_files()) == expected

    before = project.snapshot()
    (folder / "br{x}ace.txt").write_text("another caption")
    result = project.run("caches_tiny")
    assert result.encoded() == Counts(encoded=1)
    assert project.changed(before) == NOTHING._replace(content=project.texts("br{x}ace"))
    assert project.run("caches_tiny").idle


def test_an_environment_in_a_folder_with_a_space_runs_the_jobs(micro: Path, tmp_path: Path) -> None:
    project = Project.make(tmp_path / "project", world.config(), micro)
    world.draw(project / "data/shapes/only.png", 1)
    (project / "data/shapes/only.txt").write_text("the only picture")
    venv.create(tmp_path / "my $(env)", symlinks=True)
    done = subprocess.run(
        [tmp_path / "my $(env)/bin/python", "-m", "snakemake", "--cores", "1", "text_tiny"],
        cwd=project.folder,
        env={
            **project.environment(),
            "PYTHONPATH": os.pathsep.join([*site.getsitepackages(), str(project / "scripts")]),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert set(project.cache_files()) == project.texts("only")


def test_one_image_built_from_another_folder_with_a_configuration_elsewhere(
    micro: Path, tmp_path: Path
) -> None:
    project = Project.make(tmp_path / "project", {"no": "configuration of ours"})
    work, own = tmp_path / "work", tmp_path / "own.yaml"
    work.mkdir()
    config = world.config()
    config["datasets"] = {"one-1.x": {"path": str(tmp_path / "one")}}
    config["models"] = {"sd-1.5": {"vae": str(micro / "vae"), "text": str(micro / "text_encoder")}}
    config["runs"] = {"my-run.1": {"datasets": "one-1.x", "model": "sd-1.5", "resolutions": 16}}
    own.write_text(yaml.safe_dump(config))
    world.draw(tmp_path / "one/only.png", 1)
    (tmp_path / "one/only.txt").write_text("the only picture")
    places = ["--snakefile", str(project / "Snakefile"), "--directory", str(work)]
    command = ["caches_my-run.1", *places, "--configfile", str(own)]
    result = project.run(*command, cwd=tmp_path)
    assert result.encoded() == Counts(encoded=2)
    assert Project(work).cache_files() == [
        "cache/one-1.x/sd-1.5/16/only.latents.safetensors",
        "cache/one-1.x/sd-1.5/text/only.text.safetensors",
    ]
    assert project.cache_files() == []
    assert project.run(*command, cwd=tmp_path).idle


def test_a_run_never_encodes_what_only_another_one_needs(built: Project) -> None:
    def two_runs(config: dict) -> None:
        common = config["runs"]["tiny"]
        config["runs"]["a"] = {**common, "resolutions": [16, 24]}
        config["runs"]["b"] = {**common, "resolutions": [16, 40]}

    built.configure(two_runs)
    before = built.snapshot()
    result = built.run("caches_a")
    assert result.encoded() == Counts(encoded=6)
    added = built.latents(*world.CAPTIONS, resolutions=(24,))
    assert built.changed(before) == NOTHING._replace(added=added)
    table = built.run("-n", "caches_b").table()
    assert {kind: row["new"] for (_, kind), row in table.items() if row["new"]} == {"latents 40": 6}
    assert built.run("caches_tiny").idle


def test_one_cache_file_asked_for_by_name(built: Project) -> None:
    name = "cache/shapes/micro/16/ant.latents.safetensors"
    before = built.snapshot()
    assert built.run(name).idle
    world.draw(built / "data/shapes/ant.png", 50)
    assert built.run(name).encoded() == Counts(encoded=1)
    assert built.changed(before) == NOTHING._replace(content={name})
    # Beside its run it is made once.
    world.draw(built / "data/shapes/ant.png", 51)
    result = built.run("caches_tiny", name)
    assert result.encoded() == Counts(encoded=2) and "latents" not in result.jobs
    # The longest name.
    stem = "".join(map(str, range(1000)))[:235]
    world.draw(built / f"data/shapes/{stem}.png", 52)
    (built / f"data/shapes/{stem}.txt").write_text("a long name")
    name = f"cache/shapes/micro/16/{stem}.latents.safetensors"
    assert built.run(name).encoded() == Counts(encoded=1)
    assert built.run(name).idle
