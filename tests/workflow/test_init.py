"""`latentmake init` on folders and models made for it: what it writes can be planned."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import checkpoint_world
import named_weights
import pytest
import yaml
from huggingface_hub.cli.hf import app
from latentmake.config.architectures import MUSUBI, SDSCRIPTS
from named_weights import MODELS
from PIL import Image
from project import ROOT, Project
from real_models import video

TOKENIZER = ROOT / "data/tiny-sd/tokenizer"


def install(folder: Path) -> None:
    """Write stand-ins for musubi-tuner and sd-scripts, as far as a plan looks at them."""
    scripts: dict[str, set[str]] = {"musubi-tuner": set(), "sd-scripts": set()}
    for row in MUSUBI.values():
        scripts["musubi-tuner"] |= {row.latents.name, row.text.name, row.training.name}
    for each in SDSCRIPTS.values():
        scripts["sd-scripts"] |= {f"{name}.py" for name in each.training_scripts}
        encoders = filter(None, (each.latents, each.text))
        modules = {module for encoder in encoders for module in encoder.modules}
        scripts["sd-scripts"] |= {f"{module.replace('.', '/')}.py" for module in modules}
    known = [x for row in MUSUBI.values() for each in row.versions.values() for x in each.latents]
    for name, files in scripts.items():
        for file in files:
            (folder / name / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / name / file).write_text(f"KNOWN = {known}\n")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A project without a configuration, beside the two other trainers."""
    install(tmp_path)
    made = Project.make(tmp_path / "project", {})
    (made / "config/config.yaml").unlink()
    return made


def pictures(
    folder: Path, count: int = 4, size: tuple[int, int] = (600, 560), captions: int = 4
) -> Path:
    folder.mkdir(parents=True)
    for number in range(count):
        Image.new("RGB", size, (9 * number, 50, 90)).save(folder / f"cat {number}.png")
        if number < captions:
            (folder / f"cat {number}.txt").write_text(f"a cat, number {number}")
    return folder


