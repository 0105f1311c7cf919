"""Wan through musubi-tuner: its caches, built incrementally; its checklist; its training."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import musubi_world
import pytest
import torch
import video_world
import wan
import world
from project import NOTHING, Project
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from wan import with_trainer

FOLDERS = ("64", "96", "128x64")


@pytest.fixture(scope="session")
def wan_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny Wan model."""
    folder = tmp_path_factory.mktemp("models") / "wan"
    wan.make_model(folder)
    return folder


@pytest.fixture(scope="session")
def wan_template(tmp_path_factory: pytest.TempPathFactory, wan_model: Path) -> Project:
    """A project whose caches are all built, with a trainer. Not to be changed: copy it."""
    project = wan.make(tmp_path_factory.mktemp("wan") / "project", wan_model)
    project.run("caches_tiny")
    return project


@pytest.fixture
def built(wan_template: Project, tmp_path: Path) -> Project:
    return wan_template.copy(tmp_path / "project")


@pytest.fixture
def fresh(wan_model: Path, tmp_path: Path) -> Callable[..., Project]:
    return lambda **model: wan.make(tmp_path / "project", wan_model, **model)


def texts(stem: str, folders: tuple[str, ...] = FOLDERS) -> set[str]:
    return {f"cache/shapes/wan/{folder}/{stem}_wan_te.safetensors" for folder in folders}


def latents(stem: str, folders: tuple[str, ...] = FOLDERS) -> set[str]:
    width, height = wan.SIZES[stem]
    return {
        f"cache/shapes/wan/{folder}/{stem}_{width:04d}x{height:04d}_wan.safetensors"
        for folder in folders
    }


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata())


# -- caches ---------------------------------------------------------------------------------------


def test_each_resolution_is_a_cache_directory_of_its_own_with_latents_and_text(
    wan_template: Project,
) -> None:
    wanted = {path for stem in world.CAPTIONS for path in latents(stem) | texts(stem)}
    assert set(wan_template.cache_files()) == wanted
    for stem, caption in world.CAPTIONS.items():
        for path in sorted(latents(stem)):
            (key,) = load_file(wan_template / path)
            tensor = load_file(wan_template / path)[key]
            frames, height, width = map(int, key.split("_")[1].split("x"))
            assert tensor.shape == (16, frames, height, width) and frames == 1
            assert key.endswith("_bfloat16") and tensor.dtype == torch.bfloat16
            said = metadata(wan_template / path)
            size = (int(said["width"]), int(said["height"]))
            assert said["architecture"] == "wan" and size == wan.SIZES[stem]
        for path in sorted(texts(stem)):
            assert metadata(wan_template / path)["caption1"] == caption


def test_the_same_command_does_nothing(built: Project) -> None:
    built.scramble_mtimes()
    before = built.snapshot()
    assert built.run("caches_tiny").idle
    assert built.changed(before) == NOTHING


def test_one_caption_edited_is_one_encoding_and_three_linked_files(built: Project) -> None:
    before = built.snapshot()
    (built / "data/shapes/ant.txt").write_text("a purple circle\n")
    result = built.run("caches_tiny")
    assert result.encoded("text")[:3] == (1, 0, 2)
    assert result.encoded("latents") == (0, 0, 0, 0, 0)
    changed = built.changed(before)
    assert changed.content == texts("ant")
    assert not (changed.added or changed.removed or changed.rewritten)
    assert len({wan.inode(built / path) for path in texts("ant")}) == 1
    assert built.run("caches_tiny").idle


def test_an_image_of_another_size_gets_other_names_and_the_old_ones_go(built: Project) -> None:
    before = built.snapshot()
    world.draw(built / "data/shapes/ant.png", 77, (100, 160))
    result = built.run("caches_tiny")
    assert result.encoded() == (3, 0, 0, 0, 0)
    changed = built.changed(before)
    assert changed.removed == latents("ant")
    assert changed.added == {path.replace("0200x0120", "0100x0160") for path in latents("ant")}
    assert not (changed.content or changed.rewritten)


def test_another_resolution_encodes_no_text_again(built: Project) -> None:
    before = built.snapshot()
    built.configure(lambda values: values["runs"]["tiny"]["resolutions"].append(160))
    result = built.run("caches_tiny")
    assert result.encoded("text").encoded == 0
    assert result.encoded("latents").encoded == 6
    changed = built.changed(before)
    assert changed.added >= texts("ant", ("160",)) | latents("ant", ("160",))
    assert not (changed.content or changed.rewritten or changed.removed)


