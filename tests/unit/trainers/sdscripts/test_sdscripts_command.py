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
from latentmake.config.fields import shaping
from latentmake.config.machines import PathMap, Publish
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
from sdscripts_world import SWITCHES, VALUES, order_of

pytestmark = pytest.mark.usefixtures("own_folder")

ARCHITECTURES = ("sd1", "sd2", "sdxl", "sd3", "flux")


def order(
    architecture: str = "sdxl", *, trainer: Any = None, model: Any = None, **dataset: Any
) -> SdScriptsOrder:
    datasets = {"a": Dataset.model_validate({"path": "data", **dataset})}
    return order_of(architecture, trainer=trainer, model=model, datasets=datasets)


def published(asked: SdScriptsOrder, **settings: Any) -> Path:
    """Publish a run by further settings; return the folder."""
    settings = asked.publish.model_dump() | settings
    asked = asked.model_copy(update={"publish": Publish.model_validate(settings)})
    publish(SdScriptsPublication(asked), print)
    return Path(asked.publish.path).absolute() / "cats"


def arguments(asked: SdScriptsOrder, resume: Resume | None = None) -> list[str]:
    places = asked.places if resume else Places(str, "/d.toml", "/out", "/logs", "/prompts")
    return training_arguments(asked, places, "sdpa", resume or Resume())


def value(found: list[str], flag: str) -> str:
    return found[found.index(flag) + 1]


# -- command lines --------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_flag_is_one_that_it_knows_and_is_given_once(architecture: str) -> None:
    switches = ("gradient_checkpointing", "torch_compile", "deepspeed")
    trainer = {**dict.fromkeys(switches, True), "save_every_n_epochs": 2}
    found = arguments(order(architecture, trainer=trainer))
    flags = [each.removeprefix("--") for each in found if each.startswith("--")]
    assert set(flags) <= {*SWITCHES, *VALUES}
    assert len(set(flags)) == len(flags)
    for flag in set(flags) & set(SWITCHES):
        index = found.index(f"--{flag}") + 1
        assert index == len(found) or found[index].startswith("--")
    # Latents are always cached, and text where it is no text encoder that is trained.
    assert {"cache_latents", "cache_latents_to_disk"} <= {*flags}
    text = {"cache_text_encoder_outputs", "cache_text_encoder_outputs_to_disk"}
    cached = set() if architecture in ("sd1", "sd2") else text | {"network_train_unet_only"}
    assert (text | {"network_train_unet_only"}) & {*flags} == cached
    assert ("v2" in flags) == (architecture == "sd2")


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


MASKS = {"apply_lg_attn_mask": True, "apply_t5_attn_mask": True}
PROMPTED = {"text_arguments": ["--system_prompt", "draw"]}
SHORT = {"text": [{"path": "clip"}, {"path": "t5", "max_length": 256}]}
FLAGS: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, str | None]]] = [
    ("flux", {}, {}, {"ae": "ae.safetensors", "clip_l": "text_0.safetensors"}),
    ("flux", {}, {}, {"t5xxl": "text_1.safetensors"}),
    ("flux", {}, {"arguments": ["--ae", "/mine.sft"]}, {"ae": "/mine.sft"}),
    ("sd3", MASKS, {}, {**dict.fromkeys(MASKS, ""), "t5xxl_max_token_length": "512"}),
    ("flux", SHORT, {}, {"t5xxl_max_token_length": "256"}),
    ("sd1", {"clip_skip": 2}, {}, {"clip_skip": "2"}),
    ("sd1", {"max_token_length": 150}, {}, {"max_token_length": "150"}),
    ("sdxl", {}, {}, {"max_token_length": None, "max_train_epochs": "10", "save_state": None}),
    ("sdxl", {}, {"max_train_steps": 5}, {"max_train_steps": "5", "max_train_epochs": None}),
    ("sdxl", {}, {"learning_rate": 1e-4}, {"learning_rate": "0.0001"}),
    ("sdxl", {}, {"prior_loss_weight": 0.5}, {"prior_loss_weight": "0.5"}),
    ("sdxl", {}, {}, {"prior_loss_weight": None}),
    ("lumina", PROMPTED, {}, {"system_prompt": "draw", "gemma2": "text_0.safetensors"}),
    ("lumina", {}, {}, {"system_prompt": None, "network_module": "networks.lora_lumina"}),
]


@pytest.mark.parametrize(("architecture", "model", "trainer", "flags"), FLAGS)
def test_a_flag_has_the_value_of_the_model_the_caches_or_the_user(
    architecture: str, model: Any, trainer: Any, flags: dict[str, str | None]
) -> None:
    found = arguments(order(architecture, model=model, trainer=trainer))
    for flag, expected in flags.items():
        assert found.count(f"--{flag}") == (expected is not None), flag
        assert not expected or value(found, f"--{flag}") == expected
    assert arguments(order(trainer={"arguments": ["--masked_loss"]}))[-1] == "--masked_loss"


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
        state = Path(f"runs/cats/output/cats-{epoch:06d}-state")
        put(*(f"{state}/{name}" for name in ("optimizer.bin", "random_states_0.pkl")))
        said = {"current_epoch": epoch, "current_step": steps}
        (state / "train_state.json").write_text(json.dumps(said))
        resume = prepare(asked, want)
        assert (resume.done, resume.steps, resume.counted) == (epoch, 5, True)
        assert resume == prepare(asked, want)
    other = want | {"settings": "another"}
    previous.make_room(layout, other, layout.names)
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


@pytest.mark.parametrize(
    ("fault", "kind", "line"),
    [
        ("a name", SourceError, r"data/x\.v1\.png: would be deployed as .*; rename"),
        ("a cache", CacheError, r"x_0040x0030_sd\.npz: is not there"),
        ("a caption", SourceError, r"data/x\.txt: is not UTF-8"),
    ],
)
def test_what_cannot_be_deployed_is_one_line(fault: str, kind: type[Exception], line: str) -> None:
    rows = [row("x", "sd1", texts=["one", "two"] if fault == "a name" else None)]
    write_manifest(*rows, *([row("x.v1", "sd1")] if fault == "a name" else []))
    if fault == "a cache":
        Path("cache/a/big/512/x_0040x0030_sd.npz").unlink()
    if fault == "a caption":
        Path("data/x.txt").write_bytes(b"\xff")
    with pytest.raises(kind, match=line):
        deployed(order("sd1"))


# -- publication ----------------------------------------------------------------------------------


def test_each_system_finds_everything_by_its_own_names(tmp_path: Path) -> None:
    write_manifest(row("sub/x", "flux"))
    maps = [PathMap(linux=str(tmp_path), windows="D:/training")]
    vae = {"vae": "models/ae.safetensors", "checkpoint": "models/flux1.safetensors"}
    folder = published(order("flux", fit="bucket", model=vae), path="out", path_maps=maps)
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
        publish(SdScriptsPublication(order("flux")), print)


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
    published(asked, path_maps=[PathMap(linux=str(Path.cwd()), windows="D:/x")])
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
    write_manifest(row("x", "flux"), row("y", "flux", validation=True))
    (image,) = (published(asked, caches=False) / "a_512/held_out").glob("*.png")
    endings = ("_0040x0030_flux.npz", "_flux_te.npz")
    made = [image.with_name(f"{image.stem}{ending}") for ending in endings]
    put(*map(str, made))
    Path("data/y.txt").write_text("another caption")
    published(asked, caches=False)
    assert [path.exists() for path in made] == [True, False]
    Path("data/y.png").write_bytes(b"another picture")
    published(asked, caches=False)
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
