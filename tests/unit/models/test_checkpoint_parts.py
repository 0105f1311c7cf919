"""A complete checkpoint tells its parts and their configurations by names and shapes alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import checkpoint_world
import pytest
import torch
import world
from checkpoint_world import Kind
from diffusers import AutoencoderKL, UNet2DConditionModel
from latentmake.backends import plan_training
from latentmake.base.errors import ModelError, TrainingError
from latentmake.config.models import Model
from latentmake.config.root import parse
from latentmake.config.weights import TextWeights, Weights
from latentmake.data.memo import Memo
from latentmake.models.cache_recipe import make, weights_digest
from latentmake.models.checkpoints import Checkpoint
from latentmake.models.files import (
    checkpoint_of,
    network_config,
    resolved,
    tokenizer_files,
    weights_files,
)
from latentmake.plan.facts import Facts
from latentmake.plan.planner import make_plan
from latentmake.plan.product import value_differences
from latentmake.trainers.sd.plan import Sd
from latentmake.trainers.sd.recipe import Objective
from latentmake.trainers.sd.unet import SdOrder
from safetensors.torch import save_file
from test_tensors import XL
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

_LEVELS = {
    "block_out_channels": [320, 640, 1280, 1280],
    "down_block_types": [*["CrossAttnDownBlock2D"] * 3, "DownBlock2D"],
    "up_block_types": ["UpBlock2D", *["CrossAttnUpBlock2D"] * 3],
    "layers_per_block": 2,
}
# As published beside the weights of SD 1.5, SD 2.1 and SDXL, without keys of no effect.
UNETS: dict[str, dict[str, Any]] = {
    "sd1": {**_LEVELS, "cross_attention_dim": 768, "attention_head_dim": 8},
    "sd2": {
        **_LEVELS,
        "cross_attention_dim": 1024,
        "attention_head_dim": [5, 10, 20, 20],
        "use_linear_projection": True,
    },
    "sdxl": {**XL, "layers_per_block": 2},
}
# (width, inner width, layers, heads, activation, projection)
TEXTS = {
    ("sd1", "text_encoder"): (768, 3072, 12, 12, "quick_gelu", 768),
    ("sd2", "text_encoder"): (1024, 4096, 23, 16, "gelu", 1024),
    ("sdxl", "text_encoder"): (768, 3072, 12, 12, "quick_gelu", 768),
    ("sdxl", "text_encoder_2"): (1280, 5120, 32, 20, "gelu", 1280),
}
_VAE = {
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 2,
}
KINDS: tuple[Kind, ...] = ("sd1", "sd2", "sdxl")


def write_header(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Write a safetensors file whose tensors are holes."""
    entries, start = {}, 0
    for name, shape in shapes.items():
        size = 2 * int(torch.Size(shape).numel())
        entries[name] = {"dtype": "F16", "shape": shape, "data_offsets": [start, start + size]}
        start += size
    head = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + start)


def shapes_of(build: Any) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        return dict(build().state_dict())


