"""Encoders give what diffusers and transformers give, whatever form the weights come in."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_world import whole_vae
from demo.text import clip_tokenizer, save_slow_files, t5_tokenizer
from diffusers import AutoencoderKL, AutoencoderKLFlux2
from exact_world import error, narrow_vae, pictures
from item_world import inputs_of
from latentmake.base.errors import ModelError
from latentmake.config.datasets import Dataset
from latentmake.config.models import Model
from latentmake.config.weights import TextWeights, Weights
from latentmake.encode.encoders.device import compute_dtype, encoder
from latentmake.encode.encoders.text import TextEncoder, load_text_encoder
from latentmake.encode.encoders.vae import TILE, encode_images, load_vae, tile
from latentmake.encode.reading import Sample
from latentmake.plan.orders import Order
from order_world import silent
from refusals import refused
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertModel,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    PreTrainedModel,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

CPU = torch.device("cpu")
CAPTIONS = ["a red circle", "two blue squares on a brown table", "", "circle " * 90]
ROUNDING = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module")
def pixels() -> torch.Tensor:
    return torch.randint(0, 256, (3, 24, 32, 3), generator=torch.Generator().manual_seed(0)).byte()


def tiny_vae(**changes: Any) -> AutoencoderKL:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "block_out_channels": (8, 16, 16),
        "down_block_types": ("DownEncoderBlock2D",) * 3,
        "up_block_types": ("UpDecoderBlock2D",) * 3,
        "layers_per_block": 1,
        "norm_num_groups": 8,
        "latent_channels": 4,
        "scaling_factor": 0.3,
        "shift_factor": 0.1,
    }
    return AutoencoderKL(**{**settings, **changes}).eval()


@pytest.fixture(scope="module")
def vae() -> AutoencoderKL:
    return tiny_vae()


@pytest.fixture(scope="module")
def vae_folder(vae: AutoencoderKL, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "vae"
    vae.save_pretrained(folder)
    return folder


@torch.no_grad()
def of_diffusers(vae: AutoencoderKL, pixels: torch.Tensor) -> torch.Tensor:
    """Encode pictures by diffusers alone, one after the other."""
    images = pixels.permute(0, 3, 1, 2).float() / 127.5 - 1
    return torch.cat([vae.encode(image[None]).latent_dist.mean for image in images])


def ancient_keys(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Name attention as diffusers did before version 0.17."""
    found = {}
    for name, value in state.items():
        for new, old in {
            "to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"
        }.items():  # fmt: skip
            name = name.replace(f"attentions.0.{new}.", f"attentions.0.{old}.")
        found[name] = value
    return found


def flux2_keys(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Name tensors as FLUX.2's own release does, with the statistics of latents."""
    found = {
        re.sub(
            r"^((post_)?quant_conv)", lambda x: f"{'de' if x[2] else 'en'}coder.{x[1]}", name
        ): each
        for name, each in whole_vae(state, 3).items()
    }
    return {**found, "bn.running_mean": torch.ones(16), "bn.running_var": torch.ones(16)}


FORMS: dict[str, Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]] = {
    "diffusers": lambda state: state,
    "ancient diffusers": ancient_keys,
    "original": lambda state: whole_vae(state, 3),
    "FLUX.2": flux2_keys,
    "whole checkpoint": lambda state: {
        **{f"first_stage_model.{key}": value for key, value in whole_vae(state, 3).items()},
        "model.diffusion_model.input_blocks.0.0.weight": torch.ones(2),
    },
}


def undrawn(load: Callable[[], Any]) -> Any:
    """Return what a function loads; it must draw no number."""
    before = torch.get_rng_state()
    found = load()
    assert torch.equal(torch.get_rng_state(), before)
    return found


def is_mapped(file: Path) -> bool:
    return str(file.resolve()) in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shard", ["1GB", "20KB"])
