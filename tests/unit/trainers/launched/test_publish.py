"""The published folder: what lies in it, what a second publication does, its scripts at work."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from controlled_world import configured
from latentmake.base.errors import ConfigError, SourceError, StorageError, TrainingError, UserError
from latentmake.base.paths import System
from latentmake.base.sync import RECORD
from latentmake.config.datasets import Dataset
from latentmake.config.machines import ExternalProgram, Publish
from latentmake.trainers.launched import publish
from latentmake.trainers.musubi.order import MusubiOrder
from latentmake.trainers.musubi.publish import MusubiPublication
from publish_world import ATTENTION, NEEDED, check_flags, fill, order_of, put, value

pytestmark = pytest.mark.usefixtures("own_folder")

STEMS = {"gove": ["a", "sub/b ä", "c!"]}
SCRIPTS = tuple(NEEDED)
VIDEOS = {"v": Dataset(path="data/v", target_frames=[5], control_directory="controls")}


def published(order: MusubiOrder) -> tuple[Path, list[str]]:
    said: list[str] = []
    publish.publish(MusubiPublication(order), said.append)
    return Path(order.publish.path).absolute() / order.run, said


def files(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != RECORD
    }


def members(folder: Path) -> set[str]:
    return {name for name in files(folder) if "/" in name}


def toml(folder: Path, system: str = "linux") -> dict[str, Any]:
    return tomllib.loads((folder / f"gove-1.0_{system}.toml").read_text())


def training(order: MusubiOrder, system: System) -> list[str]:
    return MusubiPublication(order).calls(publish.Names(order, system))[-1][1]


def calls(folder: Path, system: System) -> dict[str, list[str]]:
    """Return script -> arguments of the calls that a published folder holds."""
    text = (folder / f"train_{folder.name}.json").read_text()
    return dict(json.loads(text)[system]["calls"])


def filled(**changes: Any) -> MusubiOrder:
    """Return an order whose items, caches and manifest exist."""
    order = order_of(**changes)
    fill(order, STEMS)
    return order


def with_publish(order: MusubiOrder, **settings: Any) -> MusubiOrder:
    return order.model_copy(update={"publish": Publish.model_validate(settings)})


def without_caches(**changes: Any) -> MusubiOrder:
    settings = {"caches": False, **changes.pop("publish", {})}
    return with_publish(order_of(**changes), **settings)


# -- what lies in it ------------------------------------------------------------------------------


def test_images_captions_and_caches_lie_flat_in_folders_of_each_resolution() -> None:
    folder, said = published(filled())
    found = files(folder)
    expected = {
        *("gove-1.0_linux.toml", "gove-1.0_win.toml"),
        *(f"train_gove-1.0.{ending}" for ending in ("sh", "bat", "py", "json")),
    }
    for size in ("256", "480x832"):
        for base, caption in (("a", "caption of a"), ("b ä", "caption of sub/b ä"), ("c", "")):
            stem = {"b ä": "sub/b ä"}.get(base, base)
            members = {
                f"gove_{size}/{base}.png": f"picture {stem}",
                f"gove_{size}/{base}.txt": caption,
                f"gove_{size}_cache/{base}_0064x0064_wan.safetensors": f"{size}{stem}",
                f"gove_{size}_cache/{base}_wan_te.safetensors": f"embedding of {stem}",
            }
            assert {name: found[name] for name in members} == members
            expected |= set(members)
    assert set(found) == expected
    assert any("30 files written" in line for line in said)
    assert os.access(folder / "train_gove-1.0.sh", os.X_OK)


def test_a_caption_is_published_as_it_was_encoded_without_its_byte_order_mark() -> None:
    order = filled()
    manifest = Path(order.manifest)
    first, *rows = map(json.loads, manifest.read_text().splitlines())
    rows.insert(0, {**first, "texts": ["photo of a"]})
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("data/gove/sub/b ä.txt").write_bytes("\ufeffa red square\r\nby night".encode())
    folder, _ = published(order)
    for size in ("256", "480x832"):
        assert (folder / f"gove_{size}/a.txt").read_bytes() == b"photo of a\n"
        assert (folder / f"gove_{size}/b ä.txt").read_bytes() == b"a red square\r\nby night"


@pytest.mark.parametrize("listed", [False, True], ids=["a folder", "a list"])
def test_videos_lie_there_with_all_their_clips_and_controls_and_those_of_a_list_without(
    listed: bool,
) -> None:
    lists = {"v": Dataset(path="data/v/list.jsonl", target_frames=[5])}
    order = order_of(datasets=lists if listed else VIDEOS, resolutions=[(64, 64)])
    fill(order, {"v": ["x.f9-5" if listed else "x"]}, control=not listed)
    folder, _ = published(order)
    stem = "x.f9-5" if listed else "x"
    clips = {f"v_64_cache/{stem}_{start}-005_0064x0064_wan" for start in ("00000", "00005")}
    caches = {f"{name}.safetensors" for name in clips | {f"v_64_cache/{stem}_wan_te"}}
    further = set() if listed else {"v_64/x.mp4", "v_64_control/x.png"}
    assert members(folder) == caches | further | {f"v_64/{stem}.txt"}
    (block,) = toml(folder)["datasets"]
    assert block["video_directory"] == f"{folder}/v_64"
    assert block["cache_directory"] == f"{folder}/v_64_cache"
    assert block.get("control_directory") == (None if listed else f"{folder}/v_64_control")


def test_images_and_captions_get_endings_that_musubi_tuner_looks_for() -> None:
    dataset = Dataset(path="data/gove", caption_extension=".cap.txt")
    order = order_of(datasets={"gove": dataset}, resolutions=[(64, 64)])
    fill(order, {"gove": ["a", "b", "c", "d"]}, control=True)
    text = Path(order.manifest).read_text()
    for stem, ending in (("b", ".Png"), ("c", ".tif"), ("d", ".JPG")):
        for folder in ("data/gove", "None"):
            file = Path(f"{folder}/{stem}.png")
            text = text.replace(str(file), str(file.rename(file.with_suffix(ending))))
    Path(order.manifest).write_text(text)
    folder, _ = published(order)
    images = {"a.png", "b.png", "c.png", "d.JPG"}
    captions = {f"gove_64/{stem}.txt" for stem in "abcd"}
    found = {name for name in members(folder) if "_cache/" not in name}
    assert found == captions | {
        f"gove_64{end}/{name}" for end in ("", "_control") for name in images
    }
    assert toml(folder)["general"]["caption_extension"] == ".txt"


def test_videos_of_one_name_in_two_folders_are_published_under_the_names_of_their_caches() -> None:
    order = order_of(datasets=VIDEOS, resolutions=[(64, 64)])
    fill(order, {"v": ["rain_x", "sun_x"]}, control=True)
    text = Path(order.manifest).read_text()
    for place, ending in (("data/v", ".mp4"), ("controls", ".png")):
        for name in ("rain", "sun"):
            file, moved = Path(f"{place}/{name}_x{ending}"), f"{place}/{name}/x{ending}"
            text = text.replace(str(file), put(moved, file.read_text()))
            file.unlink()
    Path(order.manifest).write_text(text)
    found = files(published(order)[0])
    for name in ("rain_x", "sun_x"):
        assert found[f"v_64/{name}.mp4"] == f"picture {name}"
        assert found[f"v_64/{name}.txt"] == f"caption of {name}"
        assert found[f"v_64_control/{name}.png"] == f"control {name}"
        assert f"v_64_cache/{name}_00000-005_0064x0064_wan.safetensors" in found


def test_what_is_gone_is_removed_and_what_others_put_there_is_not() -> None:
    order = filled()
    folder, _ = published(order)
    put(folder / "gove_256/notes.md", "mine")
    put(folder / "output/gove-1.0.safetensors", "trained")
    smaller = order.model_copy(update={"resolutions": [(256, 256)]})
    fill(smaller, {"gove": ["a"]})
    published(smaller)
    assert members(folder) == {
        *("gove_256/a.png", "gove_256/a.txt", "gove_256/notes.md"),
        "gove_256_cache/a_0064x0064_wan.safetensors",
        "gove_256_cache/a_wan_te.safetensors",
        "output/gove-1.0.safetensors",
    }
    assert not (folder / "gove_480x832").exists()


# -- bad input ------------------------------------------------------------------------------------


def of_list(architecture: str, **settings: Any) -> MusubiOrder:
    config = configured(architecture, path="list.jsonl", **settings)
    order = order_of(datasets=config.datasets)
    return order.model_copy(update={"model": config.models["model"]})


def without_a_source() -> MusubiOrder:
    order = filled()
    Path("data/gove/a.png").unlink()
    return order


def folder_for_text() -> MusubiOrder:
    Path("t5").mkdir()
    return without_caches(model={"text": "t5"})


PLACES: dict[str, tuple[type[UserError], list[str]]] = {
    "file": (StorageError, ["file", "move it away"]),
    "/proc/latentmake": (StorageError, ["/proc/latentmake"]),
    "/mnt/q/x": (ConfigError, ["publish.path", "is not mounted"]),
    "Q:\\x": (ConfigError, ["publish.path", "is not mounted"]),
    "\\\\nas\\x": (ConfigError, ["publish.path_maps"]),
    "data/gove/out": (ConfigError, ["gove", "publish.path"]),
}
LISTED = ["datasets.pictures.path: a published folder tells"]
AUTO = {"v": Dataset(path="data/v", target_frames=[5], source_fps="auto")}
HUB = {"vae": {"hub": "some/vae", "revision": "1" * 40}}
REFUSED: dict[str, tuple[Callable[[], MusubiOrder], type[UserError], list[str]]] = {
    "controls of a list": (lambda: of_list("qwen_image_edit"), ConfigError, LISTED),
    "layers of a list": (
        lambda: of_list("qwen_image_layered", multiple_target=True),
        ConfigError,
        LISTED,
    ),
    "clips that it cannot cut": (
        lambda: without_caches(datasets=AUTO, resolutions=[(64, 64)]),
        ConfigError,
        ["datasets.v.source_fps: ", "publish.caches: true"],
    ),
    "one name": (
        lambda: with_publish(order_of(), folders="{dataset}"),
        ConfigError,
        ["publish.folders", "{resolution}"],
    ),
    "a source": (without_a_source, SourceError, ["data/gove/a.png", "is not there"]),
    "no program": (
        lambda: filled().model_copy(update={"program": None}),
        ConfigError,
        ["musubi_tuner.path"],
    ),
    "no network": (
        lambda: order_of(model={"dit": None}),
        TrainingError,
        ["model: dit", "is not set"],
    ),
    "the hub": (lambda: without_caches(model=HUB), ConfigError, ["models.wan.vae", "some/vae"]),
    "a folder": (folder_for_text, ConfigError, ["models.wan.text", "not t5"]),
}


def placed(path: str) -> Callable[[], MusubiOrder]:
    return lambda: with_publish(filled(), path=path)


REFUSED |= {path: (placed(path), *expected) for path, expected in PLACES.items()}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_published_is_told_in_a_line_and_nothing_is_written(name: str) -> None:
    make, kind, words = REFUSED[name]
    put("file", "")
    with pytest.raises(kind) as error:
        published(make())
    text = str(error.value)
    assert "\n" not in text
    assert all(word in text for word in words), text
    assert not Path("published").exists()


def test_a_drive_of_windows_is_a_folder_here_by_the_maps() -> None:
    maps = [{"linux": f"{Path.cwd()}/share", "windows": "Q:"}]
    published(with_publish(filled(), path="Q:/out", path_maps=maps))
    assert Path("share/out/gove-1.0/gove_256/a.png").is_file()


def test_scripts_may_lie_beside_a_dataset_that_is_named_as_the_run() -> None:
    published(with_publish(filled(run="gove"), scripts="data"))
    assert Path("data/train_gove.sh").is_file() and not Path("data/gove/train_gove.sh").exists()


# -- TOML and names of systems --------------------------------------------------------------------


def mapped(order: MusubiOrder, **settings: Any) -> MusubiOrder:
    maps = [{"linux": str(Path.cwd()), "windows": "E:\\Wan Sachen"}]
    maps += [{"linux": "/models", "windows": "M:"}]
    return with_publish(order, path="published", path_maps=maps, **settings)


def test_both_tomls_say_the_same_but_for_prefixes() -> None:
    folder, said = published(mapped(filled()))
    linux, windows = toml(folder), toml(folder, "win")
    assert not any("\\" in path.read_text() for path in folder.glob("*.toml"))
    assert linux != windows
    for block in linux["datasets"]:
        for key in ("image_directory", "cache_directory"):
            assert Path(block[key]).is_dir()
            block[key] = block[key].replace(str(Path.cwd()), "E:/Wan Sachen")
    assert linux == windows
    assert not any("path_maps" in line for line in said)


def test_folders_without_a_windows_name_are_told_once_each() -> None:
    folder, said = published(filled(model={"dit": "/elsewhere/low.safetensors"}))
    lines = [line for line in said[0].splitlines() if "publish.path_maps" in line]
    here = Path.cwd()
    for prefix in (here / "published/gove-1.0", here / "musubi tuner", "/elsewhere"):
        assert sum(f" {prefix} has no name" in line for line in lines) == 1
    assert len(lines) == 3
    assert toml(folder, "win")["datasets"][0]["image_directory"] == f"{folder}/gove_256"
    assert value(calls(folder, "windows")[SCRIPTS[2]], "--dit") == "/elsewhere/low.safetensors"


def verdicts(order: MusubiOrder) -> dict[str, str]:
    return {each.what: each.verdict for each in MusubiPublication(order).findings()}


def test_paths_of_which_no_script_knows_all_are_a_fault() -> None:
    network = {"vae": "//nas/wan/vae.safetensors"}  # no Linux has a name for it
    assert verdicts(without_caches(model=network))["paths for Windows"] == "failed"
    maps = [{"linux": "/nas", "windows": "//nas/wan"}]
    found = verdicts(without_caches(model=network, publish={"path_maps": maps}))
    assert (found["paths for Windows"], found["paths for Linux"]) == ("warning", "ok")


def test_each_resolution_and_the_caches_have_scripts_where_the_user_wants_them() -> None:
    tomls, scripts = Path("musubi tuner/files/tomls"), Path("musubi tuner")
    put(tomls / "mine.toml", "")
    places = {"tomls": str(tomls), "scripts": str(scripts)}
    order = mapped(filled(), caches=False, each_resolution=True, **places)
    python = Path(put(scripts / "venv/bin/python", f'#!/bin/sh\nexec {sys.executable} "$@"\n'))
    python.chmod(0o755)
    for name in SCRIPTS:
        put(scripts / name, "import sys; print(sys.argv)")
    folder, _ = published(order)
    assert not [*folder.glob("[!.]*.*")]
    for part, sizes in {"": ["256", "480x832"], "_480x832": ["480x832"]}.items():
        run = f"gove-1.0{part}"
        for system in ("linux", "win"):
            blocks = tomllib.loads((tomls / f"{run}_{system}.toml").read_text())["datasets"]
            places = [Path(block["image_directory"]).name for block in blocks]
            assert places == [f"gove_{size}" for size in sizes]
        held = json.loads((scripts / f"train_{run}.json").read_text())
        arguments = held["windows"]["calls"][-1][1]
        toml = f"E:/Wan Sachen/{tomls}/{run}_win.toml"
        assert value(arguments, "--dataset_config") == toml
        assert value(arguments, "--output_name") == run
        done = subprocess.run(
            [scripts / f"cache_{run}.sh"], capture_output=True, check=True, text=True
        )
        assert done.stdout.count("skip_existing") == 2 and "--output_name" not in done.stdout
        assert b'.py" --only-caches %*\r\n' in (scripts / f"cache_{run}.bat").read_bytes()
    published(mapped(order_of()))
    assert [path.name for path in tomls.iterdir()] == ["mine.toml"]
    assert not [*scripts.glob("*gove*")] and (folder / "train_gove-1.0.sh").is_file()


def test_folders_results_and_batch_files_lie_where_the_user_wants_them() -> None:
    places = {"output": "tuner/output", "logs": "tuner/logs", "batch_scripts": "bats"}
    folders = "{dataset}/{resolution}"
    order = mapped(filled(), caches=False, batch_size=4, folders=folders, **places)
    folder, _ = published(order)
    assert (folder / "gove/256/a.txt").is_file()
    assert {path.name for path in folder.glob("train_*")} == {
        f"train_gove-1.0.{end}" for end in ("json", "py", "sh")
    }
    names = {f"train_gove-1.0.{end}" for end in ("bat", "json", "py")} | {"cache_gove-1.0.bat"}
    assert {path.name for path in Path("bats").iterdir()} == names
    here, there = str(Path.cwd()), "E:/Wan Sachen"
    for system, ending, root in (("linux", "linux", here), ("windows", "win", there)):
        for script, arguments in calls(folder, system).items():
            named = "" if script == SCRIPTS[2] else "_caching"  # its batches are those of the TOML
            toml = f"gove-1.0_{ending}{named}.toml"
            assert value(arguments, "--dataset_config") == f"{root}/published/gove-1.0/{toml}"
            read = tomllib.loads((folder / toml).read_text())
            assert read["general"]["batch_size"] == (4 if named else 1)
            assert read["datasets"][0]["image_directory"].endswith("/gove-1.0/gove/256")
            assert read["datasets"][0]["cache_directory"].endswith("/gove-1.0/gove/256_cache")
        assert value(arguments, "--output_dir") == f"{root}/tuner/output"
        assert value(arguments, "--logging_dir") == f"{root}/tuner/logs"
    published(mapped(order_of()))
    assert not [*Path("bats").iterdir()] and (folder / "train_gove-1.0.bat").is_file()
    assert not (folder / "gove").exists()


def test_folders_of_one_resolution_may_be_named_by_it() -> None:
    order = filled(resolutions=[(256, 256)])
    folder, _ = published(with_publish(order, folders="{resolution}", caches=False))
    assert (folder / "256_cache").is_dir() and (folder / "256/a.txt").is_file()


# -- caches that are made there -------------------------------------------------------------------

A, B = (
    {f"{stem}_0064x0064_wan.safetensors", f"{stem}_wan_te.safetensors"} for stem in ("a", "b ä")
)
LATENTS = {name for name in A | B if "_te." not in name}
SOURCES = {
    "caption": ({"data/gove/a.txt": "another caption"}, {}, A - LATENTS),
    "image": ({"data/gove/a.png": "another picture"}, {}, A & LATENTS),
    "vae": ({}, {"model": {"vae": "other.safetensors"}}, LATENTS),
    "fit": ({}, {"datasets": {"gove": Dataset(path="data/gove", fit="bucket")}}, LATENTS),
    "t5": ({}, {"model": {"text": "other.pth"}}, (A | B) - LATENTS),
    "its fp8": ({}, {"model": {"fp8_t5": True}}, (A | B) - LATENTS),
    "nothing": ({}, {}, set()),
}


FLAT = "{dataset}_{resolution}"


@pytest.mark.parametrize(
    ("change", "folders"),
    [*((change, FLAT) for change in (*SOURCES, "removed")), ("image", "{dataset}/{resolution}")],
)
def test_caches_made_there_go_with_what_they_came_from(change: str, folders: str) -> None:
    written, settings, dropped = SOURCES.get(change, ({}, {}, A))
    own: dict[str, Any] = {"publish": {"folders": folders}, "resolutions": [(256, 256)]}
    order = without_caches(**own)
    fill(order, STEMS)
    folder, _ = published(order)
    made = folder / f"{folders.format(dataset='gove', resolution=256)}_cache"
    for name in A | B:
        put(made / name, "made there")
    for path, content in written.items():
        put(path, content)
    if change == "removed":
        fill(order, {"gove": STEMS["gove"][1:]})
    _, said = published(without_caches(**{**own, **settings}))
    assert (A | B) - {path.name for path in made.glob("*.safetensors")} == dropped
    assert any("dropped" in line for line in said) == bool(dropped)


def test_caches_go_when_they_are_no_longer_published_and_come_back() -> None:
    order = filled(resolutions=[(256, 256)])
    folder, _ = published(order)
    before = files(folder)
    published(with_publish(order, caches=False))
    assert not list((folder / "gove_256_cache").glob("*.safetensors"))
    put(folder / "gove_256_cache/a_wan_te.safetensors", "made there")
    published(order)
    assert files(folder) == before


def test_paths_among_further_arguments_have_each_systems_name(tmp_path: Path) -> None:
    put("prompts.txt", "a cat")
    maps = [{"linux": str(tmp_path), "windows": "D:/training"}]
    network = {"network_module": "lycoris.kohya", "network_args": ["preset=./prompts.txt"]}
    order = order_of(trainer={"arguments": ["--sample_prompts", "prompts.txt"], **network})
    order = with_publish(order, path_maps=maps)
    linux, windows = training(order, "linux"), training(order, "windows")
    assert value(linux, "--sample_prompts") == f"{tmp_path}/prompts.txt"
    assert value(windows, "--sample_prompts") == "D:/training/prompts.txt"
    assert value(windows, "--network_module") == "lycoris.kohya"
    assert value(windows, "--network_args") == "preset=D:/training/prompts.txt"


# -- the scripts ----------------------------------------------------------------------------------

AWKWARD = "a b'c & 100% ü (x)"
RECORDER = """import json, os, sys
with open(os.environ["RECORD"], "a") as file:
    file.write(json.dumps([os.path.basename(sys.argv[0]), sys.prefix, sys.argv[1:]]) + "\\n")
