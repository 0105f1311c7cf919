"""The published folder: what lies in it, what a second publication does, its scripts at work."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from controlled_world import configured
from latentmake.base.errors import (
    ConfigError,
    SourceError,
    StorageError,
    TrainingError,
)
from latentmake.base.paths import System
from latentmake.base.sync import RECORD
from latentmake.config.datasets import Dataset
from latentmake.config.machines import ExternalProgram, Publish
from latentmake.trainers.launched import publish
from latentmake.trainers.launched.order import Resume
from latentmake.trainers.musubi.order import MusubiOrder
from latentmake.trainers.musubi.publish import MusubiPublication
from publish_world import ATTENTION, NEEDED, check_flags, fill, order_of, put, value

pytestmark = pytest.mark.usefixtures("own_folder")

STEMS = {"gove": ["a", "sub/b ä", "c!"]}
SCRIPTS = tuple(NEEDED)


def published(order: MusubiOrder) -> tuple[Path, list[str]]:
    said: list[str] = []
    parts = [MusubiPublication(part, order.run) for part in publish.parts_of(order)]
    publish.publish(parts, said.append)
    return Path(order.publish.path).absolute() / order.run, said


def files(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != RECORD
    }


def training(order: MusubiOrder, system: System) -> list[str]:
    return MusubiPublication(order).calls(publish.Names(order, system))[-1][1]


def calls(folder: Path, system: System) -> dict[str, list[str]]:
    """Return script -> arguments of the calls that a published folder holds."""
    text = (folder / f"train_{folder.name}.json").read_text()
    return dict(json.loads(text)[system]["calls"])


def with_publish(order: MusubiOrder, **settings: Any) -> MusubiOrder:
    return order.model_copy(update={"publish": Publish.model_validate(settings)})


# -- what lies in it ------------------------------------------------------------------------------


def test_images_captions_and_caches_lie_flat_in_folders_of_each_resolution() -> None:
    order = order_of()
    fill(order, STEMS)
    folder, said = published(order)
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
    order = order_of()
    fill(order, STEMS)
    manifest = Path(order.manifest)
    first, *rows = map(json.loads, manifest.read_text().splitlines())
    rows.insert(0, {**first, "texts": ["photo of a"]})
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("data/gove/sub/b ä.txt").write_bytes("\ufeffa red square\r\nby night".encode())
    folder, _ = published(order)
    for size in ("256", "480x832"):
        assert (folder / f"gove_{size}/a.txt").read_bytes() == b"photo of a\n"
        assert (folder / f"gove_{size}/b ä.txt").read_bytes() == b"a red square\r\nby night"


def test_videos_with_all_their_clips_and_controls() -> None:
    dataset = Dataset(path="data/v", target_frames=[5], control_directory="controls")
    order = order_of(datasets={"v": dataset}, resolutions=[(64, 64)])
    fill(order, {"v": ["x"]}, control=True)
    folder, _ = published(order)
    assert {name for name in files(folder) if "/" in name} == {
        "v_64/x.mp4",
        "v_64/x.txt",
        "v_64_cache/x_00000-005_0064x0064_wan.safetensors",
        "v_64_cache/x_00005-005_0064x0064_wan.safetensors",
        "v_64_cache/x_wan_te.safetensors",
        "v_64_control/x.png",
    }
    (block,) = tomllib.loads((folder / "gove-1.0_linux.toml").read_text())["datasets"]
    assert block["video_directory"] == f"{folder}/v_64"
    assert block["cache_directory"] == f"{folder}/v_64_cache"
    assert block["control_directory"] == f"{folder}/v_64_control"


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [("qwen_image_edit", {}), ("qwen_image_layered", {"multiple_target": True})],
)
def test_controls_and_layers_of_a_list_are_not_published(
    architecture: str, settings: dict[str, Any]
) -> None:
    config = configured(architecture, path="list.jsonl", **settings)
    order = order_of(datasets=config.datasets)
    order = order.model_copy(update={"model": config.models["model"]})
    with pytest.raises(ConfigError, match=r"^datasets\.pictures\.path: a published folder tells"):
        MusubiPublication(order)


def test_of_a_list_of_videos_caches_and_captions_are_published() -> None:
    dataset = Dataset(path="data/v/list.jsonl", target_frames=[5])
    order = order_of(datasets={"v": dataset}, resolutions=[(64, 64)])
    fill(order, {"v": ["x.f9-5"]})
    folder, _ = published(order)
    assert {name for name in files(folder) if "/" in name} == {
        "v_64/x.f9-5.txt",
        "v_64_cache/x.f9-5_00000-005_0064x0064_wan.safetensors",
        "v_64_cache/x.f9-5_00005-005_0064x0064_wan.safetensors",
        "v_64_cache/x.f9-5_wan_te.safetensors",
    }
    (block,) = tomllib.loads((folder / "gove-1.0_linux.toml").read_text())["datasets"]
    assert block["video_directory"] == f"{folder}/v_64"


def test_clips_that_musubi_tuner_cannot_cut_are_published_as_caches_alone() -> None:
    dataset = Dataset(path="data/v", target_frames=[5], source_fps="auto")
    order = without_caches(datasets={"v": dataset}, resolutions=[(64, 64)])
    with pytest.raises(ConfigError, match=r"datasets\.v\.source_fps: .*publish\.caches: true"):
        MusubiPublication(order)


def test_videos_of_one_name_in_two_folders_are_published_under_the_names_of_their_caches() -> None:
    dataset = Dataset(path="data/v", target_frames=[5], control_directory="controls")
    order = order_of(datasets={"v": dataset}, resolutions=[(64, 64)])
    fill(order, {"v": ["rain_x", "sun_x"]}, control=True)
    text = Path(order.manifest).read_text()
    for place in ("data/v", "controls"):
        for name in ("rain", "sun"):
            for file in Path(place).glob(f"{name}_x.*"):
                if file.suffix != ".txt":
                    (moved := file.parent / name / f"x{file.suffix}").parent.mkdir(exist_ok=True)
                    text = text.replace(str(file.rename(moved)), str(moved))
                    text = text.replace(str(file), str(moved))
    Path(order.manifest).write_text(text)
    found = files(published(order)[0])
    for name in ("rain_x", "sun_x"):
        assert found[f"v_64/{name}.mp4"] == f"picture {name}"
        assert found[f"v_64/{name}.txt"] == f"caption of {name}"
        assert found[f"v_64_control/{name}.png"] == f"control {name}"
        assert f"v_64_cache/{name}_00000-005_0064x0064_wan.safetensors" in found


# -- a second publication -------------------------------------------------------------------------


def test_what_is_gone_is_removed_and_what_others_put_there_is_not() -> None:
    order = order_of()
    fill(order, STEMS)
    folder, _ = published(order)
    put(folder / "gove_256/notes.md", "mine")
    put(folder / "output/gove-1.0.safetensors", "trained")
    smaller = order.model_copy(update={"resolutions": [(256, 256)]})
    fill(smaller, {"gove": ["a"]})
    published(smaller)
    assert {name for name in files(folder) if "/" in name} == {
        *("gove_256/a.png", "gove_256/a.txt", "gove_256/notes.md"),
        "gove_256_cache/a_0064x0064_wan.safetensors",
        "gove_256_cache/a_wan_te.safetensors",
        "output/gove-1.0.safetensors",
    }
    assert not (folder / "gove_480x832").exists()


# -- bad input ------------------------------------------------------------------------------------


def fails(order: MusubiOrder, kind: type[Exception], *words: str) -> None:
    with pytest.raises(kind) as error:
        published(order)
    text = str(error.value)
    assert "\n" not in text
    assert all(word in text for word in words), text


def test_targets_that_cannot_be_written_are_told_in_a_line() -> None:
    order = order_of()
    fill(order, STEMS)
    put("file", "")
    fails(with_publish(order, path="file"), StorageError, "file", "move it away")
    fails(with_publish(order, path="/proc/latentmake"), StorageError, "/proc/latentmake")
    for path in ("/mnt/q/x", "Q:\\x"):
        fails(with_publish(order, path=path), ConfigError, "publish.path", "is not mounted")
    fails(with_publish(order, path="\\\\nas\\x"), ConfigError, "publish.path_maps")


def test_a_drive_of_windows_is_a_folder_here_by_the_maps() -> None:
    order = order_of()
    fill(order, STEMS)
    maps = [{"linux": f"{Path.cwd()}/share", "windows": "Q:"}]
    published(with_publish(order, path="Q:/out", path_maps=maps))
    assert Path("share/out/gove-1.0/gove_256/a.png").is_file()


def test_scripts_may_lie_beside_a_dataset_that_is_named_as_the_run() -> None:
    order = order_of().model_copy(update={"run": "gove"})
    fill(order, STEMS)
    published(with_publish(order, scripts="data"))
    assert Path("data/train_gove.sh").is_file() and not Path("data/gove/train_gove.sh").exists()


def test_sources_that_are_gone_are_told() -> None:
    order = order_of()
    fill(order, STEMS)
    Path("data/gove/a.png").unlink()
    fails(order, SourceError, "data/gove/a.png", "is not there")
    assert not Path("published").exists()


def test_what_the_configuration_must_say() -> None:
    order = order_of()
    fill(order, STEMS)
    fails(order.model_copy(update={"musubi_tuner": None}), ConfigError, "musubi_tuner.path")
    fails(order_of(model={"dit": None}), TrainingError, "model: dit", "is not set")
    hub = {"hub": "some/vae", "revision": "1" * 40}
    fails(without_caches(model={"vae": hub}), ConfigError, "models.wan.vae", "some/vae")
    Path("t5").mkdir()
    fails(without_caches(model={"text": "t5"}), ConfigError, "models.wan.text", "not t5")
    fails(with_publish(order, path="data/gove/out"), ConfigError, "gove", "publish.path")


# -- TOML and names of systems --------------------------------------------------------------------

MAPS = [{"linux": "{here}", "windows": "E:\\Wan Sachen"}, {"linux": "/models", "windows": "M:"}]


def mapped(order: MusubiOrder, **settings: Any) -> MusubiOrder:
    maps = [{**each, "linux": each["linux"].format(here=Path.cwd())} for each in MAPS]
    return with_publish(order, path="published", path_maps=maps, **settings)


def test_both_tomls_say_the_same_but_for_prefixes() -> None:
    order = mapped(order_of())
    fill(order, STEMS)
    folder, said = published(order)
    texts = {name: (folder / f"gove-1.0_{name}.toml").read_text() for name in ("linux", "win")}
    assert not any("\\" in text for text in texts.values())
    linux, windows = (tomllib.loads(text) for text in texts.values())
    assert linux != windows
    for block in linux["datasets"]:
        for key in ("image_directory", "cache_directory"):
            assert Path(block[key]).is_dir()
            block[key] = block[key].replace(str(Path.cwd()), "E:/Wan Sachen")
    assert linux == windows
    assert not any("path_maps" in line for line in said)


def test_folders_without_a_windows_name_are_told_once_each() -> None:
    order = order_of(model={"dit": "/elsewhere/low.safetensors"})
    fill(order, STEMS)
    folder, said = published(order)
    lines = [line for line in said[0].splitlines() if "publish.path_maps" in line]
    here = Path.cwd()
    for prefix in (here / "published/gove-1.0", here / "musubi tuner"):
        assert sum(f" {prefix} has no name" in line for line in lines) == 1
    assert sum(" /elsewhere has no name" in line for line in lines) == 1
    assert len(lines) == 3
    windows = tomllib.loads((folder / "gove-1.0_win.toml").read_text())["datasets"][0]
    assert windows["image_directory"] == f"{folder}/gove_256"
    assert value(calls(folder, "windows")[SCRIPTS[2]], "--dit") == "/elsewhere/low.safetensors"


def test_each_resolution_and_the_caches_have_scripts_where_the_user_wants_them() -> None:
    tomls, scripts = Path("musubi tuner/files/tomls"), Path("musubi tuner")
    put(tomls / "mine.toml", "")
    places = {"tomls": str(tomls), "scripts": str(scripts)}
    order = mapped(order_of(), caches=False, each_resolution=True, **places)
    fill(order, STEMS)
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
    order = mapped(
        order_of(), caches=False, batch_size=4, folders="{dataset}/{resolution}", **places
    )
    fill(order, STEMS)
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


def test_a_training_of_steps_counts_no_epochs() -> None:
    order = order_of(trainer={"max_train_steps": 300})
    arguments = training(order, "linux")
    assert value(arguments, "--max_train_steps") == "300"
    assert "--max_train_epochs" not in arguments
    assert order.settings_digest() != order_of().settings_digest()
    assert not order.can_resume(Resume(Path("state"), done=2, counted=True))  # where it would end


def test_folders_that_would_share_a_name_are_refused() -> None:
    fails(
        with_publish(order_of(), folders="{dataset}"),
        ConfigError,
        "publish.folders",
        "{resolution}",
    )
    alone = with_publish(order_of(resolutions=[(256, 256)]), folders="{resolution}", caches=False)
    fill(alone, STEMS)
    folder, _ = published(alone)
    assert (folder / "256_cache").is_dir() and (folder / "256/a.txt").is_file()


# -- without caches -------------------------------------------------------------------------------


def without_caches(**changes: Any) -> MusubiOrder:
    settings = {"caches": False, **changes.pop("publish", {})}
    return with_publish(order_of(**changes), **settings)


CACHES = (
    *("a_0064x0064_wan.safetensors", "a_wan_te.safetensors"),
    *("b ä_0064x0064_wan.safetensors", "b ä_wan_te.safetensors"),
)


@pytest.mark.parametrize(
    ("change", "dropped"),
    [
        ("caption", {"a_wan_te.safetensors"}),
        ("image", {"a_0064x0064_wan.safetensors"}),
        ("vae", {"a_0064x0064_wan.safetensors", "b ä_0064x0064_wan.safetensors"}),
        ("fit", {"a_0064x0064_wan.safetensors", "b ä_0064x0064_wan.safetensors"}),
        ("t5", {"a_wan_te.safetensors", "b ä_wan_te.safetensors"}),
        ("its fp8", {"a_wan_te.safetensors", "b ä_wan_te.safetensors"}),
        ("removed", {"a_0064x0064_wan.safetensors", "a_wan_te.safetensors"}),
        ("nothing", set()),
    ],
)
@pytest.mark.parametrize("block", ["gove_256", "gove/256"])
def test_caches_made_there_go_with_what_they_came_from(
    change: str, dropped: set[str], block: str
) -> None:
    own = {
        "publish": {"folders": block.replace("gove", "{dataset}").replace("256", "{resolution}")}
    }
    own["resolutions"] = [(256, 256)]
    order = without_caches(**own)
    fill(order, STEMS)
    folder, _ = published(order)
    for name in CACHES:
        put(folder / f"{block}_cache" / name, "made there")
    if change == "caption":
        put("data/gove/a.txt", "another caption")
    elif change == "image":
        put("data/gove/a.png", "another picture")
    elif change == "vae":
        order = without_caches(**own, model={"vae": "other.safetensors"})
    elif change == "fit":
        bucket = {"gove": Dataset(path="data/gove", fit="bucket")}
        order = without_caches(**own, datasets=bucket)
    elif change == "t5":
        order = without_caches(**own, model={"text": "other.pth"})
    elif change == "its fp8":
        order = without_caches(**own, model={"fp8_t5": True})
    elif change == "removed":
        fill(order, {"gove": STEMS["gove"][1:]})
    _, said = published(order)
    left = {path.name for path in (folder / f"{block}_cache").glob("*.safetensors")}
    assert set(CACHES) - left == dropped
    assert any("dropped" in line for line in said) == bool(dropped)


def test_for_a_file_elsewhere_no_folder_is_searched(tmp_path: Path) -> None:
    publication = MusubiPublication(without_caches())
    assert not [*publication.made_from(tmp_path / "out", f"{tmp_path}/tomls/a.toml", None)]
    assert not publication._listed


def test_caches_go_when_they_are_no_longer_published_and_come_back() -> None:
    order = order_of(resolutions=[(256, 256)])
    fill(order, STEMS)
    folder, _ = published(order)
    before = files(folder)
    without = order.model_copy(update={"publish": Publish(caches=False)})
    published(without)
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


# -- the checklist --------------------------------------------------------------------------------


def verdicts(order: MusubiOrder) -> dict[str, tuple[str, str]]:
    return {each.what: (each.verdict, each.note) for each in MusubiPublication(order).findings()}


def test_paths_of_which_no_script_knows_all_are_a_fault() -> None:
    network = {"vae": "//nas/wan/vae.safetensors"}  # no Linux has a name for it
    assert verdicts(without_caches(model=network))["paths for Windows"][0] == "failed"
    maps = [{"linux": "/nas", "windows": "//nas/wan"}]
    order = without_caches(model=network, publish={"path_maps": maps})
    assert verdicts(order)["paths for Windows"][0] == "warning"
    assert verdicts(order)["paths for Linux"][0] == "ok"


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
    ("scripts", "environment"), [(".", "venv"), ("src/musubi_tuner", ".venv"), (".", "given")]
)
def test_the_script_caches_and_trains_in_the_trainers_environment(
    tmp_path: Path, scripts: str, environment: str
) -> None:
    home = tmp_path / AWKWARD
    given = str(tmp_path / "my env")
    place = Path(given) if environment == "given" else home / environment
    order = order_of(
        model={"dit_high_noise": f"{AWKWARD}/high.safetensors", "fp8_t5": True},
        trainer={"arguments": ["--optimizer_args", 'betas=("0.9", $HOME `x`)']},
        musubi_tuner=ExternalProgram(
            path=str(home), venv="my env" if environment == "given" else None
        ),
        publish=Publish(path=AWKWARD, attention="flash_attn", caches=False, num_processes=2),
    )
    fill(order, STEMS)
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
    order = order_of(musubi_tuner=ExternalProgram(path="tuner"))
    fill(order, STEMS)
    tuner(tmp_path / "tuner")
    venv(tmp_path / "tuner/venv", **modules)
    _, found = run_shell(published(order)[0], tmp_path / "record")
    assert [call[0] for call in found] == [SCRIPTS[2]]  # all caches are published
    assert set(found[0][2]) & ATTENTION == {f"--{flag}"}


@pytest.mark.parametrize(
    ("said", "given", "flag"), [("flash3", None, "flash3"), ("auto", "xformers", "xformers")]
)
def test_an_attention_that_is_set_is_not_chosen(said: str, given: str | None, flag: str) -> None:
    order = with_publish(order_of(trainer={"attention": said}), attention=given)
    fill(order, STEMS)
    folder, _ = published(order)
    assert not json.loads((folder / "train_gove-1.0.json").read_text())["attention"]
    for system in ("linux", "windows"):
        assert set(calls(folder, system)[SCRIPTS[2]]) & ATTENTION == {f"--{flag}"}


def test_the_script_stops_at_the_first_step_that_fails(tmp_path: Path) -> None:
    order = without_caches(musubi_tuner=ExternalProgram(path="tuner"))
    fill(order, STEMS)
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
    order = without_caches(musubi_tuner=ExternalProgram(path="tuner"))
    fill(order, STEMS)
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
    order = order_of(
        model={
            "vae": "D:/models/vae 100% & more.safetensors",
            "text": "D:\\models\\t5.pth",
            "dit": "D:/models/ü^low.safetensors",
            "dit_high_noise": "//nas/wan/high.safetensors",
        },
        musubi_tuner=ExternalProgram(path="C:/musubi 100%"),
    )
    fill(order, STEMS)
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
    order = order_of(publish=Publish(path="my out (x) & co's", caches=False))
    fill(order, STEMS)
    folder, _ = published(order)
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