def test_a_vae_is_that_of_diffusers_without_drawing_or_copying_weights(
    pixels: torch.Tensor, tmp_path: Path, stored: torch.dtype, shard: str
) -> None:
    tiny_vae().to(stored).save_pretrained(tmp_path, max_shard_size=shard)
    found = undrawn(lambda: load_vae(Weights(path=str(tmp_path)), CPU, torch.float32))
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == (shard == "20KB")
    assert all(map(is_mapped, files)) == (stored == torch.float32)
    theirs = AutoencoderKL.from_pretrained(tmp_path, low_cpu_mem_usage=False)
    latents = encode_images(found, pixels)
    assert latents.shape == (3, 4, 6, 8)
    assert latents.dtype == torch.float32
    torch.testing.assert_close(latents, of_diffusers(theirs, pixels), **ROUNDING)
    ones = torch.ones(1, 4, 6, 8)
    assert torch.equal(found.decode(ones)[0], theirs.decode(ones)[0])
    assert not found.training
    assert not any(weight.requires_grad for weight in found.parameters())


def test_the_vae_of_flux2_is_that_of_diffusers(pixels: torch.Tensor, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"norm_num_groups": 8, "layers_per_block": 1, "latent_channels": 6}
    theirs = AutoencoderKLFlux2(
        block_out_channels=(8, 16, 16),
        decoder_block_out_channels=(8, 8, 16),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        **sizes,
    ).eval()
    theirs.save_pretrained(tmp_path)
    found = load_vae(Weights(path=str(tmp_path)), CPU, torch.float32)
    torch.testing.assert_close(
        encode_images(found, pixels), of_diffusers(theirs, pixels), **ROUNDING
    )
    ones = torch.ones(1, 6, 6, 8)
    assert torch.equal(found.decode(ones)[0], theirs.decode(ones)[0])


def test_a_job_keeps_no_decoder_of_a_vae(vae_folder: Path, pixels: torch.Tensor) -> None:
    place = Weights(path=str(vae_folder))
    loaded = load_vae(place, CPU, torch.float32, decoder=False)
    assert not [name for name in loaded.state_dict() if name.startswith("decoder.")]
    whole = load_vae(place, CPU, torch.float32)
    assert torch.equal(encode_images(loaded, pixels), encode_images(whole, pixels))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ["white", "noise"])
def test_latents_of_an_autoencoder_kl_are_exact_in_float32(name: str) -> None:
    """Pictures lie in memory as they should: else the error is many times as large."""
    vae, picture = narrow_vae(), pictures()[name]
    exact = copy.deepcopy(vae).double()
    for given in (picture, picture.flip(2)):  # sd-scripts' flipped latents come from a view
        assert error(encode_images(vae, given), encode_images(exact, given)) < 1e-5


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("config", ["none", "beside", "named folder", "named file"])
def test_a_vae_in_a_single_file_gives_the_same_latents(
    pixels: torch.Tensor, tmp_path: Path, form: str, config: str
) -> None:
    # 32 groups, which no shape tells, are every real VAE's and diffusers' default.
    whole = tiny_vae(block_out_channels=(32, 32, 64), norm_num_groups=32, layers_per_block=2)
    whole.save_pretrained(place := tmp_path / "folder")
    save_file(FORMS[form](whole.state_dict()), tmp_path / "vae.safetensors")
    if config == "beside":
        shutil.copy(place / "config.json", tmp_path)
    named = {"named folder": f"{place}", "named file": f"{place}/config.json"}.get(config)
    found = load_vae(Weights(path=f"{tmp_path}/vae.safetensors", config=named), CPU, torch.float32)
    folder = load_vae(Weights(path=str(place)), CPU, torch.float32)
    assert torch.equal(encode_images(found, pixels), encode_images(folder, pixels))
    assert config == "none" or found.config["scaling_factor"] == 0.3