sys.exit(3 if os.environ.get("FAIL") == os.path.basename(sys.argv[0]) else 0)
"""
ACCELERATE = """import os, runpy, sys
with open(os.environ["RECORD"] + ".accelerate", "w") as file:
    file.write(" ".join(sys.argv[1:]))
while not sys.argv[0].endswith(".py") or sys.argv[0] == __file__:
    del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def tuner(folder: Path, scripts: str = ".") -> None:
    for name in SCRIPTS:
        put(folder / scripts / name, RECORDER)


def venv(folder: Path, **modules: str) -> None:
    """Make a virtual environment that holds modules, and an accelerate that only notes its call."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    put(site / "accelerate/commands/launch.py", ACCELERATE)
    for name, code in modules.items():
        put(site / f"{name}.py", code)


def run_shell(
    folder: Path, record: Path, *arguments: str, fail: str = ""
) -> tuple[subprocess.CompletedProcess[str], list[list[Any]]]:
    record.unlink(missing_ok=True)
    done = subprocess.run(
        ["sh", folder / f"train_{folder.name}.sh", *arguments],
        env={"PATH": "/usr/bin:/bin", "RECORD": str(record), "FAIL": fail},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    lines = record.read_text().splitlines() if record.exists() else []
    return done, [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("scripts", "environment"), [("src/musubi_tuner", ".venv"), (".", "given")]
)
def test_the_script_caches_and_trains_in_the_trainers_environment(
    tmp_path: Path, scripts: str, environment: str
) -> None:
    home = tmp_path / AWKWARD
    given = str(tmp_path / "my env")
    place = Path(given) if environment == "given" else home / environment
    order = filled(
        model={"dit_high_noise": f"{AWKWARD}/high.safetensors", "fp8_t5": True},
        trainer={"arguments": ["--optimizer_args", 'betas=("0.9", $HOME `x`)']},
        program=ExternalProgram(path=str(home), venv="my env" if environment == "given" else None),
        publish=Publish(path=AWKWARD, attention="flash_attn", caches=False, num_processes=2),
    )
    tuner(home, scripts)
    venv(place)
    folder, _ = published(order)
    done, found = run_shell(folder, record := tmp_path / "record")
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert [call[0] for call in found] == list(SCRIPTS)
    assert {call[1] for call in found} == {str(place)}
    for name, _, arguments in found:
        check_flags(name, arguments if "train" not in name else arguments[:-2])
        assert value(arguments, "--dataset_config") == f"{folder}/gove-1.0_linux.toml"
    training = found[2][2]
    assert value(training, "--dit_high_noise") == f"{tmp_path}/{AWKWARD}/high.safetensors"
    assert value(training, "--output_dir") == f"{folder}/output"
    assert training[-2:] == ["--optimizer_args", 'betas=("0.9", $HOME `x`)']
    launched = Path(f"{record}.accelerate").read_text()
    options = "--mixed_precision bf16 --num_processes 2 --multi_gpu"
    assert launched.startswith(f"{options} {Path(home, scripts, SCRIPTS[2])} --task")


@pytest.mark.parametrize(
    ("modules", "flag"),
    [
        ({}, "sdpa"),
        ({"flash_attn": "", "xformers": ""}, "flash_attn"),
        ({"flash_attn": "import no_kernels", "xformers": ""}, "xformers"),
    ],
)
def test_the_attention_is_chosen_by_what_the_trainers_machine_can_import(
    tmp_path: Path, modules: dict[str, str], flag: str
) -> None:
    order = filled(program=ExternalProgram(path="tuner"))
    tuner(tmp_path / "tuner")
    venv(tmp_path / "tuner/venv", **modules)
    _, found = run_shell(published(order)[0], tmp_path / "record")
    assert [call[0] for call in found] == [SCRIPTS[2]]  # all caches are published
    assert set(found[0][2]) & ATTENTION == {f"--{flag}"}


@pytest.mark.parametrize(
    ("said", "given", "flag"), [("flash3", None, "flash3"), ("auto", "xformers", "xformers")]
)
def test_an_attention_that_is_set_is_not_chosen(said: str, given: str | None, flag: str) -> None:
    folder, _ = published(with_publish(filled(trainer={"attention": said}), attention=given))
    assert not json.loads((folder / "train_gove-1.0.json").read_text())["attention"]
    for system in ("linux", "windows"):
        assert set(calls(folder, system)[SCRIPTS[2]]) & ATTENTION == {f"--{flag}"}


def test_the_script_stops_at_the_first_step_that_fails(tmp_path: Path) -> None:
    order = with_publish(filled(program=ExternalProgram(path="tuner")), caches=False)
    tuner(tmp_path / "tuner")
    venv(tmp_path / "tuner/venv")
    folder, _ = published(order)
    for number, name in enumerate(SCRIPTS, 1):
        done, found = run_shell(folder, tmp_path / "record", fail=name)
        assert done.returncode == 1
        assert len(found) == number
        assert done.stderr == f"train_gove-1.0: {name} failed\n"
    done, found = run_shell(folder, tmp_path / "record", "--only-caches")
    assert done.returncode == 0 and [call[0] for call in found] == list(SCRIPTS[:2])
    done, found = run_shell(folder, tmp_path / "record", "--no-training")
    assert done.returncode == 2 and not found


def test_the_script_warns_of_a_missing_environment_and_goes_on(tmp_path: Path) -> None:
    order = with_publish(filled(program=ExternalProgram(path="tuner")), caches=False)
    folder, _ = published(order)
    done, found = run_shell(folder, record := tmp_path / "record")
    assert done.returncode == 1 and not found
    assert "tuner, has no wan_train_network.py" in done.stderr
    tuner(tmp_path / "tuner")
    done, found = run_shell(folder, record)
    assert "warning: no virtual environment" in done.stderr
    assert [call[0] for call in found] == list(SCRIPTS[:2])  # this Python has no accelerate
    assert done.returncode == 1 and "wan_train_network.py failed" in done.stderr


def test_windows_starts_the_python_of_the_environment_with_its_own_calls() -> None:
    order = filled(
        model={
            "vae": "D:/models/vae 100% & more.safetensors",
            "text": "D:\\models\\t5.pth",
            "dit": "D:/models/ü^low.safetensors",
            "dit_high_noise": "//nas/wan/high.safetensors",
        },
        program=ExternalProgram(path="C:/musubi 100%"),
    )
    folder, _ = published(mapped(order, caches=False))
    text = (folder / "train_gove-1.0.bat").read_bytes()
    assert text.count(b"\n") == text.count(b"\r\n")
    lines = text.decode().splitlines()
    python = "C:\\musubi 100%%\\{}\\Scripts\\python.exe"
    assert lines[4:] == [
        'set "PYTHON=python"',
        *(f'if exist "{x}" set "PYTHON={x}"' for x in map(python.format, (".venv", "venv"))),
        '"%PYTHON%" "%~dp0train_gove-1.0.py" %*',
    ]
    found = calls(folder, "windows")
    for name, arguments in found.items():
        check_flags(name, arguments)
        place = "E:/Wan Sachen/published/gove-1.0"
        assert value(arguments, "--dataset_config") == f"{place}/gove-1.0_win.toml"
    latents, captions, training = (found[name] for name in SCRIPTS)
    assert value(latents, "--vae") == "D:/models/vae 100% & more.safetensors"
    assert value(captions, "--t5") == "D:/models/t5.pth"
    assert value(training, "--dit") == "D:/models/ü^low.safetensors"
    assert value(training, "--dit_high_noise") == "//nas/wan/high.safetensors"
    assert value(training, "--output_dir") == f"{place}/output"


# One line for each argument; `shift` hands it on as it came.
BATCH_PYTHON = """@echo off
:next
if "%~1"=="" exit /b 3
>>"%RECORD%" echo %1
shift
goto next
"""


@pytest.mark.skipif(
    shutil.which("wine") is None, reason="wine is not installed, which runs cmd.exe"
)
def test_the_batch_file_runs_under_wine(tmp_path: Path) -> None:
    # Wine reads batch files in its own code page, and expands a `%` in the folder's own name.
    folder, _ = published(with_publish(filled(), path="my out (x) & co's", caches=False))
    put(tmp_path / "bin/python.bat", BATCH_PYTHON.replace("\n", "\r\n"))
    wine = {"WINEPREFIX": f"{tmp_path}/wine", "WINEDEBUG": "-all", "RECORD": f"Z:{tmp_path}/record"}
    wine["WINEPATH"] = f"Z:{tmp_path}/bin".replace("/", "\\")
    for script, further in (("train", "--only-caches"), ("cache", "")):
        (record := tmp_path / "record").unlink(missing_ok=True)
        done = subprocess.run(
            ["wine", "cmd", "/c", f"{script}_gove-1.0.bat", *filter(None, [further])],
            cwd=folder,
            env={**os.environ, **wine},
            capture_output=True,
            check=False,
        )
        assert done.returncode == 3, done.stdout + done.stderr  # that of the Python
        program, *arguments = (line.strip('" ') for line in record.read_text().splitlines())
        assert program.replace("\\", "/") == f"Z:{folder}/train_gove-1.0.py"
        assert arguments == ["--only-caches"]
