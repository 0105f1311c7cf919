"""Caches that ai-training's scripts wrote are adopted, and written in their naming, on request."""

from __future__ import annotations

import fcntl
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import world
from latentmake.files.cachefile import read_header
from project import NOTHING, ROOT, Counts, Project, Result
from safetensors.torch import load_file

ENDINGS = {"latents": ".img_sdxl", "text": ".txt_clipl"}
STEMS = tuple(world.CAPTIONS)


def write_foreign(path: Path, name: str, values: np.ndarray) -> None:
    """Write a safetensors file of one float32 tensor, byte by byte, with no note of its making."""
    data = np.ascontiguousarray(values, dtype="<f4").tobytes()
    entry = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [0, len(data)]}
    header = json.dumps({name: entry}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def latents(number: int, size: int = 4) -> np.ndarray:
    return np.random.default_rng(number).normal(size=(4, size, size)).astype(np.float32)


def embedding(number: int) -> np.ndarray:
    return np.random.default_rng(100 + number).normal(size=(77, 16)).astype(np.float32)


def put_foreign(project: Project, *stems: str) -> None:
    """Put what ai-training's scripts would write beside some images, for a resolution of 32."""
    for stem in stems:
        base, number = f"data/shapes/{stem}", STEMS.index(stem)
        write_foreign(project / f"{base}{ENDINGS['latents']}", "latent", latents(number))
        write_foreign(project / f"{base}{ENDINGS['text']}", "emb", embedding(number))


def foreign_files(project: Project) -> dict[str, tuple[bytes, int]]:
    """Return name -> bytes and mtime of all that lies beside the images under such names."""
    return {
        path.name: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in (project / "data/shapes").iterdir()
        if path.suffix in ENDINGS.values()
    }


def caches(project: Project) -> list[str]:
    """Return the cache files, without what a killed job left."""
    return [name for name in project.cache_files() if name.endswith(".safetensors")]


def summary(result: Result) -> list[int]:
    """Return what became of targets: adopted, fresh, without a file, unfit, out of date."""
    line = result.one_line("tiny: ", " adopted, ", " without a foreign file")
    return [int(word) for word in line.replace(",", " ").split() if word.isdigit()]


def cached(project: Project, name: str) -> torch.Tensor:
    """Return the tensor of a cache file that adoption makes."""
    (tensor,) = load_file(project / name).values()
    return tensor


@pytest.fixture
def project(fresh: Callable[[], Project]) -> Project:
    """A project of one resolution whose model adopts, with nothing built."""
    made = fresh()

    def change(config: dict[str, Any]) -> None:
        config["models"]["micro"]["ai_training"] = dict(ENDINGS)
        config["runs"]["tiny"]["resolutions"] = [32]

    made.configure(change)
    return made


def test_what_was_adopted_is_not_encoded(project: Project) -> None:
    put_foreign(project, *STEMS)
    foreign = foreign_files(project)
    result = project.ask("adopt", "tiny")
    assert summary(result) == [12, 0, 0, 0, 0]
    for number, stem in enumerate(STEMS):
        for (name,), values in (
            (project.latents(stem, resolutions=(32,)), latents(number)),
            (project.texts(stem), embedding(number)),
        ):
            assert np.array_equal(cached(project, name).numpy(), values)
    assert [read_header(project / name).adopted for name in caches(project)].count("") == 0

    before = project.snapshot()
    result = project.run("caches_tiny")
    assert result.encoded() == Counts()
    assert result.jobs == ["manifest", "caches_tiny"]
    assert [row["stem"] for row in project.manifest()] == sorted(STEMS)
    (project / ".latentmake/memo.sqlite").unlink()
    assert project.run("caches_tiny").idle
    assert project.snapshot() == before
    assert foreign_files(project) == foreign


def test_after_adoption_an_edit_is_encoded_and_its_file_never_adopted_again(
    project: Project,
) -> None:
    put_foreign(project, *STEMS)
    project.ask("adopt", "tiny")
    project.run("caches_tiny")
    caption, text = project / "data/shapes/cat.txt", project.texts("cat")
    before = project.snapshot()

    caption.write_text("another circle")
    result = project.ask("adopt", "tiny")
    assert summary(result) == [0, 11, 0, 0, 1]
    result.one_line("data/shapes/cat.txt_clipl", "data/shapes/cat.txt", "before it was edited")
    result = project.run("caches_tiny")
    assert result.encoded() == Counts(encoded=1)
    assert project.changed(before) == NOTHING._replace(content=text)

    caption.write_text("a third circle")
    assert summary(project.ask("adopt", "tiny")) == [0, 11, 0, 0, 1]

    write_foreign(project / "data/shapes/cat.txt_clipl", "emb", embedding(99))
    (name,) = text
    (project / name).unlink()
    assert summary(project.ask("adopt", "tiny")) == [1, 11, 0, 0, 0]
    assert project.run("caches_tiny").encoded() == Counts()
    assert np.array_equal(cached(project, name).numpy(), embedding(99))


def test_files_that_do_not_fit_are_named_and_what_is_missing_is_encoded(project: Project) -> None:
    put_foreign(project, *STEMS)
    broken = project / "data/shapes/dog.img_sdxl"
    broken.write_bytes(broken.read_bytes()[:-1])
    (project / "data/shapes/fox.txt_clipl").unlink()
    result = project.ask("adopt", "tiny")
    assert summary(result) == [10, 0, 1, 1, 0]
    result.one_line("not adopted: data/shapes/dog.img_sdxl: ", "cut short")
    assert "Traceback" not in result.output
    before = project.snapshot()
    result = project.run("caches_tiny")
    assert result.encoded("latents") == Counts(encoded=1)
    assert result.encoded("text") == Counts(linked=1)  # fox has the caption of bee
    added = project.latents("dog", resolutions=(32,)) | project.texts("fox")
    assert project.changed(before) == NOTHING._replace(added=added)
    assert project.run("caches_tiny").idle


def test_only_the_resolution_that_files_have_is_adopted(project: Project) -> None:
    project.configure(lambda config: config["runs"]["tiny"].update(resolutions=[16, 32]))
    put_foreign(project, *STEMS)
    assert summary(project.ask("adopt", "tiny")) == [12, 0, 6, 0, 0]
    assert summary(project.ask("adopt", "tiny")) == [0, 12, 6, 0, 0]
    result = project.run("caches_tiny")
    assert result.encoded() == Counts(encoded=6)
    for stem in STEMS:
        fresh, adopted = sorted(project.latents(stem))
        assert cached(project, fresh).shape == (4, 2, 2)
        assert cached(project, adopted).shape == (4, 4, 4)


def test_a_killed_adoption_goes_on_where_it_was(project: Project) -> None:
    stems = [f"item{number:03}" for number in range(30)]
    for number, stem in enumerate(stems):
        world.draw(project / f"data/shapes/{stem}.png", number)
        (project / f"data/shapes/{stem}.txt").write_text(stem)
        base = f"data/shapes/{stem}"
        write_foreign(project / f"{base}{ENDINGS['latents']}", "latent", latents(number))
        write_foreign(project / f"{base}{ENDINGS['text']}", "emb", embedding(number))
    command = [sys.executable, "-m", "latentmake", "adopt", "tiny"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts")}
    running = subprocess.Popen(command, env=environment, cwd=project.folder)
    while len(caches(project)) < 5 and running.poll() is None:
        time.sleep(0.01)
    running.kill()
    running.wait()
    done = len(caches(project))
    assert done >= 5
    assert "" not in [read_header(project / name).adopted for name in caches(project)]
    assert summary(project.ask("adopt", "tiny")) == [60 - done, done, 12, 0, 0]
    assert len(caches(project)) == 60
    # The pictures of the six other items are among those of the first.
    assert project.run("caches_tiny").encoded("latents") == Counts(linked=6)
    assert project.temporaries() == []


def test_what_cannot_be_adopted_is_one_line(project: Project) -> None:
    result = project.ask("adopt", "tinny", check=False)
    assert result.returncode == 2 and "there is no such run; did you mean `tiny`?" in result.output
    (project / ".latentmake").mkdir(exist_ok=True)
    with (project / ".latentmake/building.lock").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        result = project.ask("adopt", "tiny", check=False)
        assert result.returncode == 2 and "another build is running here" in result.output


# -- export --------------------------------------------------------------------------------------


def test_an_export_holds_the_caches_and_is_written_once(project: Project) -> None:
    result = project.run("export_tiny")
    assert set(result.jobs) > {"manifest", "export_tiny"}
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
    assert project.run("caches_tiny").idle

    (project / "data/shapes/dog.txt").write_text("a dog")
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


def test_what_a_cache_was_adopted_from_is_left_as_it_is(project: Project) -> None:
    project.configure(lambda config: config["models"]["micro"].update(dtype="bfloat16"))
    put_foreign(project, *STEMS)
    foreign = foreign_files(project)
    assert summary(project.ask("adopt", "tiny")) == [12, 0, 0, 0, 0]
    result = project.run("export_tiny")
    assert result.encoded() == Counts()
    result.one_line("tiny: 0 written, 12 up to date")
    assert foreign_files(project) == foreign


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
    result.one_line("error: data/shapes: ", "read-only", "export.folder")
    assert "Traceback" not in result.output
    assert foreign_files(project) == {}
