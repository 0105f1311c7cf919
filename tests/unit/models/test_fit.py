"""The plan tells of networks that are damaged, incomplete or do not fit, and of no others."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import checkpoint_world
import dit_world
import pytest
import torch
import wan_world
import world
from diffusers import AutoencoderKLFlux2, UNet2DConditionModel
from latentmake.backends import plan_training
from latentmake.base.errors import ModelError
from latentmake.config.architectures import MUSUBI, SDSCRIPTS
from latentmake.config.root import parse
from latentmake.data.memo import Memo
from latentmake.models import fit
from latentmake.plan.facts import Facts
from latentmake.plan.planner import make_plan
from safetensors.torch import load, save_file

MODELS = ("sd1 folder", "sd2 file", "sdxl folder", "sdxl file", "sdxl sdscripts", "wan")
TRAINERS = {"sdxl sdscripts": "sdscripts", "wan": "wan"}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 3438167540\n"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory, micro: Path) -> Path:
    """A folder with small models of all kinds."""
    root = tmp_path_factory.mktemp("weights")
    for kind in ("sd1", "sd2", "sdxl"):
        file = root / f"{kind}.safetensors"
        checkpoint_world.write(root / kind, file, micro / "tokenizer", kind)
    wan_world.write_wan_vae(root / "wan")
    wan_world.write_umt5(root / "wan")
    dit = dit_world.tiny_dit()
    state = dit_world.original_dit(dit.state_dict())
    config = dit_world.write_file(state, root / "wan/dit.safetensors").with_name("config.json")
    config.write_text(json.dumps(dit_world.original_config(dit)))
    shutil.copytree(micro / "tokenizer", root / "tokenizer")
    return root


@pytest.fixture
def project(tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(weights, "models")
    world.make_dataset(Path("data/shapes"))
    return tmp_path


def model_of(name: str) -> dict[str, Any]:
    """Return the section of a model."""
    kind, _, form = name.partition(" ")
    if kind == "wan":
        text = {"path": "models/wan/models_t5_umt5-xxl-enc-bf16.safetensors"}
        vae, dit = "models/wan/Wan2.1_VAE.safetensors", "models/wan/dit.safetensors"
        text["tokenizer"] = "models/wan/tokenizer"
        return {"task": "t2v-1.3B", "vae": vae, "text": text, "dit": dit}
    if form == "folder":
        texts = [f"models/{kind}/text_encoder{end}" for end in ("", "_2")[: 1 + (kind == "sdxl")]]
        parts = {key: f"models/{kind}/{key}" for key in ("vae", "unet")}
        return {"architecture": kind, "text": texts, **parts}
    layout = {"layout": "sdscripts"} if form == "sdscripts" else {}
    text = {"tokenizer": "models/tokenizer"}
    file = f"models/{kind}.safetensors"
    return {"architecture": kind, "checkpoint": file, "text": text, **layout}


def planned(model: dict[str, Any], trainer: str = "sd") -> str:
    """Plan a run; return the one line that refuses it, or ""."""
    values = world.config()
    values["models"] = {"m": model}
    run = {"datasets": ["shapes"], "model": "m", "resolutions": [64], "trainer": {"kind": trainer}}
    values |= {"runs": {"r": run}, "sd_scripts": {"path": "."}}
    try:
        facts = Facts(parse(values), Memo(None), read_only=True)
        plan = make_plan(facts, ["r"])
        if trainer == "wan":  # which reads its network's files itself
            plan_training(facts, plan.runs["r"], train=False)
    except ModelError as error:
        assert "\n" not in str(error) and str(error).startswith(("models.m.", "models/"))
        return str(error)
    return ""


def files_of(name: str) -> list[Path]:
    """Return the files of weights of a model."""
    kind, _, form = name.partition(" ")
    if kind == "wan":
        return sorted(Path("models/wan").glob("*.safetensors"))
    found = Path(f"models/{kind}").rglob("*.safetensors")
    return sorted(found) if form == "folder" else [Path(f"models/{kind}.safetensors")]


def damages(path: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield how a file of weights is damaged, and what does so."""
    whole = path.read_bytes()
    state = load(whole)  # not mapped from the file, which is written anew
    for length in (7, len(whole) - 1):
        yield "", lambda length=length: path.write_bytes(whole[:length])
    yield "git lfs pull", lambda: path.write_bytes(POINTER)
    # Sorted, because the order of the tensors differs from process to process. Embeddings may have
    # more tokens or positions.
    others = "position_ids", "logit_scale", "embedding.weight", "positional_embedding"
    names = [name for name in sorted(state) if not name.endswith(others)]
    for name in names[:: max(1, len(names) // 3)]:
        rest = {key: value for key, value in state.items() if key != name}
        yield "", lambda rest=rest: save_file(rest, path)
        renamed = {**rest, f"{name}_": state[name]}
        yield "", lambda renamed=renamed: save_file(renamed, path)
        if "Wan2.1" not in path.name and "t5" not in path.name:  # only their names are known
            wider = {**rest, name: torch.cat([state[name]] * 2)}
            yield "", lambda wider=wider: save_file(wider, path)
    scaled = {**state, f"{names[0]}.scale_weight": torch.ones(1)}
    yield "", lambda: save_file(scaled, path)


@pytest.mark.parametrize("name", MODELS)
def test_a_sound_model_passes_and_each_damaged_file_of_it_is_told(name: str, project: Path) -> None:
    model, trainer = model_of(name), TRAINERS.get(name, "sd")
    assert planned(model, trainer) == ""
    for path in files_of(name):
        whole = path.read_bytes()
        for said, damage in damages(path):
            damage()
            line = planned(model, trainer)
            assert line and said in line, (path, damage)
        path.write_bytes(whole)
    assert planned(model, trainer) == ""
    for one, two in itertools.combinations(files_of(name), 2):
        first, second = one.read_bytes(), two.read_bytes()
        one.write_bytes(second)
        two.write_bytes(first)
        assert planned(model, trainer), (one, two)
        one.write_bytes(first)
        two.write_bytes(second)


@pytest.mark.parametrize(
    "name",
    [
        "first_stage_model.quant_conv.weight",
        "first_stage_model.post_quant_conv.weight",
        "first_stage_model.encoder.down.3.block.0.conv2.weight",
        "model.diffusion_model.label_emb.0.0.weight",
        "model.diffusion_model.input_blocks.1.1.proj_in.weight",
    ],
)
def test_a_checkpoint_that_lacks_a_tensor_is_not_taken_for_another_network(
    name: str, project: Path
) -> None:
    file = Path("models/sdxl.safetensors")
    state = load(file.read_bytes())
    value = state.pop(name)
    for damaged in (state, {**state, f"{name}_": value}):
        save_file(damaged, file)
        lacks = name.removeprefix("first_stage_model.").removeprefix("model.diffusion_model.")
        assert f"lacks {lacks}" in planned(model_of("sdxl file"))


def test_what_a_checkpoint_holds_besides_passes(project: Path) -> None:
    file = Path("models/sd1.safetensors")
    state = load(file.read_bytes())
    further = {
        "model_ema.decay": torch.ones(1),
        "model_ema.diffusion_modelinput_blocks00weight": torch.ones(2),
        "cond_stage_model.transformer.text_model.embeddings.position_ids": torch.arange(77)[None],
        "alphas_cumprod": torch.ones(8),
        "lora_unet_x.lora_down.weight": torch.ones(2, 2),
    }
    half = {name: value.half() for name, value in state.items()}
    for changed in ({**state, **further}, half, {**half, **further}):
        save_file(changed, file)
        assert planned(model_of("sd1 file")) == ""
    without = {x: state[x] for x in state if not x.startswith("first_stage_model.")}
    save_file(without, file)
    assert planned({**model_of("sd1 file"), "vae": "models/sd1/vae"}) == ""


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"in_channels": 9}, "channels and gives 4: it is one for inpainting, which cannot be"),
        ({"in_channels": 16, "out_channels": 16}, "takes latents of 16 channels, and those of the"),
        ({"cross_attention_dim": 96}, "attn2.to_k.weight of shape [64, 768] instead of [64, 96]"),
    ],
)
def test_a_unet_of_another_kind_is_told_by_its_configuration(
    changes: dict[str, Any], said: str, project: Path
) -> None:
    path = Path("models/sd1/unet/config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert said in planned(model_of("sd1 folder"))


def test_the_vae_of_flux2_is_for_a_unet_of_as_many_channels(project: Path) -> None:
    sizes: dict[str, Any] = {"block_out_channels": (32, 64), "layers_per_block": 1}
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2}
    AutoencoderKLFlux2(
        **sizes, **blocks, up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=8
    ).save_pretrained(vae := Path("models/flux2/vae"))
    model = {**model_of("sd1 folder"), "vae": str(vae)}
    unet = Path("models/sd1/unet")
    assert "takes latents of 4 channels, and those of the VAE have 8" in planned(model)
    config = json.loads((unet / "config.json").read_text()) | {"in_channels": 8, "out_channels": 8}
    UNet2DConditionModel.from_config(config).save_pretrained(unet)
    assert "does not say the scaling factor of its latents" in planned(model)
    model["scaling_factor"] = 0.5
    assert planned(model) == ""
    file = vae / "diffusion_pytorch_model.safetensors"
    for name, each in (state := load(file.read_bytes())).items():
        if name.endswith("conv_in.weight"):
            save_file({**state, name: torch.cat([each] * 2)}, file)
            assert name in planned(model)


