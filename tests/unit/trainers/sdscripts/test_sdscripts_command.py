"""Command lines, dataset TOML and deployed folder are what sd-scripts takes."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import sdscripts_world
from latentmake.base import digest
from latentmake.base.errors import CacheError, ModelError, SourceError, TrainingError
from latentmake.config.datasets import Dataset
from latentmake.config.external_trainers import SdScriptsTrainer
from latentmake.config.fields import shaping
from latentmake.config.machines import ExternalProgram, PathMap, Publish
from latentmake.config.models import Model
from latentmake.config.root import Validation
from latentmake.layouts.layout import SdScripts as Names
from latentmake.plan.product import Parts
from latentmake.runs.order import RunFiles
from latentmake.trainers import previous
from latentmake.trainers.launched.launch import prepare
from latentmake.trainers.launched.order import Places, Resume
from latentmake.trainers.launched.publish import publish
from latentmake.trainers.process import accelerate_arguments
from latentmake.trainers.sdscripts.backend import SdScriptsPublication, model_files
from latentmake.trainers.sdscripts.deploy import dataset_toml, deployed
from latentmake.trainers.sdscripts.order import (
    SdScriptsOrder,
    caching_arguments,
    training_arguments,
)
from safetensors.numpy import save_file
from sdscripts_world import SWITCHES, VALUES

pytestmark = pytest.mark.usefixtures("own_folder")

ARCHITECTURES = ("sd1", "sd2", "sdxl", "sd3", "flux")
ENCODERS = {"sd1": 1, "sd2": 1, "sdxl": 2, "sd3": 3, "flux": 2}


def order(
    architecture: str = "sdxl",
    *,
    trainer: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    **dataset: Any,
) -> SdScriptsOrder:
    values = {
        "vae": "ae.safetensors",
        "text": [f"text_{number}.safetensors" for number in range(ENCODERS[architecture])],
        "architecture": architecture,
        "layout": "sdscripts",
        "checkpoint": "base.safetensors",
        **(model or {}),
    }
    return SdScriptsOrder(
        run="cats",
        manifest="manifest.jsonl",
        lock="dataset.lock",
        output="runs/cats",
        datasets={"a": Dataset.model_validate({"path": "data", **dataset})},
        resolutions=[(512, 512), (512, 768)],
        model_name="big",
        model=Model.model_validate(values),
        trainer=SdScriptsTrainer.model_validate({"kind": "sdscripts", **(trainer or {})}),
        sd_scripts=ExternalProgram(path="sd-scripts"),
        publish=Publish(),
    )


def arguments(asked: SdScriptsOrder, resume: Resume | None = None) -> list[str]:
    places = asked.places if resume else Places(str, "/d.toml", "/out", "/logs", "/prompts")
    return training_arguments(asked, places, "sdpa", resume or Resume())


def value(found: list[str], flag: str) -> str:
    return found[found.index(flag) + 1]


# -- command lines --------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_flag_is_one_that_it_knows_and_is_given_once(architecture: str) -> None:
    trainer = {
        "gradient_checkpointing": True,
        "torch_compile": True,
        "deepspeed": True,
        "save_every_n_epochs": 2,
    }
    found = arguments(order(architecture, trainer=trainer))
    flags = [each.removeprefix("--") for each in found if each.startswith("--")]
    assert set(flags) <= {*SWITCHES, *VALUES}
    assert len(set(flags)) == len(flags)
    for flag in set(flags) & set(SWITCHES):
        index = found.index(f"--{flag}") + 1
        assert index == len(found) or found[index].startswith("--")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_latents_are_always_cached_and_text_where_it_is_no_text_encoder_is_trained(
    architecture: str,
) -> None:
    found = arguments(order(architecture))
    assert {"--cache_latents", "--cache_latents_to_disk"} <= set(found)
    cached = architecture not in ("sd1", "sd2")
    for flag in (
        "--cache_text_encoder_outputs",
        "--cache_text_encoder_outputs_to_disk",
        "--network_train_unet_only",
    ):
        assert (flag in found) == cached
    assert ("--v2" in found) == (architecture == "sd2")


def test_it_is_told_what_the_network_predicts() -> None:
    save_file({"v_pred": np.zeros(0), "ztsnr": np.zeros(0)}, "base.safetensors")
    flags, where = ["--v_parameterization", "--zero_terminal_snr"], "runs.cats.trainer"
    before = order().settings_digest()
    now = order().settled(where)
    assert [each for each in arguments(now) if each in flags] == flags
    assert now.settings_digest() != before
    # Trainings whose user has told it stay as they are.
    told = order(trainer={"arguments": flags})
    assert arguments(told.settled(where)).count(flags[0]) == 1
    assert told.settled(where).settings_digest() == told.settings_digest()
    with pytest.raises(ModelError, match="predict epsilon with zero terminal SNR"):
        order(trainer={"v_parameterization": False}).settled(where)
    save_file({"a": np.zeros(1)}, "base.safetensors")
    assert order().settled(where).settings_digest() == before
    with pytest.raises(ModelError, match=r"^runs\.cats\.trainer\.v_parameterization: this key is"):
        order("sd2").settled(where)
    known = order("sd2", trainer={"v_parameterization": False})
    assert known.settled(where).settings_digest() == order("sd2").settings_digest()
    for key in ("v_parameterization", "zero_terminal_snr"):
        with pytest.raises(ValueError, match=f"leave out --{key}: set `{key}`"):
            order(trainer={key: False, "arguments": [f"--{key}"]})


@pytest.mark.parametrize(("architecture", "script"), [("sd1", "fine_tune"), ("sdxl", "sdxl_train")])
def test_a_whole_network_is_trained_without_the_flags_of_a_lora(
    architecture: str, script: str
) -> None:
    asked = order(architecture, trainer={"script": script})
    assert asked.script == script
    assert not [each for each in arguments(asked) if each.startswith("--network")]


def test_flux_is_given_its_encoders_unless_the_user_names_others() -> None:
    found = arguments(order("flux"))
    assert (value(found, "--ae"), value(found, "--clip_l"), value(found, "--t5xxl")) == (
        "ae.safetensors",
        "text_0.safetensors",
        "text_1.safetensors",
    )
    found = arguments(order("flux", trainer={"arguments": ["--ae", "/mine.sft"]}))
    assert found.count("--ae") == 1 and value(found, "--ae") == "/mine.sft"


def test_masks_lengths_and_layers_are_those_of_the_caches() -> None:
    found = arguments(order("sd3", model={"apply_lg_attn_mask": True, "apply_t5_attn_mask": True}))
    assert {"--apply_lg_attn_mask", "--apply_t5_attn_mask"} <= set(found)
    assert value(found, "--t5xxl_max_token_length") == "512"
    short = [{"path": "clip"}, {"path": "t5", "max_length": 256}]
    found = arguments(order("flux", model={"text": short}))
    assert value(found, "--t5xxl_max_token_length") == "256"
    found = arguments(order("sd1", model={"clip_skip": 2, "max_token_length": 150}))
    assert (value(found, "--clip_skip"), value(found, "--max_token_length")) == ("2", "150")
    assert "--max_token_length" not in arguments(order("sdxl"))


def test_steps_stand_for_epochs_and_ten_epochs_for_neither() -> None:
    assert value(arguments(order()), "--max_train_epochs") == "10"
    found = arguments(order(trainer={"max_train_steps": 5}))
    assert value(found, "--max_train_steps") == "5" and "--max_train_epochs" not in found


def test_numbers_are_written_as_they_read_and_the_users_own_arguments_come_last() -> None:
    found = arguments(order(trainer={"learning_rate": 1e-4, "arguments": ["--masked_loss"]}))
    assert float(value(found, "--learning_rate")) == 1e-4
    assert found[-1] == "--masked_loss"


def test_accelerate_is_told_of_devices_unless_a_file_says_all() -> None:
    assert "--multi_gpu" in accelerate_arguments("bf16", processes=2)
    assert "--multi_gpu" not in accelerate_arguments("bf16", processes=1)
    assert accelerate_arguments("bf16", processes=1)[:2] == ["--mixed_precision", "bf16"]
    assert accelerate_arguments("bf16", processes=2, config="a") == ["--config_file", "a"]


def test_bookkeeping_does_not_train_again_and_all_else_does() -> None:
    one = order().settings_digest()
    for same in ({"logging": False}, {"script": "sdxl_train_network"}):
        assert order(trainer=same).settings_digest() == one
    for other in ({"seed": 1}, {"arguments": ["--masked_loss"]}):
        assert order(trainer=other).settings_digest() != one


# -- resuming -------------------------------------------------------------------------------------


def test_scripts_of_a_lora_are_told_the_step_and_others_what_is_left() -> None:
    saving = {"max_train_epochs": 8, "save_every_n_epochs": 1}
    found = arguments(order(trainer=saving), Resume(Path("s"), 3, True, 5))
    assert (value(found, "--resume"), value(found, "--initial_step")) == (
        str(Path("s").absolute()),
        "15",
    )
    assert value(found, "--max_train_epochs") == "8"
    whole = order(trainer={**saving, "script": "sdxl_train"})
    found = arguments(whole, Resume(Path("s"), 3))
    assert value(found, "--max_train_epochs") == "5"
    assert "--initial_step" not in found
    assert {"--save_state", "--save_last_n_epochs_state"} <= set(found)
    assert "--save_state" not in arguments(order(), Resume())


@pytest.mark.parametrize(
    ("trainer", "resume", "usable"),
    [
        ({"max_train_epochs": 8}, Resume(Path("s"), 3, True, 5), True),
        ({"max_train_epochs": 8, "lr_scheduler": "cosine"}, Resume(Path("s"), 3, True, 5), True),
        ({"max_train_epochs": 8}, Resume(Path("s"), 8, True, 5), False),  # it would not begin
        ({"max_train_epochs": 8}, Resume(Path("s"), 3, True, 0), False),  # steps are not known
        ({"max_train_steps": 40}, Resume(Path("s"), 3, True, 5), True),
        ({"max_train_steps": 38}, Resume(Path("s"), 3, True, 5), False),  # 2 too many
        ({"max_train_epochs": 8}, Resume(Path("s"), 3), True),
        ({"max_train_epochs": 8, "lr_scheduler": "cosine"}, Resume(Path("s"), 3), False),
        ({"max_train_epochs": 8}, Resume(Path("s"), 8), False),
        ({"max_train_steps": 40}, Resume(Path("s"), 3), False),
    ],
)
def test_a_state_is_used_where_just_what_is_left_is_then_trained(
    trainer: dict[str, Any], resume: Resume, usable: bool
) -> None:
    assert order(trainer=trainer).can_resume(resume) == usable


def test_steps_of_an_epoch_are_told_by_each_leg_of_a_training() -> None:
    asked = order(trainer={"max_train_epochs": 8})
    layout = RunFiles(asked)
    want: Parts = {"dataset": "d"}
    assert prepare(asked, want) == Resume()
    # What its state says of steps begins at each start; its name and its epoch go on.
    for epoch, steps in ((2, 10), (3, 5), (6, 15)):
        put(
            *(
                f"runs/cats/output/cats-{epoch:06d}-state/{x}"
                for x in ("optimizer.bin", "random_states_0.pkl")
            )
        )
        said = {"current_epoch": epoch, "current_step": steps}
        Path(f"runs/cats/output/cats-{epoch:06d}-state/train_state.json").write_text(
            json.dumps(said)
        )
        resume = prepare(asked, want)
        assert (resume.done, resume.steps, resume.counted) == (epoch, 5, True)
        assert resume == prepare(asked, want)
    other = want | {"settings": "another"}
    previous.begin(layout, other, layout.names)
    assert prepare(asked, other) == Resume()


# -- the deployed folder --------------------------------------------------------------------------


def put(*names: str) -> None:
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(name.encode())


def row(stem: str, architecture: str = "sdxl", **more: Any) -> dict[str, Any]:
    layout = Names(architecture)
    latents = {
        part: f"cache/a/big/{part}/{stem}_0040x0030{layout.latents_ending}"
        for part in ("512", "512x768")
    }
    text = f"cache/a/big/text/{stem}{layout.text_ending}" if layout.text_ending else None
    source = f"data/{stem}.png"
    put(source, *latents.values(), *([text] if text else []), f"data/{stem}.txt")
    return {
        "dataset": "a",
        "stem": stem,
        "source": source,
        "repeats": 1,
        "latents": latents,
        "text": text,
        "caption": f"data/{stem}.txt",
        "control": None,
        **more,
    }


def write_manifest(*rows: dict[str, Any]) -> None:
    aside = {"dataset": "a", "stem": "bad", "source": "data/bad.png", "aside": "is damaged"}
    lines = [json.dumps(each) for each in [*rows, aside]]
    Path("manifest.jsonl").write_text("\n".join(lines) + "\n")


def test_names_that_collide_are_refused_in_one_line() -> None:
    write_manifest(row("x", "sd1", texts=["one", "two"]), row("x.v1", "sd1"))
    with pytest.raises(SourceError, match=r"data/x\.v1\.png: would be deployed as .*; rename"):
        deployed(order("sd1"))


def test_a_cache_that_is_gone_is_named() -> None:
    write_manifest(row("x"))
    Path("cache/a/big/512/x_0040x0030_sdxl.npz").unlink()
    with pytest.raises(CacheError, match=r"x_0040x0030_sdxl\.npz: is not there"):
        deployed(order())


def test_a_caption_must_be_text() -> None:
    write_manifest(row("x"))
    Path("data/x.txt").write_bytes(b"\xff")
    with pytest.raises(SourceError, match=r"data/x\.txt: is not UTF-8"):
        deployed(order())


# -- publication ----------------------------------------------------------------------------------


def test_each_system_finds_everything_by_its_own_names(tmp_path: Path) -> None:
    write_manifest(row("sub/x", "flux"))
    maps = [PathMap(linux=str(tmp_path), windows="D:/training")]
    vae = {"vae": "models/ae.safetensors", "checkpoint": "models/flux1.safetensors"}
    asked = order("flux", fit="bucket", model=vae).model_copy(
        update={"publish": Publish(path="out", path_maps=maps)}
    )
    publish([SdScriptsPublication(asked)], print)
    folder = tmp_path / "out/cats"
    windows = tomllib.loads((folder / "cats_win.toml").read_text())
    linux = tomllib.loads((folder / "cats_linux.toml").read_text())
    for parsed, root in ((windows, "D:/training"), (linux, str(tmp_path))):
        (subset,) = parsed["datasets"][0]["subsets"]
        assert subset["image_dir"] == f"{root}/out/cats/a_512"
        assert subset["metadata_file"] == f"{root}/out/cats/a_512/metadata.json"
    text = (folder / "train_cats.json").read_text()
    calls = {system: json.loads(text)[system]["calls"] for system in ("linux", "windows")}
    assert value(calls["windows"][0][1], "--ae") == "D:/training/models/ae.safetensors"
    assert "musubi" not in text
    assert (folder / "a_512/sub/x_flux_te.npz").is_file()


def test_a_folder_where_flux_wants_a_file_is_told() -> None:
    Path("text_1.safetensors").mkdir()
    write_manifest(row("x", "flux"))
    with pytest.raises(TrainingError, match=r"text_1\.safetensors: is no file.*\[--t5xxl, FILE\]"):
        publish([SdScriptsPublication(order("flux"))], print)


def uncached(architecture: str = "sdxl", **settings: Any) -> SdScriptsOrder:
    asked = order(architecture)
    settings = {"caches": False, **settings}
    return asked.model_copy(update={"publish": Publish.model_validate(settings)})


def verdicts(asked: SdScriptsOrder) -> dict[str, tuple[str, str]]:
    return {each.what: (each.verdict, each.note) for each in SdScriptsPublication(asked).findings()}


def test_without_caches_it_is_told_how_to_make_them() -> None:
    for architecture in ARCHITECTURES:
        asked = uncached(architecture, batch_size=4)
        found = caching_arguments(asked)
        assert value(found, "--vae_batch_size") == "4"
        assert "--no_half_vae" in found
        assert ("--vae" in found) == (architecture != "flux")  # whose flag is --ae
        assert ("--text_encoder_batch_size" in found) == (architecture in ("sd3", "flux"))
    with_own = order("sdxl", trainer={"arguments": ["--vae", "mine.pt"]})
    assert "--vae" not in caching_arguments(with_own)


def test_a_publication_is_checked_against_its_sources() -> None:
    sdscripts_world.stand_in(Path("sd-scripts"), own_venv=False)
    found = verdicts(uncached(batch_size=4))
    assert found["arguments of sdxl_train_network.py"][0] == "ok"
    assert found["sd-scripts"][0] == "ok"
    sdscripts_world.stand_in(Path("sd-scripts"), own_venv=False, without=("vae_batch_size",))
    verdict, note = verdicts(uncached(batch_size=4))["arguments of sdxl_train_network.py"]
    assert verdict == "failed" and "--vae_batch_size" in note
    assert verdicts(uncached(attention="flash3"))["attention"][0] == "failed"
    assert verdicts(uncached(attention="mem_eff_attn"))["attention"][0] == "ok"


# -- regularisation images ------------------------------------------------------------------------


def test_datasets_of_the_same_buckets_are_one_block_beside_regularisation_images() -> None:
    asked = order(trainer={"prior_loss_weight": 0.5}, fit="bucket", num_repeats=3)
    others = {
        "man": Dataset(path="man", is_reg=True, fit="bucket"),
        "crop": Dataset(path="crop"),
    }
    asked = asked.model_copy(update={"datasets": {**asked.datasets, **others}})
    found = tomllib.loads(dataset_toml(asked, "/r/{}".format))["datasets"]
    assert [[each["image_dir"] for each in block["subsets"]] for block in found] == [
        ["/r/listed/a_512", "/r/listed/man_512"],
        ["/r/listed/a_512x768", "/r/listed/man_512x768"],
        ["/r/listed/crop_512"],
        ["/r/listed/crop_512x768"],
    ]
    subset = {"cache_info": True, "flip_aug": False}
    assert found[0]["subsets"] == [
        {**subset, "image_dir": "/r/listed/a_512", "is_reg": False, "num_repeats": 3},
        {**subset, "image_dir": "/r/listed/man_512", "is_reg": True, "num_repeats": 1},
    ]
    assert value(arguments(asked), "--prior_loss_weight") == "0.5"


def test_each_system_has_a_list_of_the_images_by_its_own_paths() -> None:
    write_manifest(row("ant"), row("bee"))
    asked = order(is_reg=True)
    asked = asked.model_copy(
        update={"publish": Publish(path_maps=[PathMap(linux=str(Path.cwd()), windows="D:/x")])}
    )
    publish([SdScriptsPublication(asked)], print)
    for system, toml, place in (
        ("linux", "cats_linux.toml", f"{Path.cwd()}/published/cats"),
        ("windows", "cats_win.toml", "D:/x/published/cats"),
    ):
        (block, _) = tomllib.loads(Path("published/cats", toml).read_text())["datasets"]
        assert block["subsets"][0]["image_dir"] == f"{place}/{system}/a_512"
        listed = json.loads(Path(f"published/cats/{system}/a_512/metadata_cache.json").read_text())
        assert [*listed] == [f"{place}/a_512/{stem}.png" for stem in ("ant", "bee")]
        assert listed[f"{place}/a_512/ant.png"]["resolution"] == [40, 30]


def test_a_run_without_them_has_the_digest_of_before_the_keys() -> None:
    asked = order()
    settings = dict(shaping(asked.trainer, "weights"))
    del settings["script"], settings["prior_loss_weight"]
    del settings["v_parameterization"], settings["zero_terminal_snr"]
    del settings["network_module"], settings["network_args"]
    model = asked.model
    own = [settings, asked.script, "sdxl", model.clip_skip, model.max_token_length]
    assert asked.settings_digest() == digest.of_value([*own, *sorted(asked.flags.items())])
    assert "--prior_loss_weight" not in arguments(asked)
    other = order(trainer={"prior_loss_weight": 0.5})
    assert other.settings_digest() != asked.settings_digest()


def test_a_folder_of_one_variant_is_named_where_sd_scripts_cannot_read_it() -> None:
    part = Path("base/unet")
    part.mkdir(parents=True)
    (part / "diffusion_pytorch_model.fp16.safetensors").touch()
    for architecture, precision, readable in (
        ("sd1", "fp16", False),
        ("sdxl", "bf16", False),
        ("sdxl", "fp16", True),
    ):
        asked = order(
            architecture, model={"checkpoint": "base"}, trainer={"mixed_precision": precision}
        )
        first, *_ = model_files(asked)
        named = "holds only the variant fp16 of its weights, which sd-scripts does not read"
        assert first.fault.startswith(named) != readable
    (part / "diffusion_pytorch_model.safetensors").touch()
    assert not next(iter(model_files(order("sd1", model={"checkpoint": "base"})))).fault


# -- items that are held out ----------------------------------------------------------------------


def with_held_out(**settings: Any) -> SdScriptsOrder:
    asked = order("flux", trainer={"max_train_epochs": 5, **settings.pop("trainer", {})})
    return asked.model_copy(update={"validation": Validation(items=1, **settings)})


def test_held_out_items_lie_apart_and_are_validated_alone() -> None:
    asked = with_held_out()
    trained, held = row("sub/x", "flux"), row("held/y", "flux", validation=True)
    write_manifest(trained, held)
    files = deployed(asked)
    (image,) = (name for name in files if "a_512/held_out" in name and name.endswith(".png"))
    stem = image.removesuffix(".png")
    assert files[image] == Path(held["source"])
    assert files[f"{stem}.txt"] == b"data/held/y.txt\n"
    assert files[f"{stem}_0040x0030_flux.npz"] == Path(held["latents"]["512"])
    assert files[f"{stem}_flux_te.npz"] == Path(held["text"])
    assert [*json.loads(files["a_512/metadata.json"])] == ["sub/x.png"]
    blocks = tomllib.loads(dataset_toml(asked, lambda name: f"/run/{name}"))["datasets"]
    apart = [each for each in blocks if "validation_split" in each]
    assert [each["subsets"][0]["image_dir"] for each in apart] == [
        "/run/a_512/held_out",
        "/run/a_512x768/held_out",
    ]
    assert all(each["validation_split"] == 1 for each in apart)
    assert len(blocks) == 4
    folders = {"named": lambda name, size: f"{name}/{size[0]}-{size[1]}"}  # as a publication has
    published = tomllib.loads(dataset_toml(asked, str, **folders))["datasets"]
    places = {each["subsets"][0]["image_dir"] for each in published if "validation_split" in each}
    files = deployed(asked, **folders)
    assert places == {str(PurePosixPath(x).parent) for x in files if "held_out" in x}
    write_manifest(trained)
    none = asked.model_copy(update={"validation": None})
    assert "validation_split" not in dataset_toml(none, str)


def test_caches_of_held_out_items_made_there_go_with_what_they_came_from() -> None:
    asked = with_held_out()
    asked = asked.model_copy(update={"publish": Publish(path="out", caches=False)})
    write_manifest(row("x", "flux"), row("y", "flux", validation=True))
    publish([SdScriptsPublication(asked)], print)
    (image,) = Path("out/cats/a_512/held_out").glob("*.png")
    made = [
        image.with_name(f"{image.stem}{end}") for end in ("_0040x0030_flux.npz", "_flux_te.npz")
    ]
    put(*map(str, made))
    Path("data/y.txt").write_text("another caption")
    publish([SdScriptsPublication(asked)], print)
    assert [path.exists() for path in made] == [True, False]
    Path("data/y.png").write_bytes(b"another picture")
    publish([SdScriptsPublication(asked)], print)
    assert [path.exists() for path in made] == [False, False]


@pytest.mark.parametrize(
    ("settings", "steps", "epochs"),
    [
        ({}, None, "1"),
        ({"every": 50}, "50", "5"),
        ({"every": 50, "trainer": {"max_train_epochs": None, "max_train_steps": 80}}, "50", "80"),
    ],
)
def test_their_loss_is_computed_after_epochs_or_steps_and_at_the_end(
    settings: dict[str, Any], steps: str | None, epochs: str
) -> None:
    asked = with_held_out(**settings)
    found = arguments(asked)
    assert value(found, "--validate_every_n_epochs") == epochs
    assert ("--validate_every_n_steps" in found) == (steps is not None)
    assert steps is None or value(found, "--validate_every_n_steps") == steps
    none = asked.model_copy(update={"validation": None})
    assert asked.settings_digest() == none.settings_digest()
    assert not [each for each in arguments(none) if each.startswith("--validat")]