def videos(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for number in range(2):
        video(folder / f"wave {number}.mp4", number, (96, 64))  # 20 frames, 24 a second
        (folder / f"wave {number}.txt").write_text("waves")
    return folder


def model(project: Project, name: str) -> str:
    return os.fspath(MODELS[name](project / "models" / name, TOKENIZER).relative_to(project.folder))


def written(project: Project, name: str) -> dict[str, Any]:
    text = (project / name).read_text(encoding="utf-8")
    assert 20 <= len(text.splitlines()) <= 53, text
    return yaml.safe_load(text)


def planned(project: Project, *files: str) -> None:
    """Plan configurations at once; runs and models are named as the files."""
    together: dict[str, Any] = {"datasets": {}, "models": {}, "runs": {}}
    for file in files:
        name, values = Path(file).stem, written(project, file)
        ((_, own),) = values.pop("models").items()
        ((_, run),) = values.pop("runs").items()
        together["models"][name] = own
        together["runs"][name] = run | {"model": name, "datasets": []}
        for dataset, settings in values.pop("datasets").items():
            together["datasets"][f"{name}_{dataset}"] = settings
            together["runs"][name]["datasets"].append(f"{name}_{dataset}")
        together |= values
    project.config = together
    project.plan(*(f"train_{Path(file).stem}" for file in files))


def test_each_model_is_recognised_and_its_run_planned(project: Project) -> None:
    pictures(project / "pictures/ginger")
    for name in MODELS:
        said = project.ask(
            *("init", "pictures/ginger", "--model", model(project, name)),
            *("--output", f"{name}.yaml"),
        )
        assert "missing" not in said.output, said.output
    planned(project, *(f"{name}.yaml" for name in MODELS))


@pytest.mark.parametrize("kind", ["sd1", "sdxl"])
def test_a_file_from_civitai_is_all_that_a_model_needs(
    project: Project, monkeypatch: pytest.MonkeyPatch, kind: checkpoint_world.Kind
) -> None:
    (project / "models").mkdir()
    monkeypatch.setenv("HF_HUB_CACHE", os.fspath(project / "hub"))
    pictures(project / "cats")
    place = "models/dream shaper.safetensors"
    checkpoint_world.write(project / "pipeline", project / place, TOKENIZER, kind)
    said = project.ask("init", "cats", "--model", place, check=False)
    assert said.one_line("missing", "hf download openai/clip-vit-large-patch14", "vocab.json")
    snapshots = project / "hub/models--openai--clip-vit-large-patch14/snapshots"
    shutil.copytree(TOKENIZER, snapshots / ("0" * 40))
    project.ask("init", "cats", "--model", place)
    ((name, own),) = written(project, "cats.yaml")["models"].items()
    assert name == "dream_shaper"
    assert own["checkpoint"] == place and not own.keys() & {"vae", "text", "unet"}
    planned(project, "cats.yaml")


def test_a_file_is_planned_as_it_is_written(project: Project) -> None:
    """Its own words about the next step are right."""
    pictures(project / "Ürlaub äm Sée/Michael Gove", captions=0)
    said = project.ask("init", "Ürlaub äm Sée/Michael Gove", "--model", model(project, "sd15"))
    assert "4 images, 0 captions" in said.output
    line = said.one_line("next", "snakemake -n").split()
    assert line[2:] == ["-n", "train_michael_gove", "--configfile", "michael_gove.yaml"]
    project.run(*line[2:])
    values = written(project, "michael_gove.yaml")
    dataset = values["datasets"]["michael_gove"]
    assert dataset["class_tokens"] == "Michael Gove"
    assert dataset["path"] == "Ürlaub äm Sée/Michael Gove"
    assert values["runs"]["michael_gove"]["resolutions"] == [512]


def test_a_file_that_nobody_edited_is_replaced(project: Project) -> None:
    pictures(project / "cats")
    project.ask("init", "cats", check=False)
    project.ask("init", "cats", "--model", model(project, "sd15"))
    assert list(written(project, "cats.yaml")["models"]) == ["sd15"]
    file = project / "cats.yaml"
    edited = file.read_text().replace("rank: 16", "rank: 17")
    file.write_text(edited)
    again = project.ask("init", "cats", check=False)
    assert again.returncode == 2
    assert again.one_line("cats.yaml: exists already", "--force")
    assert file.read_text() == edited


def test_pictures_without_a_caption_are_named_if_others_have_one(project: Project) -> None:
    pictures(project / "cats", count=6, captions=1)
    said = project.ask("init", "cats", "--model", model(project, "sd15"), check=False)
    assert said.returncode == 1
    assert said.one_line(
        "missing  5 captions of cats (cat 1.png, cat 2.png, cat 3.png and 2 more)",
        "write the first into cats/cat 1.txt",
    )
    assert "class_tokens" not in written(project, "cats.yaml")["datasets"]["cats"]


def test_a_second_run_of_a_folder_is_named_by_its_file(project: Project) -> None:
    """So that it does not write over the first one's result."""
    pictures(project / "cats")
    place = model(project, "sd15")
    files = ("first.yaml", "cats"), ("first.yaml", "cats"), ("cats2.yaml", "cats2")
    for file, run in (*files, ("config/config.yaml", "cats")):
        said = project.ask("init", "cats", "--model", place, "--output", file)
        assert said.one_line("next", f"snakemake -n train_{run} --configfile {file}")
        assert list(written(project, file)["runs"]) == [run]
    for file in ("first.yaml", "config/config.yaml"):
        (project / file).unlink()
    (project / "runs/cats").mkdir(parents=True)
    (project / "runs/cats/training.json").write_text("{}")
    project.ask("init", "cats", "--model", place, "--output", "cats3.yaml")
    assert list(written(project, "cats3.yaml")["runs"]) == ["cats3"]


def test_prompts_are_from_all_over_the_dataset_and_one_is_new(project: Project) -> None:
    folder = pictures(project / "cats", count=9, captions=0)
    for number in range(9):
        (folder / f"cat {number}.txt").write_text(f"cat {number}, ginger style\nanother line")
    project.ask("init", "cats", "--model", model(project, "sd15"))
    trainer = written(project, "cats.yaml")["runs"]["cats"]["trainer"]
    assert trainer["samples"]["prompts"] == [
        *(f"cat {number}, ginger style" for number in (0, 4, 8)),
        "ginger style, on a beach at night",
    ]
    assert trainer["checkpointing_steps"] == trainer["save_every_n_steps"]
    planned(project, "cats.yaml")


def test_parts_of_two_models_are_never_mixed(project: Project) -> None:
    pictures(project / "cats")
    for name in ("one", "two"):
        MODELS["sd15"](project / "models" / name, TOKENIZER)
    refused = project.ask("init", "cats", "--model", "models", check=False)
    assert refused.returncode == 2
    assert refused.one_line("models: holds several models (one/unet, two/unet)", "name the file")
    shutil.rmtree(project / "models/two/unet")
    said = project.ask("init", "cats", "--model", "models")
    (own,) = written(project, "cats.yaml")["models"].values()
    assert (own["vae"], own["text"]) == ("models/one/vae", "models/one/text_encoder")
    shutil.rmtree(project / "models/one/vae")
    MODELS["sd15"](project / "models/three", TOKENIZER)
    shutil.rmtree(project / "models/three/unet")
    said = project.ask("init", "cats", "--model", "models")
    assert said.one_line("note", "`vae` is models/three/vae; models/two/vae would fit, too")


def test_kohyas_folders_keep_repeats_and_words(project: Project) -> None:
    pictures(project / "img/10_sks man", captions=0)
    pictures(project / "img/2_a dog")
    project.ask("init", "img", "--model", model(project, "sd15"))
    datasets = written(project, "sks_man.yaml")["datasets"]
    assert datasets["sks_man"]["num_repeats"] == 10
    assert datasets["sks_man"]["class_tokens"] == "sks man"
    assert datasets["a_dog"]["num_repeats"] == 2
    assert "class_tokens" not in datasets["a_dog"]
    planned(project, "sks_man.yaml")


def test_captions_of_a_metadata_file_are_found(project: Project) -> None:
    folder = pictures(project / "cats", captions=0)
    rows = [{"file_name": each.name, "text": "a cat"} for each in sorted(folder.iterdir())]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = project.ask("init", "cats", "--model", model(project, "sd15"))
    assert "4 images, 4 captions" in said.output
    assert written(project, "cats.yaml")["datasets"]["cats"]["metadata_file"] == (
        "cats/metadata.jsonl"
    )
    planned(project, "cats.yaml")


def test_small_images_get_a_smaller_resolution(project: Project) -> None:
    pictures(project / "cats", size=(300, 260))
    project.ask("init", "cats", "--model", model(project, "sd15"))
    assert written(project, "cats.yaml")["runs"]["cats"]["resolutions"] == [256]
    assert "smaller than the model's 512" in (project / "cats.yaml").read_text()


def test_sdxl_is_trained_by_sd_in_little_memory_unless_sd_scripts_is_asked_for(
    project: Project,
) -> None:
    pictures(project / "cats")
    place = model(project, "sdxl")
    for kind, section in (("sd", {"unet"}), ("sdscripts", {"checkpoint", "layout"})):
        options = [] if kind == "sd" else ["--trainer", kind, "--force"]
        project.ask("init", "cats", "--model", place, *options)
        values = written(project, "cats.yaml")
        (own,) = values["models"].values()
        assert own.keys() - {"architecture", "vae", "text", "dtype"} == section
        assert own["architecture"] == "sdxl" and len(own["text"]) == 2
        trainer = values["runs"]["cats"]["trainer"]
        assert trainer["kind"] == kind
        assert kind != "sd" or trainer["gradient_checkpointing"]
        planned(project, "cats.yaml")


def test_images_and_videos_are_two_datasets(project: Project) -> None:
    videos(project / "waves")
    pictures(project / "more")
    for each in (project / "more").iterdir():
        each.rename(project / "waves" / each.name)
    project.ask("init", "waves", "--model", model(project, "wan_original"))
    values = written(project, "waves.yaml")
    clips = values["datasets"]["waves_videos"]
    assert clips["target_frames"] == [13]  # of 20 frames, at 16 of 24 a second
    assert clips["source_fps"] == 24
    assert values["runs"]["waves"]["datasets"] == ["waves_images", "waves_videos"]
    planned(project, "waves.yaml")
    said = project.ask("init", "waves", "--model", model(project, "sd15"), "--force")
    assert said.one_line("waves: its 2 videos are left out")
    assert list(written(project, "waves.yaml")["datasets"]) == ["waves_images"]


def test_a_wan_pipeline_is_trained_here(project: Project) -> None:
    shutil.copytree(ROOT / "data/tiny-wan", project / "models/tiny-wan")
    videos(project / "waves")
    project.ask("init", "waves", "--model", "models/tiny-wan")
    values = written(project, "waves.yaml")
    assert values["runs"]["waves"]["trainer"]["kind"] == "wan"
    planned(project, "waves.yaml")
    said = project.ask(
        *("init", "waves", "--model", "models/tiny-wan", "--trainer", "musubi", "--force"),
        check=False,
    )
    assert said.returncode == 2
    assert said.one_line("cannot train Wan", "--trainer wan")


def test_the_shipped_model_shows_how_it_works(project: Project) -> None:
    shutil.copytree(ROOT / "data/tiny-sd", project / "data/tiny-sd")
    pictures(project / "cats")
    project.ask("init", "cats", "--model", "data/tiny-sd")
    assert written(project, "cats.yaml")["runs"]["cats"]["resolutions"] == [64]
    planned(project, "cats.yaml")


def test_any_file_of_a_pipeline_stands_for_it(project: Project) -> None:
    pictures(project / "cats")
    place = model(project, "sd15")
    for below in ("", "/unet", "/unet/diffusion_pytorch_model.safetensors"):
        project.ask("init", "cats", "--model", place + below, "--force")
        own = written(project, "cats.yaml")["models"]["sd15"]
        assert own["unet"] == f"{place}/unet" and own["vae"] == f"{place}/vae"


def test_one_of_two_networks_asks_for_the_other(project: Project) -> None:
    pictures(project / "cats")
    place = Path(model(project, "wan_pair"))
    (project / place).unlink()
    high = str(place).replace("low", "high")
    said = project.ask("init", "cats", "--model", high, check=False)
    assert said.one_line(
        "missing", "`dit` of the model", "docs/trainers/musubi.md", "run this again"
    )
    (own,) = written(project, "cats.yaml")["models"].values()
    assert (own["dit"], own["dit_high_noise"]) == (f"{place.parent}/dit", high)


def test_a_missing_text_encoder_is_named_and_expected_in_its_folder(project: Project) -> None:
    pictures(project / "cats")
    place = model(project, "sd15")
    shutil.rmtree(project / place / "text_encoder")
    said = project.ask("init", "cats", "--model", place, check=False)
    assert said.returncode == 1
    assert said.one_line("missing", "`text` of the model", "docs/trainers/sd.md")
    assert written(project, "cats.yaml")["models"]["sd15"]["text"] == f"{place}/text_encoder"
    MODELS["sd15"](project / "other", TOKENIZER)
    shutil.copytree(project / "other/text_encoder", project / place / "text_encoder")
    planned(project, "cats.yaml")


def test_of_a_network_of_its_own_all_the_rest_is_missing(project: Project) -> None:
    pictures(project / "cats")
    network = named_weights.shapes("flux")
    named_weights.write(project / "flux/flux1-dev.safetensors", network)
    shutil.rmtree(project.folder.parent / "sd-scripts")
    place = "flux/flux1-dev.safetensors"
    said = project.ask("init", "cats", "--model", place, check=False)
    assert said.returncode == 1
    assert said.one_line("`vae`, `text`, `text.1` of the model", "docs/trainers/sdscripts.md")
    assert said.one_line("git clone https://github.com/kohya-ss/sd-scripts ../sd-scripts")
    MODELS["flux"](project / "flux", TOKENIZER)
    install(project.folder.parent)
    assert project.ask("init", "cats", "--model", place, "--force").returncode == 0
    planned(project, "cats.yaml")


def test_without_a_model_the_download_of_one_is_printed(project: Project) -> None:
    pictures(project / "cats")
    said = project.ask("init", "cats", check=False)
    assert said.returncode == 1
    line = said.one_line("hf download stable-diffusion-v1-5/stable-diffusion-v1-5")
    first, *words = shlex.split(line.partition(", or run ")[2])
    assert first == "hf"
    top = app.make_context("hf", words, resilient_parsing=True)
    name, command, rest = app.resolve_command(top, words)
    assert command.make_context(name, rest, parent=top).params["local_dir"]
    assert said.one_line("--model", "data/tiny-sd")
    MODELS["sd15"](project / "models/stable-diffusion-v1-5", TOKENIZER)
    planned(project, "cats.yaml")
    assert project.ask("init", "cats", "--force").returncode == 0


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("flux", '[[datasets.subsets]]\nimage_dir = "img/10_sks man"\n'),
        ("z_image", 'image_directory = "img/10_sks man"\n'),
    ],
)
def test_an_imported_dataset_has_the_model_that_is_named_and_the_name_of_init(
    project: Project, name: str, table: str
) -> None:
    pictures(project / "img/10_sks man")
    (project / "data.toml").write_text(f"[[datasets]]\nresolution = 512\n{table}")
    place = model(project, name)
    project.ask("import", "data.toml", "--model", place, "--output", "import.yaml")
    project.ask("init", "img", "--model", place, "--output", "init.yaml")
    made, begun = (yaml.safe_load((project / f"{x}.yaml").read_text()) for x in ("import", "init"))
    ((title, own),), ((other, theirs),) = made["models"].items(), begun["models"].items()
    assert title == other and own.keys() >= theirs.keys() - {"dtype"}
    assert all(own[key] == theirs[key] for key in theirs.keys() - {"dtype", "text"})
    assert [*made["datasets"]] == [*begun["datasets"]] == ["sks_man"]
    project.config = made
    project.plan("train_data")