def test_text_encoders_and_projections_of_another_model_are_told(project: Path) -> None:
    model = model_of("sd1 folder")
    said = planned(model | {"text": "models/sd2/text_encoder"})
    assert "embeddings 768 wide, and those of `text` are 128 wide" in said
    for shape, sound in (((768, 768), True), ((768, 32), False), ((32, 768), False)):
        save_file({"weight": torch.ones(shape)}, "projection.safetensors")
        said = planned({**model, "text_projection": "projection.safetensors"})
        assert ("projects from" in said) != sound
    model = model_of("sdxl folder")
    model["text"] = model["text"][::-1]
    assert "models.m.text: " in planned(model)


def test_a_network_that_has_not_changed_is_looked_at_once(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[object] = []
    check = fit.check
    monkeypatch.setattr(fit, "check", lambda *given: looks.append(given) or check(*given))
    model, memo = model_of("sd1 folder"), Memo(None)
    values = world.config() | {"models": {"m": model}}
    values["runs"] = {"r": {"datasets": ["shapes"], "model": "m", "resolutions": [64]}}
    for _ in range(3):
        make_plan(Facts(parse(values), memo), ["r"])
    assert len(looks) == 1
    file = Path("models/sd1/vae/diffusion_pytorch_model.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"^models\.m\.vae: .* is cut short"):
        make_plan(Facts(parse(values), memo), ["r"])


def test_a_stack_of_blocks_is_complete_in_any_names() -> None:
    ends = ("attn.q", "attn.k", "mlp.0", "norm")
    names = {f"net.blocks.{x}.{end}.weight" for x in range(6) for end in ends}
    fit._refuse_gaps(names)
    fit._refuse_gaps(names - {"net.blocks.5.mlp.0.weight"})  # the last may differ
    for gone, lacks in (
        ({"net.blocks.2.mlp.0.weight"}, "net.blocks.2.mlp.0.weight"),
        ({f"net.blocks.3.{end}.weight" for end in ends}, r"net.blocks.3\."),
    ):
        with pytest.raises(ModelError, match=f"lacks {lacks}"):
            fit._refuse_gaps(names - gone)


@pytest.mark.parametrize("row", sorted({**MUSUBI, **SDSCRIPTS}))
def test_a_network_that_takes_other_embeddings_or_latents_is_told(row: str, tmp_path: Path) -> None:
    inputs = {**MUSUBI, **SDSCRIPTS}[row].inputs
    for key, layers in inputs.items():
        for layer, times in layers.items():
            file = tmp_path / "dit.safetensors"
            save_file({f"model.{layer}": torch.ones(4, 32 * times)}, file)
            fit._check_network(str(file), inputs, {key: 32}, scaled=False)
            with pytest.raises(ModelError, match=f"makes {48 * times}"):
                fit._check_network(str(file), inputs, {key: 48}, scaled=False)