def test_a_vae_without_quantising_convolutions_is_read_off_its_weights(
    pixels: torch.Tensor, tmp_path: Path
) -> None:
    whole = tiny_vae(
        block_out_channels=(32, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=32,
        latent_channels=16,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    save_file(whole_vae(whole.state_dict(), 2), tmp_path / "vae.safetensors")
    found = load_vae(Weights(path=f"{tmp_path}/vae.safetensors"), CPU, torch.float32)
    assert torch.equal(encode_images(found, pixels), encode_images(whole, pixels))


def test_samples_spread_as_the_posterior_says(vae: AutoencoderKL, pixels: torch.Tensor) -> None:
    image = pixels[:1].permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.no_grad():
        posterior = vae.encode(image).latent_dist
    drawn = torch.cat([encode_images(vae, pixels[:1], seeds=[seed]) for seed in range(64)])
    deviations = (drawn - posterior.mean) / posterior.std
    assert abs(deviations.mean()) < 0.05
    assert abs(deviations.std() - 1) < 0.05


def test_tiles_change_large_pictures_alone_and_little(vae: AutoencoderKL) -> None:
    tiled = tiny_vae()
    tile(tiled)
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(1, 3, 10, 9, generator=generator) * 255
    large = torch.nn.functional.interpolate(coarse, (TILE + 128, TILE + 64), mode="bicubic")
    pixels = large.clamp(0, 255).byte().permute(0, 2, 3, 1)
    whole, found = encode_images(vae, pixels), encode_images(tiled, pixels)
    assert found.shape == whole.shape and not torch.equal(found, whole)
    assert torch.cosine_similarity(found.flatten(), whole.flatten(), dim=0) > 0.9
    small = pixels[:, :TILE, :TILE]
    assert torch.equal(encode_images(tiled, small), encode_images(vae, small))


def tiny(kind: str, words: int) -> PreTrainedModel:
    torch.manual_seed(0)
    clip = {
        "vocab_size": words, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "projection_dim": 12, "max_position_embeddings": 77,
        "bos_token_id": words - 2, "eos_token_id": words - 1, "pad_token_id": words - 1,
    }  # fmt: skip
    t5 = {
        "vocab_size": words, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2,
        "pad_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    models: dict[str, Callable[[], PreTrainedModel]] = {
        "clip": lambda: CLIPTextModel(CLIPTextConfig(**clip)),
        "projection": lambda: CLIPTextModelWithProjection(CLIPTextConfig(**clip)),
        "t5": lambda: T5EncoderModel(T5Config(**t5)),
        "umt5": lambda: UMT5EncoderModel(UMT5Config(**t5)),
    }
    return models[kind]().eval()


KINDS = ("clip", "projection", "t5", "umt5")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of each kind of encoder, with its tokenizer, as `{kind}/text_encoder`."""
    root = tmp_path_factory.mktemp("text")
    for kind in KINDS:
        clip = kind in ("clip", "projection")
        tokenizer = clip_tokenizer(CAPTIONS) if clip else t5_tokenizer(CAPTIONS)
        tokenizer.save_pretrained(root / kind / "tokenizer")
        if clip:
            save_slow_files(tokenizer, root / kind / "tokenizer")
        tiny(kind, len(tokenizer)).save_pretrained(root / kind / "text_encoder")
    return root


def loaded(bundle: Path, kind: str, **settings: Any) -> TextEncoder:
    weights = TextWeights(path=str(bundle / kind / "text_encoder"), **settings)
    return load_text_encoder(weights, CPU, torch.float32)


@torch.no_grad()
def directly(bundle: Path, kind: str, caption: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Encode one caption with transformers alone."""
    classes = {
        "clip": CLIPTextModel, "projection": CLIPTextModelWithProjection,
        "t5": T5EncoderModel, "umt5": UMT5EncoderModel,
    }  # fmt: skip
    folder = bundle / kind
    model = classes[kind].from_pretrained(folder / "text_encoder").eval()
    if kind in ("clip", "projection"):
        tokens = clip_tokenizer(CAPTIONS)(
            [caption], padding="max_length", max_length=77, truncation=True, return_tensors="pt"
        )
        output = model(tokens.input_ids)
        pooled = output.text_embeds if kind == "projection" else output.pooler_output
        return output.last_hidden_state[0], pooled[0]
    tokens = t5_tokenizer(CAPTIONS)([caption], truncation=True, max_length=512, return_tensors="pt")
    return model(tokens.input_ids).last_hidden_state[0], None


@pytest.mark.parametrize("kind", KINDS)
def test_an_encoder_gives_what_transformers_gives(bundle: Path, kind: str) -> None:
    found = loaded(bundle, kind).encode(CAPTIONS)
    for caption, tensors in zip(CAPTIONS, found, strict=True):
        hidden, pooled = directly(bundle, kind, caption)
        torch.testing.assert_close(tensors["hidden_state"], hidden, **ROUNDING)
        assert ("pooled" in tensors) == (pooled is not None)
        if pooled is not None:
            torch.testing.assert_close(tensors["pooled"], pooled, **ROUNDING)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_text_encoder_is_that_of_transformers_without_drawing_or_copying_weights(
    bundle: Path, tmp_path: Path, kind: str, stored: torch.dtype
) -> None:
    made = tiny(kind, 60).to(stored)
    made.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    if kind in ("clip", "t5"):
        file.unlink()
        file = tmp_path / "pytorch_model.bin"
        torch.save(made.state_dict(), file)
    place = TextWeights(path=str(tmp_path), tokenizer=str(bundle / kind / "tokenizer"))
    loaded = undrawn(lambda: load_text_encoder(place, CPU, torch.float32).network)
    assert is_mapped(file) == (stored == torch.float32)
    theirs = type(made).from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.arange(20)[None] * 3
    with torch.inference_mode():
        found, expected = (each(input_ids=ids).last_hidden_state for each in (loaded, theirs))
    assert torch.equal(found, expected)
    names = [name for name, _ in loaded.named_parameters()]
    assert names == [name for name, _ in theirs.named_parameters()]  # tied weights are one


def test_captions_are_cut_to_the_length_asked_for_and_those_of_clip_padded_to_it(
    bundle: Path,
) -> None:
    for kind, own, length in (("clip", 77, 20), ("t5", 512, 2)):
        assert loaded(bundle, kind).max_length == own
        short = loaded(bundle, kind, max_length=20).encode(["a"])[0]["hidden_state"]
        assert short.shape == (length, 16)
    assert loaded(bundle, "clip", max_length=200).max_length == 77


def test_an_empty_caption_has_a_token_where_the_tokenizer_adds_none(bundle: Path) -> None:
    text_encoder = loaded(bundle, "t5")
    text_encoder.tokens.tokenizer.backend_tokenizer.post_processor = None
    (alone,) = text_encoder.encode([""])
    assert alone["hidden_state"].shape == (1, 16)
    beside, longer = text_encoder.encode(["", "a red circle"])
    torch.testing.assert_close(beside["hidden_state"], alone["hidden_state"], **ROUNDING)
    assert len(longer["hidden_state"]) > 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", ["beside", "named"])
def test_a_single_file_gives_the_same_embeddings(
    bundle: Path, tmp_path: Path, kind: str, config: str
) -> None:
    place = bundle / kind
    shutil.copy(place / "text_encoder" / "model.safetensors", tmp_path / "one.safetensors")
    settings = {"tokenizer": str(place / "tokenizer")}
    if config == "beside":
        shutil.copy(place / "text_encoder" / "config.json", tmp_path)
    else:
        settings["config"] = str(place / "text_encoder")
    weights = TextWeights(path=f"{tmp_path}/one.safetensors", **settings)
    found = load_text_encoder(weights, CPU, torch.float32).encode(CAPTIONS)
    for one, other in zip(found, loaded(bundle, kind).encode(CAPTIONS), strict=True):
        torch.testing.assert_close(one, other, **ROUNDING)


def test_other_networks_are_no_text_encoder(bundle: Path, vae_folder: Path, tmp_path: Path) -> None:
    bert = BertConfig(
        vocab_size=32, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
        intermediate_size=8,
    )  # fmt: skip
    BertModel(bert).save_pretrained(tmp_path / "bert")
    shutil.copy(bundle / "clip/text_encoder/model.safetensors", tmp_path / "one.safetensors")
    for path, words in {
        tmp_path / "bert": "bert",
        vae_folder: "",
        tmp_path / "missing": "",
        tmp_path / "one.safetensors": "does not say what network it holds",
    }.items():
        weights = TextWeights(path=str(path), tokenizer=str(bundle / "clip" / "tokenizer"))
        load = partial(load_text_encoder, weights, CPU, torch.float32)
        assert words in refused(load, kind=ModelError)


class _Command:
    """What a pickle does that runs a program when it is loaded."""

    def __init__(self, proof: Path) -> None:
        self._proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._proof}",)


@pytest.mark.parametrize("archive", [True, False], ids=["zip", "old"])
def test_a_pickle_in_place_of_weights_is_refused_in_one_line_and_never_runs(
    vae_folder: Path, tmp_path: Path, archive: bool
) -> None:
    folder, proof = tmp_path / "vae", tmp_path / "it ran"
    shutil.copytree(vae_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    file = folder / "diffusion_pytorch_model.bin"
    state = {"weight": torch.ones(1), "command": _Command(proof)}
    torch.save(state, file, _use_new_zipfile_serialization=archive)
    load = partial(load_vae, Weights(path=str(folder)), CPU, torch.float32)
    line = refused(load, kind=ModelError)
    assert line.startswith(f"{file}: holds more than tensors")
    assert "weights_only" not in line and line.endswith("take the weights as .safetensors")
    assert not proof.exists()
    file.write_text("version https://git-lfs.github.com/spec/v1")
    line = refused(load, kind=ModelError)
    assert line == f"{file}: is cut short or no PyTorch file; copy it again"


def loaded_of(kind: str, settings: dict[str, Any], said: list[str] | None = None) -> Any:
    model = Model.model_validate({"vae": "nowhere", "text": ["nowhere"], **settings})
    order = Order(kind, "cats", "tiny", Dataset(path="data"), model, {"format": 1}, ())
    say = silent if said is None else said.append
    return encoder(order, threads=1, say=say)


def encoder_of(kind: str, settings: dict[str, Any]) -> Any:
    return loaded_of(kind, settings)[:2]


def sample(content: np.ndarray | str, key: str = "0" * 64) -> Sample:
    return Sample(key, "s", inputs_of("a", "a.png", None), content, (48, 36))


def test_latents_are_unscaled_and_their_file_says_how_to_scale_them(
    vae: AutoencoderKL, vae_folder: Path, pixels: torch.Tensor
) -> None:
    encode, size = encoder_of("latents", {"vae": str(vae_folder)})
    assert size >= 1
    ((tensors, metadata),) = encode([sample(pixels[0].numpy())])
    assert set(tensors) == {"latents"}
    expected = of_diffusers(vae, pixels[:1])[0]
    torch.testing.assert_close(tensors["latents"], expected, rtol=1e-3, atol=1e-3)
    assert metadata == {
        "scaling_factor": "0.3",
        "shift_factor": "0.1",
        "original_width": "48",
        "original_height": "36",
        "pixel_width": "32",
        "pixel_height": "24",
    }


@pytest.mark.parametrize(
    ("settings", "stored"),
    [
        ({}, torch.float32),
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "bfloat16", "vae_dtype": "float16", "text_dtype": "float16"}, torch.float16),
    ],
)
def test_what_is_stored_has_the_format_asked_for(
    vae_folder: Path, bundle: Path, pixels: torch.Tensor, settings: dict[str, Any], stored: Any
) -> None:
    encode, _ = encoder_of("latents", {"vae": str(vae_folder), **settings})
    ((latents, _),) = encode([sample(pixels[0].numpy())])
    text = {"text": [str(bundle / "clip" / "text_encoder")]}
    encode, _ = encoder_of("text", {**text, **settings})
    ((embeddings, _),) = encode([sample("a red circle")])
    assert {tensor.dtype for tensor in [*latents.values(), *embeddings.values()]} == {stored}