def test_what_is_renamed_is_linked_under_names_that_musubi_tuner_looks_for(built: Project) -> None:
    before = built.snapshot()
    for ending in ("png", "txt"):
        (built / f"data/shapes/ant.{ending}").rename(built / f"data/shapes/yak.{ending}")
    (built / "data/shapes").rename(built / "data/forms")
    built.configure(lambda values: values["datasets"]["shapes"].update(path="data/forms"))
    result = built.run("caches_tiny")
    assert result.encoded() == (0, 0, 6, 0, 0)  # three resolutions, and a text in each
    old = latents("ant") | texts("ant")
    changed = built.changed(before)
    assert changed.removed == old
    assert changed.added == {path.replace("/ant_", "/yak_") for path in old}
    assert not (changed.content or changed.rewritten)
    now = built.snapshot()
    assert all(before[path][0] == now[path.replace("/ant_", "/yak_")][0] for path in old)
    assert built.run("caches_tiny").idle


def test_a_removed_item_leaves_nothing_to_be_trained_on(built: Project) -> None:
    (built / "data/shapes/ant.png").unlink()
    (built / "data/shapes/ant.txt").unlink()
    before = built.snapshot()
    built.run("caches_tiny")
    assert built.changed(before).removed == latents("ant") | texts("ant")


def test_a_text_that_musubi_tuner_rewrote_is_stale(built: Project) -> None:
    path = built / sorted(texts("bee"))[0]
    said = metadata(path)
    tensors = load_file(path)
    path.unlink()  # the other names of the file stay as they are
    save_file(tensors, path, {**said, "caption1": "what somebody else encoded"})
    result = built.run("caches_tiny")
    assert result.encoded("text").linked == 1  # to another name that still holds it
    assert metadata(path)["caption1"] == world.CAPTIONS["bee"]


def test_any_cache_file_can_be_asked_for_by_name(fresh: Callable[..., Project]) -> None:
    project = fresh()
    asked = [sorted(latents("cat"))[0], sorted(texts("cat"))[1]]
    project.run(*asked)
    assert project.cache_files() == sorted(asked)
    assert project.run(*asked).idle


def test_image_to_video_caches_the_first_frame_and_clip_too(fresh: Callable[..., Project]) -> None:
    project = fresh(task="i2v-14B", clip="models/wan/models_clip_open-clip.pth")
    (path,) = sorted(latents("eel", ("64",)))
    project.run(path)
    found = {key: tuple(value.shape) for key, value in load_file(project / path).items()}
    clip = found.pop("clip_bfloat16")
    assert len(clip) == 2
    assert found == {
        "latents_1x8x8_bfloat16": (16, 1, 8, 8),
        "latents_image_1x8x8_bfloat16": (20, 1, 8, 8),
    }
    assert load_file(project / path)["clip_bfloat16"].dtype == torch.float16


def test_control_images_are_part_of_what_decides(fresh: Callable[..., Project]) -> None:
    project = fresh(task="t2v-1.3B-FC")
    for number, stem in enumerate(world.CAPTIONS):
        world.draw(project / f"data/control/{stem}.png", 20 + number, wan.SIZES[stem])
    project.configure(
        lambda values: values["datasets"]["shapes"].update(control_directory="data/control")
    )
    project.run("latents_tiny")
    (path,) = sorted(latents("dog", ("96",)))
    assert {key.rsplit("_", 2)[0] for key in load_file(project / path)} == {
        "latents",
        "latents_control",
    }
    before = project.snapshot()
    world.draw(project / "data/control/dog.png", 5, (70, 70))
    project.run("latents_tiny")
    assert project.changed(before).content == latents("dog")
    (project / "data/control/dog.png").unlink()
    result = project.run("latents_tiny", "-n", check=False)
    result.one_line("data/shapes/dog.png", "no control", "data/control/dog")


def test_a_model_that_turns_out_to_be_broken_costs_nothing_when_it_is_put_right(
    built: Project,
) -> None:
    before = built.snapshot()
    good = built / "models/wan/Wan2.1_VAE.pth"
    state = torch.load(good, weights_only=True)
    state["conv1.weight"].fill_(float("nan"))
    torch.save(state, built / "models/wan/broken.pth")
    built.configure(lambda values: values["models"]["wan"].update(vae="models/wan/broken.pth"))
    result = built.run("caches_tiny", check=False)
    assert result.returncode != 0
    result.one_line("eel.png", "NaN or infinity")
    built.configure(lambda values: values["models"]["wan"].update(vae="models/wan/Wan2.1_VAE.pth"))
    result = built.run("caches_tiny")
    assert result.encoded("latents").encoded == 0
    assert {name: content for name, (content, _) in built.snapshot().items()} == {
        name: content for name, (content, _) in before.items()
    }
    assert all(path.stat().st_nlink > 1 for path in built.store())  # they take no room


def test_what_a_training_lacks_is_named_before_anything_is_encoded(
    fresh: Callable[..., Project],
) -> None:
    project = fresh(dit="models/wan/none.safetensors")
    with_trainer(project)
    result = project.run("train_tiny", check=False)
    assert result.returncode != 0
    result.one_line("error", "models.wan.dit", "none.safetensors")
    assert project.cache_files() == []
    assert project.run("-n", "caches_tiny").jobs  # for which none is needed


