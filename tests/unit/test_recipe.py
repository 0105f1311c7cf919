"""A recipe holds content, never places: what shapes bytes changes it, and nothing else does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from latentmake import recipe
from latentmake.config import Dataset, Model, TextWeights, Weights
from latentmake.errors import ModelError


def put(root: Path, **files: str) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (root / name.replace("__", ".")).write_text(content)
    return root


def network(root: Path, weights: str = "weights", config: str = "{}") -> Path:
    return put(root, config__json=config, model__safetensors=weights)


def names(place: Path, **more: str) -> list[str]:
    return [path.name for path in recipe.weights_files(Weights(path=str(place), **more))]


def refusal(place: Path, **more: str) -> str:
    with pytest.raises(ModelError) as caught:
        recipe.weights_files(Weights(path=str(place), **more))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- which files hold a network -------------------------------------------------------------------


@pytest.mark.parametrize("stem", ["diffusion_pytorch_model", "model", "pytorch_model"])
def test_a_folder_of_one_file(tmp_path: Path, stem: str) -> None:
    put(tmp_path, config__json="{}", **{f"{stem}__safetensors": "w", f"{stem}__bin": "w"})
    assert names(tmp_path) == ["config.json", f"{stem}.safetensors"]


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_a_folder_of_shards_in_order_and_each_once(tmp_path: Path, ending: str) -> None:
    index = {"weight_map": {"a": f"s2.{ending}", "b": f"s1.{ending}", "c": f"s2.{ending}"}}
    put(tmp_path, config__json="{}", **{f"s1__{ending}": "1", f"s2__{ending}": "2"})
    (tmp_path / f"model.{ending}.index.json").write_text(json.dumps(index))
    expected = ["config.json", f"model.{ending}.index.json", f"s1.{ending}", f"s2.{ending}"]
    assert names(tmp_path) == expected


def test_safetensors_come_before_bin_whatever_the_stem(tmp_path: Path) -> None:
    put(
        tmp_path, config__json="{}", diffusion_pytorch_model__bin="b", pytorch_model__safetensors=""
    )
    assert names(tmp_path) == ["config.json", "pytorch_model.safetensors"]


def test_bin_alone_is_read(tmp_path: Path) -> None:
    put(tmp_path, config__json="{}", diffusion_pytorch_model__bin="b")
    assert names(tmp_path) == ["config.json", "diffusion_pytorch_model.bin"]


def test_a_single_file_with_its_configuration_beside_named_or_absent(tmp_path: Path) -> None:
    put(tmp_path, vae__safetensors="w")
    assert names(tmp_path / "vae.safetensors") == ["vae.safetensors"]
    put(tmp_path / "there", config__json="{}")
    put(tmp_path / "there", other__json="{}")
    vae = tmp_path / "vae.safetensors"
    assert names(vae, config=f"{tmp_path}/there") == ["config.json", "vae.safetensors"]
    assert names(vae, config=f"{tmp_path}/there/other.json") == ["other.json", "vae.safetensors"]
    put(tmp_path, config__json="{}")
    assert names(vae) == ["config.json", "vae.safetensors"]


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    assert f"{tmp_path}/no: this model does not exist; correct" in refusal(tmp_path / "no")
    put(tmp_path / "bare")
    assert "has no config.json" in refusal(tmp_path / "bare")
    put(tmp_path / "bare", config__json="{}")
    assert "holds no weights" in refusal(tmp_path / "bare")
    index = json.dumps({"weight_map": {"a": "s1.safetensors"}})
    put(tmp_path / "bare", model__safetensors__index__json=index)
    assert f"{tmp_path}/bare/s1.safetensors: these weights are missing" in refusal(
        tmp_path / "bare"
    )
    put(tmp_path, model__ckpt="x", vae__safetensors="x")
    assert "is not a .safetensors file" in refusal(tmp_path / "model.ckpt")
    assert "does not exist" in refusal(tmp_path / "vae.safetensors", config=f"{tmp_path}/nowhere")


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": 5}', '{"weight_map": []}'])
def test_a_damaged_index_is_named(tmp_path: Path, index: str) -> None:
    put(tmp_path, config__json="{}", model__safetensors__index__json=index)
    assert "is not an index of weights" in refusal(tmp_path)


def test_shards_are_looked_for_in_their_own_folder_alone(tmp_path: Path) -> None:
    put(tmp_path, secret__safetensors="outside")
    index = json.dumps({"weight_map": {"a": "../secret.safetensors"}})
    put(tmp_path / "model", config__json="{}", model__safetensors__index__json=index)
    assert f"{tmp_path}/model/secret.safetensors: these" in refusal(tmp_path / "model")


# -- digests --------------------------------------------------------------------------------------


def test_a_moved_network_keeps_its_digest(tmp_path: Path) -> None:
    here = Weights(path=str(network(tmp_path / "here")))
    there = Weights(path=str(network(tmp_path / "there")))
    assert recipe.weights_digest(here) == recipe.weights_digest(there)


def test_a_changed_byte_of_any_file_changes_the_digest(tmp_path: Path) -> None:
    digests = {
        recipe.weights_digest(Weights(path=str(network(tmp_path / name, weights, config))))
        for name, weights, config in [
            ("1", "weights", "{}"),
            ("2", "weights!", "{}"),
            ("3", "weights", "{ }"),
        ]
    }
    assert len(digests) == 3


def test_files_beside_the_weights_do_not_count(tmp_path: Path) -> None:
    weights = Weights(path=str(network(tmp_path)))
    before = recipe.weights_digest(weights)
    put(tmp_path, README__md="new", flax_model__msgpack="new", model__bin="new")
    assert recipe.weights_digest(weights) == before


def test_a_hub_id_is_known_by_its_revision_without_a_file() -> None:
    first = Weights(hub="someone/vae", revision="abc")
    assert recipe.weights_digest(first) == recipe.weights_digest(first.model_copy())
    others = [
        Weights(hub="someone/vae", revision="abd"),
        Weights(hub="someone/other", revision="abc"),
        Weights(hub="someone/vae", revision="abc", subfolder="vae"),
    ]
    assert len({recipe.weights_digest(each) for each in [first, *others]}) == 4


def test_the_files_are_digested_as_the_caller_says(tmp_path: Path) -> None:
    asked: list[str] = []

    def digest_of(path: Path) -> str:
        asked.append(path.name)
        return path.name

    recipe.weights_digest(Weights(path=str(network(tmp_path))), digest_of)
    assert asked == ["config.json", "model.safetensors"]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    network(tmp_path)

    def fails(path: Path) -> str:
        raise OSError(5, "Input/output error", str(path))

    with pytest.raises(ModelError, match=r"config\.json: cannot be read \(Input/output error\)"):
        recipe.weights_digest(Weights(path=str(tmp_path)), fails)


# -- tokenizers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("encoder", "tokenizer"),
    [
        ("text_encoder", "tokenizer"),
        ("text_encoder_2", "tokenizer_2"),
        ("text_encoder_3", "tokenizer_3"),
    ],
)
def test_the_tokenizer_of_a_pipeline_lies_beside_its_encoder(
    tmp_path: Path, encoder: str, tokenizer: str
) -> None:
    network(tmp_path / encoder)
    put(tmp_path / tokenizer, tokenizer_config__json="{}")
    weights = TextWeights(path=str(tmp_path / encoder))
    assert recipe.tokenizer_folder(weights) == tmp_path / tokenizer
    assert [path.name for path in recipe.tokenizer_files(weights)] == ["tokenizer_config.json"]


def test_an_encoder_that_holds_its_tokenizer_uses_it(tmp_path: Path) -> None:
    for name in ("text_encoder", "clip"):
        network(tmp_path / name)
        put(tmp_path / name, tokenizer__json="{}")
        weights = TextWeights(path=str(tmp_path / name))
        assert recipe.tokenizer_folder(weights) == tmp_path / name


def test_a_single_file_finds_the_tokenizer_of_its_folder(tmp_path: Path) -> None:
    put(tmp_path / "text_encoder", model__safetensors="w")
    put(tmp_path / "tokenizer", vocab__json="{}")
    weights = TextWeights(path=str(tmp_path / "text_encoder" / "model.safetensors"))
    assert recipe.tokenizer_folder(weights) == tmp_path / "tokenizer"


def test_a_named_tokenizer_wins(tmp_path: Path) -> None:
    network(tmp_path / "text_encoder")
    put(tmp_path / "tokenizer", tokenizer__json="{}")
    put(tmp_path / "named", tokenizer__json="{}")
    weights = TextWeights(path=str(tmp_path / "text_encoder"), tokenizer=str(tmp_path / "named"))
    assert recipe.tokenizer_folder(weights) == tmp_path / "named"


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    network(tmp_path / "text_encoder")
    weights = TextWeights(path=str(tmp_path / "text_encoder"))
    with pytest.raises(ModelError, match=r"/tokenizer: there is no tokenizer here; name its"):
        recipe.tokenizer_files(weights)


# -- the VAE's factor -----------------------------------------------------------------------------


@pytest.mark.parametrize(("blocks", "factor"), [(1, 1), (2, 2), (3, 4), (4, 8)])
def test_the_factor_is_what_the_blocks_make_it(tmp_path: Path, blocks: int, factor: int) -> None:
    network(tmp_path, config=json.dumps({"block_out_channels": [8] * blocks}))
    assert recipe.vae_factor(Weights(path=str(tmp_path))) == factor


def test_where_no_configuration_says_the_factor_is_unknown(tmp_path: Path) -> None:
    put(tmp_path, vae__safetensors="w")
    assert recipe.vae_factor(Weights(path=str(tmp_path / "vae.safetensors"))) is None
    assert recipe.vae_factor(Weights(hub="someone/vae", revision="abc")) is None


@pytest.mark.parametrize("config", ["", "{}", "[]", '{"block_out_channels": 5}'])
def test_the_configuration_of_something_else_is_refused(tmp_path: Path, config: str) -> None:
    network(tmp_path, config=config)
    with pytest.raises(ModelError, match="is not the configuration of an AutoencoderKL"):
        recipe.vae_factor(Weights(path=str(tmp_path)))


# -- recipes --------------------------------------------------------------------------------------

MODEL: dict[str, Any] = {"vae": "vae", "text": ["one", "two"]}


def latents(model: dict[str, Any] | None = None, **dataset: Any) -> dict[str, object]:
    settings = Dataset(path="anywhere", **dataset)
    return recipe.latents_recipe(settings, Model(**{**MODEL, **(model or {})}), "weights")


def text(**model: Any) -> dict[str, object]:
    settings = Model(**{**MODEL, **model})
    return recipe.text_recipe(settings, [("w", "t")] * len(settings.text))


@pytest.mark.parametrize(
    "change",
    [
        {"fit": "bucket"},
        {"fit": "bucket", "bucket_reso_steps": 32},
        {"fit": "bucket", "bucket_no_upscale": True},
        {"exif_rotation": False},
        {"background": "black"},
        {"model": {"dtype": "float16"}},
        {"model": {"vae_dtype": "bfloat16"}},
        {"model": {"posterior": "sample"}},
        {"model": {"posterior": "sample", "posterior_seed": 1}},
    ],
    ids=str,
)
def test_what_shapes_latents_is_in_their_recipe(change: dict[str, Any]) -> None:
    assert latents(**change) != latents()


def test_each_change_of_latents_has_a_recipe_of_its_own() -> None:
    found = [
        latents(fit="bucket"),
        latents(fit="bucket", bucket_reso_steps=32),
        latents(fit="bucket", bucket_no_upscale=True),
        latents({"posterior": "sample"}),
        latents({"posterior": "sample", "posterior_seed": 1}),
    ]
    assert all(one != other for n, one in enumerate(found) for other in found[:n])


@pytest.mark.parametrize(
    "change",
    [
        {"num_repeats": 5},
        {"max_image_pixels": 10**9},
        {"caption_extension": ".caption"},
        {"missing_caption": "empty"},
        {"empty_caption": "allow"},
        {"on_error": "skip"},
        {"bucket_reso_steps": 64},
        {"bucket_no_upscale": True},
        {"model": {"text_dtype": "float16"}},
        {"model": {"text": ["other"]}},
        {"model": {"unet": "unet", "scheduler": "scheduler"}},
        {"model": {"posterior_seed": 7}},
        {"model": {"vae": "moved/vae"}},
        {"model": {"dtype": "float16", "vae_dtype": "float32"}},
    ],
    ids=str,
)
def test_what_does_not_shape_latents_is_not_in_their_recipe(change: dict[str, Any]) -> None:
    assert latents(**change) == latents()


def test_the_weights_are_in_both_recipes() -> None:
    model = Model(**MODEL)
    dataset = Dataset(path="x")
    assert recipe.latents_recipe(dataset, model, "a") != recipe.latents_recipe(dataset, model, "b")
    assert recipe.text_recipe(model, [("a", "t"), ("b", "t")]) != recipe.text_recipe(
        model, [("b", "t"), ("a", "t")]
    )
    assert recipe.text_recipe(model, [("a", "t"), ("b", "t")]) != recipe.text_recipe(
        model, [("a", "u"), ("b", "t")]
    )


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float16"},
        {"text_dtype": "float16"},
        {"text": ["one"]},
        {"text": [{"path": "one", "max_length": 20}, "two"]},
    ],
    ids=str,
)
def test_what_shapes_embeddings_is_in_their_recipe(change: dict[str, Any]) -> None:
    assert text(**change) != text()


@pytest.mark.parametrize(
    "change",
    [
        {"vae_dtype": "float16"},
        {"vae": "other"},
        {"posterior": "sample"},
        {"unet": "unet"},
        {"text": ["moved/one", "moved/two"]},
    ],
    ids=str,
)
def test_what_does_not_shape_embeddings_is_not_in_their_recipe(change: dict[str, Any]) -> None:
    assert text(**change) == text()


def test_both_recipes_name_the_format() -> None:
    assert latents()["format"] == text()["format"] == recipe.FORMAT_VERSION