@pytest.mark.parametrize("name", ["sd15", "z_image"])
def test_a_model_of_the_hub_is_pinned(
    project: Project, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", os.fspath(project / "hub"))
    pictures(project / "cats")
    commit = "0123456789" * 4
    repository = project / f"hub/models--somebody--{name}"
    MODELS[name](repository / "snapshots" / commit, TOKENIZER)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(commit)
    project.ask("init", "cats", "--model", f"somebody/{name}")
    (own,) = written(project, "cats.yaml")["models"].values()
    assert own["vae"].pop("subfolder" if name.startswith("sd") else "file")
    assert own["vae"] == {"hub": f"somebody/{name}", "revision": commit}
    planned(project, "cats.yaml")


def test_control_images_have_a_folder_of_their_own(project: Project) -> None:
    pictures(project / "cats")
    place = "kontext/flux1-kontext-dev.safetensors"
    MODELS["flux"](project / "kontext", TOKENIZER).rename(project / place)
    said = project.ask("init", "cats", "--model", place, check=False)
    assert said.returncode == 1
    assert said.one_line("missing", "control images of cats", "control_cats")
    shutil.copytree(project / "cats", project / "control_cats")
    assert project.ask("init", "cats", "--model", place, "--force").returncode == 0
    planned(project, "cats.yaml")


def test_an_image_to_video_model_of_wan_needs_its_image_encoder(project: Project) -> None:
    videos(project / "waves")
    place = MODELS["wan_original"](project / "wan", TOKENIZER)
    named_weights.write(
        place / "diffusion_pytorch_model.safetensors", named_weights.shapes("wan_i2v", "5120")
    )
    said = project.ask("init", "waves", "--model", "wan", "--trainer", "musubi", check=False)
    clip = "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"
    assert said.one_line("`clip` of the model")
    named_weights.write_torch(project / "wan" / clip, ["visual.transformer.0.attn.to_qkv.weight"])
    assert project.ask("init", "waves", "--model", "wan", "--force").returncode == 0
    assert written(project, "waves.yaml")["models"]["wan"]["task"] == "i2v-14B"
    planned(project, "waves.yaml")


MISTAKES: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (("nowhere",), ("nowhere: this folder does not exist", "correct the path")),
    (("empty",), ("empty: holds neither images nor videos", ".png")),
    (("data.toml",), ("data.toml: is a file", "latentmake import data.toml")),
    (("cats", "--model", "lora.safetensors"), ("lora.safetensors: is a LoRA",)),
    (("cats", "--model", "vae.safetensors"), ("vae.safetensors: is a VAE",)),
    (("cats", "--model", "nowhere.safetensors"), ("nowhere.safetensors", "does not exist")),
    (("cats", "--model", "empty"), ("empty: holds no model", "Flux")),
    (("cats", "--model", "some/model"), ("some/model", "`hf download some/model`")),
    (("cats", "--model", "sdxl", "--trainer", "musubi"), ("XL", "--trainer sd or sdscripts")),
    (("waves", "--model", "sdxl"), ("waves: holds 2 videos", "does not take")),
    (("cats", "--model", "."), ("holds several models", "name the file or folder")),
]


def test_a_mistake_is_one_line_and_writes_nothing(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", os.fspath(project / "hub"))
    pictures(project / "cats")
    videos(project / "waves")
    (project / "empty").mkdir()
    (project / "data.toml").write_text("[general]\n")
    named_weights.write(project / "lora.safetensors", named_weights.shapes("lora"))
    MODELS["sdxl"](project / "sdxl", TOKENIZER)
    named_weights.write(project / "dream shaper.safetensors", named_weights.shapes("checkpoint"))
    shutil.copy(
        project / "sdxl/vae/diffusion_pytorch_model.safetensors", project / "vae.safetensors"
    )
    for arguments, words in MISTAKES:
        said = project.ask("init", *arguments, check=False)
        assert said.returncode == 2 and len(said.output.splitlines()) == 1, said.output
        assert said.one_line("error: ", *words)
    assert not list(project.folder.glob("*.yaml"))