def test_an_item_set_aside_leaves_nothing_to_be_trained_on(fresh: Callable[..., Project]) -> None:
    project = fresh()
    project.configure(lambda values: values["datasets"]["shapes"].update(on_error="skip"))
    (project / "data/shapes/ant.txt").write_bytes(b"\xff not UTF-8")
    (project / "data/shapes/bee.png").write_bytes(b"no picture")
    project.run("caches_tiny")
    wanted = {x for stem in world.CAPTIONS for x in latents(stem) | texts(stem)}
    gone = latents("ant") | texts("ant") | latents("bee") | texts("bee")
    assert set(project.cache_files()) == wanted - gone
    assert {row["stem"] for row in project.manifest() if "aside" in row} == {"ant", "bee"}
    assert project.run("caches_tiny").idle
    (project / "data/shapes/ant.txt").write_text("mended")
    project.run("caches_tiny")
    assert set(project.cache_files()) == wanted - latents("bee") - texts("bee")


# -- videos ---------------------------------------------------------------------------------------


def test_a_video_is_cut_into_clips_that_share_a_text(fresh: Callable[..., Project]) -> None:
    project = fresh()
    folder = project.folder / "data/clips"
    folder.mkdir()
    video_world.write_video(folder / "walk.mp4", "mpeg4", 14, size=(64, 48))
    (folder / "walk.txt").write_text("somebody walks")

    def change(values: dict[str, Any]) -> None:
        clips = {"path": "data/clips", "target_frames": [1, 5], "frame_extraction": "chunk"}
        values["datasets"] = {"clips": clips}
        values["runs"]["tiny"].update(datasets=["clips"], resolutions=[[64, 48]])

    project.configure(change)
    project.run("caches_tiny")
    names = [Path(name).name for name in project.cache_files()]
    one = [f"walk_{start:05d}-001_0064x0048_wan.safetensors" for start in range(14)]
    five = [f"walk_{start:05d}-005_0064x0048_wan.safetensors" for start in (0, 5)]
    assert sorted(names) == sorted([*one, *five, "walk_wan_te.safetensors"])
    path = project / f"cache/clips/wan/64x48/{five[1]}"
    assert {key: tuple(x.shape) for key, x in load_file(path).items()} == {
        "latents_2x6x8_bfloat16": (16, 2, 6, 8)
    }
    assert metadata(path)["frame_count"] == "5"
    assert project.run("caches_tiny").idle
    before = project.snapshot()
    (folder / "walk.txt").write_text("somebody runs")
    project.run("caches_tiny")
    assert {Path(each).name for each in project.changed(before).content} == {
        "walk_wan_te.safetensors"
    }


# -- training -------------------------------------------------------------------------------------


def test_a_run_is_trained_from_its_caches_once(built: Project) -> None:
    folder = with_trainer(built)
    built.run("train_tiny")
    assert load_file(built / "runs/tiny/tiny.safetensors")
    called = musubi_world.called(folder)
    assert Path(called["cwd"]) == folder
    assert str(built / "scripts") not in called["environment"].get("PYTHONPATH", "")
    assert built.run("train_tiny").idle
    (built / "data/shapes/ant.txt").write_text("a purple circle\n")
    assert "train" in built.run("train_tiny").jobs


def test_the_checklist_names_what_is_wrong(built: Project) -> None:
    with_trainer(built)
    result = built.ask("check")
    assert "failed" not in result.output.replace("0 failed", "")
    shutil.copy(built / "models/wan/Wan2.1_VAE.safetensors", built / "models/wan/other.safetensors")
    built.configure(
        lambda values: values["models"]["wan"].update(dit="models/wan/other.safetensors")
    )
    (built / sorted(latents("bee"))[0].replace("bee", "stranger")).write_bytes(b"x")
    result = built.ask("check", check=False)
    assert result.returncode == 1
    result.one_line("other.safetensors", "VAE")
    result.one_line("stranger")


# -- publication ----------------------------------------------------------------------------------


def test_what_is_published_trains_on_another_machine(built: Project, tmp_path: Path) -> None:
    folder = with_trainer(built)
    for script in ("wan_cache_latents.py", "wan_cache_text_encoder_outputs.py"):
        (folder / script).write_text("import sys\nprint(sys.argv)\n")
    built.configure(lambda values: values.update(publish={"path": str(tmp_path / "carried away")}))
    built.run("publish_tiny")
    there = tmp_path / "carried away/tiny"
    assert {path.name for path in there.iterdir()} >= {
        *("tiny_linux.toml", "tiny_win.toml", "train_tiny.sh", "train_tiny.bat"),
        *(f"shapes_{folder}" for folder in FOLDERS),
        *(f"shapes_{folder}_cache" for folder in FOLDERS),
    }
    before = {path: path.stat().st_mtime_ns for path in there.rglob("*.safetensors")}
    (built / "data/shapes/ant.txt").write_text("a purple circle\n")
    built.run("publish_tiny")
    changed = {p.name for p, old in before.items() if p.stat().st_mtime_ns != old}
    assert changed == {"ant_wan_te.safetensors"}
    done = wan.bash(there / "train_tiny.sh", **built.environment())
    assert done.returncode == 0, done.stdout + done.stderr
    assert (there / "output/tiny.safetensors").is_file()