@pytest.fixture(scope="module", params=KINDS)
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of the names and shapes of a published checkpoint."""
    kind: Kind = request.param
    state: dict[str, torch.Tensor] = {}
    unet = shapes_of(lambda: UNet2DConditionModel(**UNETS[kind]))
    state |= {f"model.diffusion_model.{k}": v for k, v in checkpoint_world.of_unet(unet).items()}
    for name, value in shapes_of(lambda: AutoencoderKL(**_VAE)).items():
        state[f"first_stage_model.{checkpoint_world.of_vae(name)}"] = value
    for (owner, part), sizes in TEXTS.items():
        if owner != kind:
            continue
        width, inner, layers, heads, _, projection = sizes
        settings = CLIPTextConfig(
            hidden_size=width,
            intermediate_size=inner,
            num_hidden_layers=layers + (kind == "sd2"),  # whose last block diffusers leaves out
            num_attention_heads=heads,
            projection_dim=projection,
        )
        projects = part == "text_encoder_2"
        made = CLIPTextModelWithProjection if projects else CLIPTextModel
        text = shapes_of(lambda made=made, settings=settings: made(settings))
        prefix = {"sd1": "cond_stage_model", "sd2": "cond_stage_model.model."}.get(
            kind, "conditioner.embedders.1.model." if projects else "conditioner.embedders.0"
        )
        if prefix.endswith("."):
            state |= checkpoint_world.of_open_clip(text, prefix)
        else:
            state |= {
                f"{prefix}.transformer.text_model.{name.removeprefix('text_model.')}": value
                for name, value in text.items()
            }
    path = tmp_path_factory.mktemp(kind) / f"{kind}.safetensors"
    write_header(path, {name: tuple(value.shape) for name, value in state.items()})
    return path


def test_configurations_are_those_that_were_published(published: Path) -> None:
    kind = published.stem

    def found(part: str) -> dict[str, Any]:
        return Checkpoint(Weights(path=str(published), subfolder=part)).config()

    for key, value in UNETS[kind].items():
        assert found("unet")[key] == value, key
    unknown = {"in_channels", "out_channels", "_class_name", "use_linear_projection"}
    assert found("unet").keys() - UNETS[kind].keys() <= unknown
    for key, value in _VAE.items():
        assert found("vae")[key] == value, key
    assert found("vae").get("scaling_factor", 0.18215) == (0.13025 if kind == "sdxl" else 0.18215)
    assert ("force_upcast" in found("vae")) == (kind == "sdxl")
    for (owner, part), sizes in TEXTS.items():
        if owner == kind:
            text = found(part)
            names = ("hidden_size", "intermediate_size", "num_hidden_layers")
            names += ("num_attention_heads", "hidden_act", "projection_dim")
            assert tuple(text[name] for name in names) == sizes
            assert text["vocab_size"] == 49408 and text["max_position_embeddings"] == 77


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, micro: Path) -> Path:
    """A folder with a checkpoint, its pipeline's folder, a tokenizer and an empty hub cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    shutil.copytree(micro / "tokenizer", "clip")
    Path("models").mkdir()
    checkpoint_world.write(Path("pipe"), Path("models/sd.safetensors"), Path("clip"))
    world.make_dataset(Path("data/shapes"))
    return tmp_path


def facts_of(model: dict[str, Any], **trainer: Any) -> Facts:
    values = world.config()
    values["models"]["micro"] = model
    values["runs"]["tiny"] |= {"trainer": world.training() | trainer}
    return Facts(parse(values), Memo(None))


def refusal(model: dict[str, Any], **trainer: Any) -> str:
    facts = facts_of(model, **trainer)
    with pytest.raises((ModelError, TrainingError)) as error:
        plan_training(facts, make_plan(facts, ["tiny"]).runs["tiny"])
    line = str(error.value)
    assert "\n" not in line
    return line


FILE = {"checkpoint": "models/sd.safetensors"}
TOKENS = {"text": {"tokenizer": "clip"}}


def test_a_checkpoint_is_a_whole_model(place: Path) -> None:
    facts = facts_of(FILE | TOKENS)
    planned = make_plan(facts, ["tiny"]).runs["tiny"]
    plan_training(facts, planned)
    assert planned.training_order is not None
    model = facts.config.models["micro"]
    assert [model.vae.path, model.text[0].path] == [FILE["checkpoint"]] * 2
    assert model.unet is not None and (checkpoint := checkpoint_of(model.unet))
    assert checkpoint.part == "unet"


def test_what_lies_beside_a_checkpoint_is_not_its_configuration(place: Path) -> None:
    vae = Weights(path=FILE["checkpoint"], subfolder="vae")
    before = weights_digest(vae)
    Path("models/config.json").write_text('{"_class_name": "UNet2DConditionModel"}')
    assert weights_files(vae) == [Path(FILE["checkpoint"])] and weights_digest(vae) == before
    assert (network_config(vae) or {})["_class_name"] == "AutoencoderKL"


