"""The files of a model are found where they lie, or what is missing is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from latentmake.base.errors import ModelError
from latentmake.config.weights import TextWeights, Weights
from latentmake.models import cache_recipe, files
from test_cache_recipe import network, put


def names(place: Path, **more: str) -> list[str]:
    return [path.name for path in files.weights_files(Weights(path=str(place), **more))]


def refusal(place: Path, **more: str) -> str:
    with pytest.raises(ModelError) as caught:
        files.weights_files(Weights(path=str(place), **more))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        (["model.safetensors", "model.bin"], ["model.safetensors"]),
        (["pytorch_model.safetensors"], ["pytorch_model.safetensors"]),
        # safetensors come before bin, whatever the stem
        (
            ["diffusion_pytorch_model.bin", "pytorch_model.safetensors"],
            ["pytorch_model.safetensors"],
        ),
        (["diffusion_pytorch_model.bin"], ["diffusion_pytorch_model.bin"]),
    ],
)
def test_a_folder_of_one_file(tmp_path: Path, there: list[str], expected: list[str]) -> None:
    for name in ("config.json", *there):
        (tmp_path / name).write_text("{}")
    assert names(tmp_path) == ["config.json", *expected]


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_a_folder_of_shards_in_order_and_each_once(tmp_path: Path, ending: str) -> None:
    index = {"weight_map": {"a": f"s2.{ending}", "b": f"s1.{ending}", "c": f"s2.{ending}"}}
    put(tmp_path, config__json="{}", **{f"s1__{ending}": "1", f"s2__{ending}": "2"})
    (tmp_path / f"model.{ending}.index.json").write_text(json.dumps(index))
    expected = ["config.json", f"model.{ending}.index.json", f"s1.{ending}", f"s2.{ending}"]
    assert names(tmp_path) == expected


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
@pytest.mark.parametrize("variant", ["fp16", "non_ema"])
def test_a_variant_counts_where_nothing_else_is_there(
    tmp_path: Path, variant: str, ending: str
) -> None:
    one, two = (f"model.{variant}-0000{number}-of-00002.{ending}" for number in (1, 2))
    index = f"model.{ending}.index.{variant}.json"
    for name in ("config.json", one, two):
        (tmp_path / name).write_text("{}")
    (tmp_path / index).write_text(json.dumps({"weight_map": {"a": one, "b": two}}))
    assert names(tmp_path) == ["config.json", index, one, two]
    assert files.only_variant(tmp_path) == variant
    (tmp_path / f"model.zzz.{ending}").write_text("")  # a less usual one
    (tmp_path / f"model.{variant}.{ending}").write_text("")
    assert names(tmp_path) == ["config.json", f"model.{variant}.{ending}"]
    (tmp_path / "pytorch_model.bin").write_text("")
    assert names(tmp_path) == ["config.json", "pytorch_model.bin"]
    assert files.only_variant(tmp_path) == ""


def test_weights_whose_name_loses_its_variant_keep_their_digest(tmp_path: Path) -> None:
    put(tmp_path, config__json="{}", model__fp16__safetensors="w")
    before = cache_recipe.weights_digest(Weights(path=str(tmp_path)))
    (tmp_path / "model.fp16.safetensors").rename(tmp_path / "model.safetensors")
    assert cache_recipe.weights_digest(Weights(path=str(tmp_path))) == before


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


@pytest.mark.parametrize("config", ["[]", '{"a": '], ids=["list", "cut"])
def test_a_damaged_configuration_is_named(tmp_path: Path, config: str) -> None:
    place = Weights(path=str(network(tmp_path, config=config)))
    with pytest.raises(ModelError, match=r"config\.json: .*cannot be read"):
        files.network_config(place)


@pytest.mark.parametrize(
    ("encoder", "there", "more"),
    [
        ("text_encoder", "tokenizer/tokenizer_config.json", {}),
        ("text_encoder_2", "tokenizer_2/tokenizer_config.json", {}),
        ("text_encoder", "text_encoder/tokenizer.json", {}),
        ("clip", "clip/tokenizer.json", {}),
        ("text_encoder/model.safetensors", "tokenizer/vocab.json", {}),
        ("text_encoder", "named/tokenizer.json", {"tokenizer": "named"}),
    ],
)
def test_a_tokenizer_lies_in_its_encoder_or_beside_it_or_where_it_is_named(
    working: Path, encoder: str, there: str, more: dict[str, Any]
) -> None:
    network(Path(encoder.removesuffix("/model.safetensors")))
    folder, _, name = there.partition("/")
    put(Path(folder), **{name.replace(".", "__"): "{}"})
    if more:
        put(Path("tokenizer"), tokenizer__json="{}")
    assert files.tokenizer_files(TextWeights(path=encoder, **more)) == [Path(there)]


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    network(tmp_path / "text_encoder")
    place = TextWeights(path=str(tmp_path / "text_encoder"))
    with pytest.raises(ModelError, match=r"/tokenizer: there is no tokenizer here; name its"):
        files.tokenizer_files(place)


@pytest.mark.parametrize(("blocks", "factor"), [(1, 1), (2, 2), (3, 4), (4, 8)])
def test_the_factor_is_what_the_blocks_make_it(tmp_path: Path, blocks: int, factor: int) -> None:
    network(tmp_path, config=json.dumps({"block_out_channels": [8] * blocks}))
    assert files.vae_factor(Weights(path=str(tmp_path))) == factor


def test_where_no_configuration_says_the_factor_is_unknown(tmp_path: Path) -> None:
    put(tmp_path, vae__safetensors="w")
    assert files.vae_factor(Weights(path=str(tmp_path / "vae.safetensors"))) is None
    assert files.vae_factor(Weights(hub="someone/vae", revision="a" * 40)) is None


def test_a_path_that_looks_like_a_hub_id_is_told_how_one_is_written(working: Path) -> None:
    line = refusal(Path("stabilityai/sd-vae-ft-mse"))
    assert "{hub: stabilityai/sd-vae-ft-mse, revision: ...}" in line and "40 hex" in line
    name = "sd-vae-ft-mse"
    assert f"run `hf download stabilityai/{name} --local-dir models/{name}`" in line
    assert "run `hf download OWNER/vae --local-dir models/vae`" in refusal(Path("vae"))
    (working / "models").mkdir()
    for place in ("models/vae", f"{working}/models/none", "a/b/c", "vae.safetensors"):
        assert "hub" not in refusal(Path(place))