def test_a_posteriors_sample_depends_on_key_and_seed_and_not_on_neighbours(
    vae_folder: Path, pixels: torch.Tensor
) -> None:
    def drawn(seed: int, keys: list[str]) -> list[torch.Tensor]:
        settings = {"vae": str(vae_folder), "posterior": "sample", "posterior_seed": seed}
        encode, _ = encoder_of("latents", settings)
        return [each["latents"] for each, _ in encode([sample(pixels[0].numpy(), k) for k in keys])]

    one, other = drawn(0, ["1" * 64, "f" * 64])
    assert not torch.allclose(one, other)
    torch.testing.assert_close(drawn(0, ["f" * 64])[0], other, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(drawn(1, ["f" * 64])[0], other)


def test_several_text_encoders_share_a_file_under_their_own_names(bundle: Path) -> None:
    folders = [str(bundle / kind / "text_encoder") for kind in ("clip", "projection", "t5")]
    encode, _ = encoder_of("text", {"text": folders})
    ((tensors, metadata),) = encode([sample("a red circle")])
    assert sorted(tensors) == [
        "text_encoder.hidden_state",
        "text_encoder.pooled",
        "text_encoder_2.hidden_state",
        "text_encoder_2.pooled",
        "text_encoder_3.hidden_state",
    ]
    assert metadata == {"caption": "a red circle"}


def test_captions_that_are_cut_off_are_named_in_one_line_an_encoder(bundle: Path) -> None:
    places = [str(bundle / kind / "text_encoder") for kind in ("clip", "t5")]
    ready = loaded_of("text", {"text": [places[0], {"path": places[1], "max_length": 81}]})
    for number, length in enumerate([10, 76, 80, 75, 90, 77]):
        ready.encode([sample("circle " * length, str(number) * 64)] * 2)
    assert ready.remarks() == [
        "4 captions are cut to the first 75 tokens by text_encoder: a.png, a.png, a.png ...",
        "1 caption is cut to the first 80 tokens by text_encoder_2: a.png",
    ]
    assert ready.remarks() == []  # of the next order


def test_a_clip_in_a_single_file_is_read_with_or_without_the_prefix_of_its_names(
    bundle: Path, tmp_path: Path
) -> None:
    state = load_file(bundle / "clip/text_encoder/model.safetensors")
    bare = {name.removeprefix("text_model."): value for name, value in state.items()}
    settings = {"config": f"{bundle}/clip/text_encoder", "tokenizer": f"{bundle}/clip/tokenizer"}
    (expected,) = loaded(bundle, "clip").encode(["a red circle"])
    for prefix in ("", "text_model."):
        path = tmp_path / f"{prefix}one.safetensors"
        save_file({prefix + name: value for name, value in bare.items()}, path)
        weights = TextWeights(path=str(path), **settings)
        (found,) = load_text_encoder(weights, CPU, torch.float32).encode(["a red circle"])
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_a_cpu_computes_in_float32_and_says_so(name: str) -> None:
    said: list[str] = []
    assert compute_dtype(CPU, name, said.append) == torch.float32
    assert said == [f"cpu computes in float32; the caches are stored as {name}"]


def test_a_vae_that_overflows_in_half_precision_stays_in_single(tmp_path: Path) -> None:
    folder = tmp_path / "sd" / "vae"
    hub = Weights(hub=str(folder.parent), revision="1" * 40, subfolder="vae")
    # Configurations of Stable Diffusion 1.5 and 2.1 do not have the key.
    for asks, dtype in ((True, torch.float32), (False, torch.float16), (None, torch.float16)):
        tiny_vae(force_upcast=asks).save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        if asks is None:
            del config["force_upcast"]
        (folder / "config.json").write_text(json.dumps(config))
        for weights in (Weights(path=str(folder)), hub):
            assert load_vae(weights, CPU, torch.float16).dtype == dtype
    # Of a file without a configuration nothing is known: it may be SDXL's.
    alone = tmp_path / "alone.safetensors"
    whole = tiny_vae(block_out_channels=(32, 32, 64), norm_num_groups=32)
    save_file(whole.state_dict(), alone)
    assert load_vae(Weights(path=str(alone)), CPU, torch.float16).dtype == torch.float32


@pytest.mark.parametrize("kind", ["t5", "umt5"])
def test_layers_of_t5_that_overflow_in_half_precision_stay_in_single(
    bundle: Path, kind: str, tmp_path: Path
) -> None:
    folder = tmp_path / kind
    shutil.copytree(bundle / kind, folder)
    file = folder / "text_encoder/model.safetensors"
    state = load_file(file)
    for name in state:
        if name.endswith(".wo.weight"):
            state[name] *= 1e6  # their results are beyond the largest number of float16
    save_file(state, file, metadata={"format": "pt"})
    weights = TextWeights(path=str(folder / "text_encoder"))
    network = load_text_encoder(weights, CPU, torch.float16).network
    for name, weight in network.named_parameters():
        exact = name.endswith(".wo.weight")
        assert weight.dtype == (torch.float32 if exact else torch.float16)
        assert not exact or torch.equal(weight, state[name])
    classes = {"t5": T5EncoderModel, "umt5": UMT5EncoderModel}
    theirs = classes[kind].from_pretrained(folder / "text_encoder", dtype=torch.float16).eval()
    tokens = t5_tokenizer(CAPTIONS)(CAPTIONS[1], return_tensors="pt").input_ids
    half = load_text_encoder(weights, CPU, torch.float16).encode(CAPTIONS[1:2])[0]["hidden_state"]
    single = load_text_encoder(weights, CPU, torch.float32).encode(CAPTIONS[1:2])[0]["hidden_state"]
    with torch.no_grad():
        torch.testing.assert_close(half.float(), theirs(tokens).last_hidden_state[0].float())
    assert (half.float() - single).abs().max() < 4e-3 * single.abs().max()