def test_parts_that_are_named_are_not_taken_from_the_checkpoint() -> None:
    model = Model.model_validate(FILE | {"vae": "own", "text": [{"path": "t"}], "unet": "u"})
    assert [model.vae.path, model.text[0].path] == ["own", "t"]
    assert model.unet is not None and model.unet.path == "u"
    both = {"architecture": "sdxl", "layout": "sdscripts"}
    model = Model.model_validate(FILE | both | TOKENS)
    folders = ["text_encoder", "text_encoder_2"]
    assert [each.subfolder for each in model.text] == folders and model.unet is None
    model = Model.model_validate(FILE | both | {"text": ["mine", {"tokenizer": "clip"}]})
    assert [each.path for each in model.text] == ["mine", FILE["checkpoint"]]


def test_the_folder_of_a_pipeline_is_a_checkpoint_too(place: Path) -> None:
    values = world.config()
    values["models"]["micro"] = {"checkpoint": "pipe"}
    model = resolved(parse(values)).models["micro"]
    assert model.unet is not None
    paths = [model.vae.path, model.text[0].path, model.unet.path]
    assert paths == ["pipe/vae", "pipe/text_encoder", "pipe/unet"]


def test_recipes_of_what_was_named_before_are_the_same(place: Path) -> None:
    names = {"vae": "pipe/vae", "text": ["pipe/text_encoder"]}
    sd1 = {"architecture": "sd1", "layout": "sdscripts"}
    dataset = facts_of(FILE).config.datasets["shapes"]
    for kind in ("latents", "text"):
        old = make(kind, dataset, Model.model_validate(names | sd1))
        assert make(kind, dataset, Model.model_validate(names | sd1 | FILE)) == old


def test_another_checkpoint_rebuilds_what_its_other_parts_shape(place: Path) -> None:
    state = checkpoint_world.checkpoint(Path("pipe"), "sd1")
    other = {k: v + 1 if k.startswith("cond_stage") else v for k, v in state.items()}
    other = {f"model_ema.{k}": v.clone() for k, v in state.items() if "time_embed" in k} | other
    save_file({k: v.contiguous() for k, v in other.items()}, "models/other.safetensors")
    memo = Memo(None)

    def digests(path: str) -> dict[str, str]:
        parts = ("vae", "text_encoder", "unet")
        places = {part: Weights(path=path, subfolder=part) for part in parts}
        found = {part: weights_digest(x, memo.digest_of_file) for part, x in places.items()}
        assert found == {part: weights_digest(x) for part, x in places.items()}
        return found

    old, new = digests(FILE["checkpoint"]), digests("models/other.safetensors")
    assert {part for part in old if old[part] != new[part]} == {"text_encoder"}
    assert len({*old.values()}) == 3
    shutil.copy("models/other.safetensors", FILE["checkpoint"])
    assert digests(FILE["checkpoint"]) == new


def test_a_missing_tokenizer_is_found_in_the_hub_cache_or_named(place: Path) -> None:
    line = refusal(FILE)
    assert "there is no tokenizer here; run `hf download openai/clip-vit-large-patch14 " in line
    assert line.endswith("or name CLIP's tokenizer as `text: {tokenizer: FOLDER}`")
    commit = "1" * 40
    snapshot = place / "hub/models--openai--clip-vit-large-patch14/snapshots" / commit
    shutil.copytree("clip", snapshot)
    (text,) = facts_of(FILE).config.models["micro"].text
    assert {file.parent for file in tokenizer_files(text)} == {snapshot}
    shutil.copytree("clip", "models/tokenizer")
    assert {file.parent for file in tokenizer_files(text)} == {Path("models/tokenizer")}


def test_a_file_without_a_part_or_of_another_model_is_refused(place: Path) -> None:
    state = checkpoint_world.checkpoint(Path("pipe"), "sd1")
    bare = {name: tuple(value.shape) for name, value in state.items() if "first_stage" not in name}
    write_header(Path("models/bare.safetensors"), bare)
    line = refusal({"checkpoint": "models/bare.safetensors"} | TOKENS)
    assert line == (
        "models.micro.checkpoint: models/bare.safetensors: holds no VAE in the names of a complete "
        "checkpoint; name it as `vae` beside `checkpoint`"
    )
    line = refusal(FILE | TOKENS | {"architecture": "sd2"})
    assert line.endswith("is a checkpoint of Stable Diffusion 1.x; set `architecture: sd1`")
    assert "does not exist" in refusal({"checkpoint": "gone.safetensors"} | TOKENS)
    torch.save({}, "models/old.ckpt")
    assert "convert it to safetensors" in refusal({"checkpoint": "models/old.ckpt"} | TOKENS)
    Path("models/cut.safetensors").write_bytes(Path(FILE["checkpoint"]).read_bytes()[:5000])
    assert "copy the checkpoint again" in refusal({"checkpoint": "models/cut.safetensors"} | TOKENS)


