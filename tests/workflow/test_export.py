"""Caches are written under the names that ai-training's scripts read."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import world
from project import Project
from safetensors.torch import load_file, save_file

ENDINGS = {"latents": ".img_sdxl", "text": ".txt_clipl"}
STEMS = tuple(world.CAPTIONS)


def write_foreign(path: Path, name: str, number: int, shape: tuple[int, ...]) -> None:
    """Write a safetensors file of one tensor, with no note of its making."""
    random = torch.Generator().manual_seed(number)
    save_file({name: torch.randn(shape, generator=random)}, path)


def put_foreign(project: Project, *stems: str) -> None:
    """Put what ai-training's scripts would write beside some images, for a resolution of 32."""
    for stem in stems:
        base, number = f"data/shapes/{stem}", STEMS.index(stem)
        write_foreign(project / f"{base}{ENDINGS['latents']}", "latent", number, (4, 4, 4))
        write_foreign(project / f"{base}{ENDINGS['text']}", "emb", number, (77, 16))


def foreign_files(project: Project) -> dict[str, tuple[bytes, int]]:
    """Return name -> bytes and mtime of all that lies beside the images under such names."""
    return {
        path.name: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in (project / "data/shapes").iterdir()
        if path.suffix in ENDINGS.values()
    }


@pytest.fixture
def project(fresh: Callable[[], Project]) -> Project:
    """A project of one resolution whose model names such files, with nothing built."""
    made = fresh()

    def change(config: dict[str, Any]) -> None:
        config["models"]["micro"]["ai_training"] = dict(ENDINGS)
        config["runs"]["tiny"]["resolutions"] = [32]

    made.configure(change)
    return made


def test_an_export_holds_the_caches_and_is_written_once(project: Project) -> None:
    project.ask("explain", "export_tiny").one_line("6 of 6 latents of shapes: new")
    result = project.run("export_tiny")
    assert set(result.jobs) > {"manifest", "export_tiny"}
    project.ask("explain", "export_tiny").one_line("export_tiny: fresh")
    result.one_line("tiny: 12 written, 0 up to date")
    written = foreign_files(project)
    assert written.keys() == {f"{stem}{end}" for stem in STEMS for end in ENDINGS.values()}
    for stem in STEMS:
        (name,) = project.latents(stem, resolutions=(32,))
        (tensor,) = load_file(project / f"data/shapes/{stem}.img_sdxl").items()
        assert tensor[0] == "latent" and tensor[1].dtype == torch.float32
        assert tensor[1].equal(load_file(project / name)["latents"])
        (name,) = project.texts(stem)
        (tensor,) = load_file(project / f"data/shapes/{stem}.txt_clipl").items()
        assert tensor[0] == "emb" and tensor[1].dtype == torch.float32
        assert tensor[1].equal(load_file(project / name)["text_encoder.hidden_state"])

    result = project.run("export_tiny")
    assert result.jobs == ["export_tiny"]
    result.one_line("tiny: 0 written, 12 up to date")
    assert foreign_files(project) == written

    (project / "data/shapes/dog.txt").write_text("a dog")
    assert project.run("caches_tiny").jobs
    project.ask("explain", "export_tiny").one_line("data/shapes/dog.txt_clipl: cache ", ".. -> ")
    project.run("export_tiny").one_line("tiny: 1 written, 11 up to date")
    now = foreign_files(project)
    assert {name for name in now if now[name] != written[name]} == {"dog.txt_clipl"}


def test_what_another_program_wrote_is_replaced_on_request_alone(project: Project) -> None:
    put_foreign(project, "ant", "bee")
    foreign = foreign_files(project)
    result = project.run("export_tiny", check=False)
    assert result.returncode != 0
    result.one_line("tiny: 8 written, 0 up to date, 4 left")
    result.one_line("error: ", "4 files", "export.overwrite")
    for name in foreign:
        result.one_line(f"data/shapes/{name}: is not of latentmake's making")
    assert {name: foreign_files(project)[name] for name in foreign} == foreign

    project.configure(lambda config: config.update(export={"overwrite": True}))
    project.run("export_tiny").one_line("tiny: 4 written, 8 up to date, 0 left")


def test_an_export_may_go_elsewhere_with_the_dataset_left_untouched(project: Project) -> None:
    project.configure(
        lambda config: (
            config.update(export={"folder": "out", "resolution": 16}),
            config["runs"]["tiny"].update(resolutions=[16, 32]),
            config["models"]["micro"].update(dtype="float16"),
        )
    )
    for ending in (".png", ".txt"):
        (project / f"data/shapes/ant{ending}").rename(project / f"data/shapes/sub.a{ending}")
    project.run("export_tiny")
    files = {path.name for path in (project / "out/shapes").iterdir()}
    assert files == {f"{stem}{end}" for stem in ("sub.a", *STEMS[1:]) for end in ENDINGS.values()}
    (tensor,) = load_file(project / "out/shapes/sub.a.img_sdxl").values()
    assert tensor.shape == (4, 2, 2) and tensor.dtype == torch.float32
    assert foreign_files(project) == {}


def test_a_dataset_that_cannot_be_written_is_one_line(project: Project) -> None:
    project.run("caches_tiny")
    folder = project / "data/shapes"
    mount = ["mount", "--bind", str(folder), str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting needs the rights of root")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)
        result = project.run("export_tiny", check=False)
    finally:
        subprocess.run(["umount", str(folder)], check=True)
    assert result.returncode != 0
    result.one_line("error: data/shapes/", "read-only")
    assert "Traceback" not in result.output
    assert foreign_files(project) == {}
