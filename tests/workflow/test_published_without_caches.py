"""`publish_{run}` without encoding: the trainer's machine makes the caches."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import musubi_world
import sdscripts
import sdscripts_world
import wan
import world
from latentmake.base import digest
from latentmake.runs.rows import chosen
from project import Project

ELSEWHERE = "/data/models/of another machine"


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def times(folder: Path) -> dict[str, int]:
    return {name: (folder / name).stat().st_mtime_ns for name in names(folder)}


def changed(before: dict[str, int], folder: Path) -> set[str]:
    after = times(folder)
    different = {name for name in before | after if before.get(name) != after.get(name)}
    return different - {".latentmake-published.json"}


def make_wan(folder: Path) -> Project:
    """Make a project whose VAE and T5 are nowhere on this machine."""
    project = Project.make(
        folder,
        {
            "datasets": {"shapes": {"path": "data/shapes", "fit": "bucket"}},
            "models": {
                "wan": {
                    "task": "t2v-1.3B",
                    "vae": "E:/models/vae.safetensors",
                    "text": f"{ELSEWHERE}/t5.pth",
                    "dit": "dit.safetensors",
                }
            },
            "runs": {"tiny": {"datasets": ["shapes"], "model": "wan", "resolutions": [64, 96]}},
            "musubi_tuner": {"path": "musubi-tuner", "venv": sys.prefix},
            "publish": {"path": "out", "caches": False},
        },
    )
    wan.make_dataset(project / "data/shapes")
    tuner = musubi_world.stand_in(project.folder / "musubi-tuner", own_venv=False)
    for script in ("wan_cache_latents.py", "wan_cache_text_encoder_outputs.py"):
        (tuner / script).write_text("")
    wan.write_dit(project / "dit.safetensors")
    return project


def test_a_wan_run_is_published_without_encoding(tmp_path: Path) -> None:
    project = make_wan(tmp_path / "project")
    project.configure(lambda values: values["publish"].update(attention="mem_eff_attn"))
    line = project.refusal("publish_tiny")
    assert "musubi-tuner has no mem_eff_attn" in line and "publish.attention" in line
    project.configure(lambda values: values["publish"].update(attention="flash_attn"))
    project.ask("explain", "publish_tiny").one_line("tiny_linux.toml is missing")
    assert project.run("publish_tiny").jobs == ["publish_tiny"]
    assert not (project / "cache").exists() and not (project / "runs").exists()
    project.ask("explain", "publish_tiny").one_line("publish_tiny: fresh")
    place = project / "out/tiny"
    pictures = {f"shapes_{size}/{stem}" for size in (64, 96) for stem in world.CAPTIONS}
    assert names(place) == {
        *(f"{path}{ending}" for path in pictures for ending in (".png", ".txt")),
        *(
            f"shapes_{size}_cache/.latentmake-{kind}.json"
            for size in (64, 96)
            for kind in ("latents", "text")
        ),
        *("tiny_linux.toml", "tiny_win.toml"),
        *(f"train_tiny.{ending}" for ending in ("sh", "bat", "py", "json")),
        *("cache_tiny.sh", "cache_tiny.bat", ".latentmake-published.json"),
    }
    published = json.loads((place / "train_tiny.json").read_text())
    latents, text, training = (call[1] for call in published["linux"]["calls"])
    assert "--flash_attn" in training
    assert "/mnt/e/models/vae.safetensors" in latents and f"{ELSEWHERE}/t5.pth" in text
    windows = published["windows"]["calls"][0][1]
    assert "E:/models/vae.safetensors" in windows

    # What its scripts would make there.
    for size in (64, 96):
        for stem, (width, height) in wan.SIZES.items():
            for ending in (f"_{width:04d}x{height:04d}_wan", "_wan_te"):
                made = place / f"shapes_{size}_cache/{stem}{ending}.safetensors"
                made.write_bytes(b"made there")
    before = times(place)
    project.run("publish_tiny").one_line("0 files written")
    assert changed(before, place) == set()

    # An edited caption is one file and its caches; a removed item takes all of its own along.
    (project / "data/shapes/ant.txt").write_text("a purple circle\n")
    for ending in ("png", "txt"):
        (project / f"data/shapes/bee.{ending}").unlink()
    said = project.ask("explain", "publish_tiny")
    said.one_line("shapes_64/ant.txt differs from what it is made of")
    said.one_line("shapes_96/bee.png belongs to no item any longer")
    project.run("publish_tiny").one_line("6 caches made in", "dropped")
    texts = {f"shapes_{size}_cache/ant_wan_te.safetensors" for size in (64, 96)}
    edited = texts | {f"shapes_{size}/ant.txt" for size in (64, 96)}
    gone = {name for name in before if "/bee" in name}
    assert len(gone) == 8
    assert changed(before, place) == edited | gone


def make_sd_scripts(folder: Path) -> Project:
    """Make a project of sd-scripts whose model is nowhere on this machine."""
    values: dict[str, Any] = sdscripts.config(
        "sdxl", vae="E:/models/vae.safetensors", text=[f"{ELSEWHERE}/{n}" for n in (1, 2)]
    )
    values["publish"] = {"path": "out", "caches": False, "batch_size": 4}
    values["models"]["tiny"]["checkpoint"] = f"{ELSEWHERE}/base.safetensors"
    values["runs"]["tiny"]["trainer"] = {"kind": "sdscripts", "max_train_epochs": 1}
    values["sd_scripts"] = {"path": "sd-scripts"}
    project = Project.make(folder, values)
    sdscripts.make_dataset(project / "data/shapes")
    sdscripts_world.stand_in(project.folder / "sd-scripts")
    return project


def test_a_run_of_sd_scripts_is_published_without_encoding(tmp_path: Path) -> None:
    project = make_sd_scripts(tmp_path / "project")
    assert project.run("publish_tiny").jobs == ["publish_tiny"]
    assert not (project / "cache").exists()
    place = project / "out/tiny"
    assert not list(place.rglob("*.npz"))
    listed = json.loads((place / "shapes_64/metadata.json").read_text())
    caption = sdscripts.CAPTIONS["sub/cat"]
    assert listed["sub/cat.png"] == {"caption": caption, "image_size": [40, 90]}
    (call,) = json.loads((place / "train_tiny.json").read_text())["linux"]["calls"]
    text = " ".join(call[1])
    for words in (
        "--vae /mnt/e/models/vae.safetensors",
        "--cache_latents_to_disk",
        "--cache_text_encoder_outputs_to_disk",
        "--vae_batch_size 4",
        "--no_half_vae",
    ):
        assert words in text
    project.run("publish_tiny").one_line("0 files written")


def test_held_out_items_are_published_without_encoding(tmp_path: Path) -> None:
    project = make_sd_scripts(tmp_path / "project")
    project.configure(lambda values: values["runs"]["tiny"].update(validation={"items": 2}))
    project.run("publish_tiny")
    pictures = {stem: project / f"data/shapes/{stem}.png" for stem in sdscripts.CAPTIONS}
    contents = {stem: digest.of_file(path) for stem, path in pictures.items()}
    held = {stem for stem in contents if contents[stem] in chosen(contents.values(), 2)}
    for size in (64, 128):
        place = project / f"out/tiny/shapes_{size}"
        listed = json.loads((place / "metadata.json").read_text())
        assert {*listed} == {f"{stem}.png" for stem in contents.keys() - held}
        published = {path.read_bytes() for path in place.glob("held_out/*.png")}
        assert published == {pictures[stem].read_bytes() for stem in held}
    project.ask("explain", "publish_tiny").one_line("publish_tiny: fresh")
    project.configure(lambda values: values["runs"]["tiny"].update(validation={"items": 4}))
    assert "4 of 6 different sources" in project.refusal("publish_tiny")


def test_a_run_whose_models_lie_elsewhere_is_looked_at(tmp_path: Path) -> None:
    project = make_sd_scripts(tmp_path / "project")
    project.ask("check").one_line("model: checkpoint", "ok", "not on this machine, taken as it is")
    project.ask("status").one_line("tiny: 0 targets fresh, 18 stale")
    project.ask("captions", "tiny").one_line("tokens are not counted", f"{ELSEWHERE}/1")
    project.ask("verify").one_line("18 missing")
    project.ask("report", "tiny")
    assert not (project / "cache").exists()
    for target in ("caches_tiny", "train_tiny"):
        line = project.refusal(target)
        assert "models.tiny.vae" in line and "E:/models/vae.safetensors" in line