def test_sdxl_goes_with_both_encoders_and_no_prediction_is_guessed(place: Path) -> None:
    for kind in ("sd2", "sdxl"):
        pipe = Path(kind)
        checkpoint_world.write(pipe, Path(f"models/{kind}.safetensors"), Path("clip"), kind)
    file = {"checkpoint": "models/sdxl.safetensors"} | TOKENS
    assert "set `architecture: sdxl`" in refusal(file)
    facts = facts_of(file | {"architecture": "sdxl"})
    plan_training(facts, make_plan(facts, ["tiny"]).runs["tiny"])
    parts = {"vae": "sdxl/vae", "text": ["sdxl/text_encoder"], "unet": "sdxl/unet"}
    assert refusal(parts) == (
        "models.micro.unet: this UNet is one of SDXL, and the caches of this model are not; set "
        "the model's `architecture: sdxl`, and name both text encoders as its `text`"
    )
    both = {"text": ["sdxl/text_encoder", "sdxl/text_encoder_2"], "unet": "pipe/unet"}
    other = "this UNet is none of SDXL, and the model has 2 text encoders; name the UNet of SDXL, "
    for more in ({}, {"architecture": "sdxl"}):
        assert other in refusal(parts | both | more)
    second = {"checkpoint": "models/sd2.safetensors"} | TOKENS
    line = refusal(second)
    assert line.startswith("runs.tiny.trainer.prediction_type: this key is missing: models/sd2.saf")
    facts = facts_of(second, prediction_type="v_prediction")
    plan_training(facts, make_plan(facts, ["tiny"]).runs["tiny"])


def test_a_file_that_predicts_v_is_trained_so_and_says_why_again(place: Path) -> None:
    def planned(**trainer: Any) -> SdOrder:
        facts = facts_of(FILE | TOKENS, **trainer)
        plan_training(facts, plan := make_plan(facts, ["tiny"]).runs["tiny"])
        assert isinstance(plan.trainer, SdOrder)
        return plan.trainer

    before, state = planned(), checkpoint_world.checkpoint(Path("pipe"), "sd1")
    state |= {"v_pred": torch.zeros(0), "ztsnr": torch.zeros(0)}
    save_file({k: v.contiguous() for k, v in state.items()}, FILE["checkpoint"])
    now, named = planned(), planned(prediction_type="v_prediction")
    assert now.trainer.prediction_type == "v_prediction" and now.trainer.zero_terminal_snr
    assert now.weights == before.weights  # the UNet's own tensors are the same
    assert now.settings_digest() == named.settings_digest() != before.settings_digest()
    assert [*map(str, value_differences(before.settings(), now.settings()))] == [
        "prediction_type none -> v_prediction",
        "zero_terminal_snr none -> true",
    ]
    notes = {each.what: each.note for each in Sd().check(now, current=False)}
    assert "tensor v_pred" in notes["prediction"] and "tensor ztsnr" in notes["prediction"]
    schedule = Objective(now).schedule
    assert float(schedule.alphas_cumprod[-1]) == 0
    assert schedule.config.prediction_type == "v_prediction"


def test_open_clip_pads_with_the_token_0(place: Path) -> None:
    from latentmake.encode.tokenizers import load

    checkpoint_world.write(Path("xl"), Path("models/xl.safetensors"), Path("clip"), "sdxl")
    for part, pads in (("text_encoder", False), ("text_encoder_2", True)):
        text = TextWeights(path="models/xl.safetensors", subfolder=part, tokenizer="clip")  # type: ignore[arg-type]
        assert (load(text).pad_token_id == 0) == pads