# -- by its own scripts ---------------------------------------------------------------------------

SCRIPTED = """
import argparse, json, sys, tomllib
from pathlib import Path
sys.path.insert(0, {helpers!r})
parser = argparse.ArgumentParser()
for name in ("dataset_config", "vae", "vae_dtype", "t5", "clip", "num_workers"):
    parser.add_argument("--" + name)
for name in ("keep_cache", "skip_existing", "i2v", "fp8_t5", "vae_cache_cpu"):
    parser.add_argument("--" + name, action="store_true")
args = parser.parse_args()
import torch
from PIL import Image
from safetensors.torch import save_file
with open("called.jsonl", "a") as file:
    file.write(json.dumps(sys.argv) + "\\n")
for block in tomllib.load(open(args.dataset_config, "rb"))["datasets"]:
    Path(block["cache_directory"]).mkdir(exist_ok=True)
    for line in open(block["image_jsonl_file"]):
        item = json.loads(line)
        stem = Path(block["cache_directory"]) / Path(item["image_path"]).stem
        said = {{"architecture": "wan", "format_version": "1.0.1"}}
        if args.t5:
            embedding = torch.full((3, 8), float(len(item["caption"])), dtype=torch.bfloat16)
            said["caption1"] = item["caption"]
            save_file({{"varlen_t5_bfloat16": embedding}}, f"{{stem}}_wan_te.safetensors", said)
            continue
        image = Image.open(item["image_path"])
        from latentmake.config.datasets import Dataset
        from latentmake.geometry.buckets import Size
        from latentmake.layouts.layout import layout_of
        asked = Size(*block["resolution"])
        buckets = Dataset(path="-", fit="bucket")
        w, h = layout_of("musubi").size(Size(*image.size), asked, buckets)
        name = f"latents_1x{{h // 8}}x{{w // 8}}_bfloat16"
        latents = torch.full((16, 1, h // 8, w // 8), 0.5, dtype=torch.bfloat16)
        said |= {{"width": str(image.width), "height": str(image.height)}}
        path = f"{{stem}}_{{image.width:04d}}x{{image.height:04d}}_wan.safetensors"
        save_file({{name: latents}}, path, said)
"""


def test_its_own_scripts_are_called_for_what_is_stale_alone(fresh: Callable[..., Project]) -> None:
    project = fresh(encoder="musubi")
    folder = with_trainer(project)
    for script in ("wan_cache_latents.py", "wan_cache_text_encoder_outputs.py"):
        (folder / script).write_text(SCRIPTED.format(helpers=str(project / "scripts")))
    project.run("caches_tiny")
    wanted = {path for stem in world.CAPTIONS for path in latents(stem) | texts(stem)}
    assert set(project.cache_files()) == wanted
    calls = [json.loads(line) for line in (folder / "called.jsonl").read_text().splitlines()]
    assert len(calls) == 2 and all("--keep_cache" in call for call in calls)
    assert not any(set(call) & {"--sdpa", "--xformers", "--flash_attn"} for call in calls)
    before = project.snapshot()
    (project / "data/shapes/ant.txt").write_text("a purple circle\n")
    project.run("caches_tiny")
    assert project.changed(before).content == texts("ant")
    assert len((folder / "called.jsonl").read_text().splitlines()) == 3
    assert project.run("caches_tiny").idle
    with (folder / "wan_cache_latents.py").open("a") as script:
        script.write("# of another version\n")
    (folder / "wan_generate_video.py").write_text("# which makes no caches\n")
    table = project.run("-n", "caches_tiny").table()
    changed = {kind: row["changed recipe"] for (_, kind), row in table.items()}
    assert {kind.partition(" ")[0] for kind, count in changed.items() if count} == {"latents"}


# -- bad input ------------------------------------------------------------------------------------


def test_two_images_of_one_name_are_refused_wherever_they_lie(built: Project) -> None:
    world.draw(built / "data/shapes/more/ant.png", 3)
    (built / "data/shapes/more/ant.txt").write_text("another ant")
    result = built.run("caches_tiny", check=False)
    assert result.returncode != 0
    result.one_line("data/shapes/more/ant.png", "data/shapes/ant.png", "rename")
