"""A recipe holds content, never places: what shapes bytes changes it, and nothing else does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from latentmake.base.errors import ModelError
from latentmake.config.datasets import Dataset
from latentmake.config.models import Model
from latentmake.config.weights import Weights
from latentmake.models import cache_recipe


def put(root: Path, **files: str) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (root / name.replace("__", ".")).write_text(content)
    return root


def network(root: Path, weights: str = "weights", config: str = "{}") -> Path:
    return put(root, config__json=config, model__safetensors=weights)


def digest(root: Path, *content: str) -> str:
    return cache_recipe.weights_digest(Weights(path=str(network(root, *content))))


def test_the_content_of_weights_and_configuration_counts_and_nothing_else(tmp_path: Path) -> None:
    before = digest(tmp_path / "here")
    put(tmp_path / "there", README__md="new", flax_model__msgpack="new", model__bin="new")
    assert digest(tmp_path / "there") == before
    others = {digest(tmp_path / "2", "weights!"), digest(tmp_path / "3", "weights", "{ }")}
    assert len(others | {before}) == 3


def test_a_hub_id_is_known_by_its_revision_without_a_file() -> None:
    first = Weights(hub="someone/vae", revision="a" * 40)
    assert cache_recipe.weights_digest(first) == cache_recipe.weights_digest(first.model_copy())
    others = [
        Weights(hub="someone/vae", revision="b" * 40),
        Weights(hub="someone/other", revision="a" * 40),
        Weights(hub="someone/vae", revision="a" * 40, subfolder="vae"),
    ]
    assert len({cache_recipe.weights_digest(each) for each in [first, *others]}) == 4


def test_files_are_digested_as_the_caller_says_and_one_that_cannot_be_read_is_named(
    tmp_path: Path,
) -> None:
    place, asked = Weights(path=str(network(tmp_path))), list[str]()

    def fails(path: Path) -> str:
        raise OSError(5, "Input/output error", str(path))

    cache_recipe.weights_digest(place, lambda path: asked.append(path.name) or path.name)
    assert asked == ["config.json", "model.safetensors"]

    with pytest.raises(ModelError, match=r"config\.json: cannot be read \(Input/output error\)"):
        cache_recipe.weights_digest(place, fails)


MODEL: dict[str, Any] = {"vae": "vae", "text": ["one", "two"]}


def latents(model: dict[str, Any] | None = None, **dataset: Any) -> dict[str, object]:
    settings = Dataset(path="anywhere", **dataset)
    return cache_recipe.latents_recipe(settings, Model(**{**MODEL, **(model or {})}), "weights")


def text(**model: Any) -> dict[str, object]:
    settings = Model(**{**MODEL, **model})
    return cache_recipe.text_recipe(settings, [("w", "t")] * len(settings.text))


def differ(*recipes: dict[str, object]) -> bool:
    return all(one != other for n, one in enumerate(recipes) for other in recipes[:n])


def test_what_shapes_latents_or_embeddings_is_in_their_recipe() -> None:
    assert differ(
        latents(),
        latents(exif_rotation=False),
        latents(background="black"),
        latents({"dtype": "float16"}),
        latents({"vae_dtype": "bfloat16"}),
        latents({"posterior": "sample"}),
        latents({"posterior": "sample", "posterior_seed": 1}),
        cache_recipe.latents_recipe(Dataset(path="x"), Model(**MODEL), "other"),
    )
    assert text(dtype="float16") == text(text_dtype="float16") != text()
    assert differ(text(), text(text=["one"]), text(text=[{"path": "o", "max_length": 20}, "two"]))
    pairs = [("w", "t"), ("w", "t")], [("b", "t"), ("w", "t")], [("w", "u"), ("w", "t")]
    assert differ(*(cache_recipe.text_recipe(Model(**MODEL), each) for each in pairs))


@pytest.mark.parametrize(
    "change",
    [
        {"num_repeats": 5},
        {"fit": "bucket", "bucket_reso_steps": 32, "bucket_no_upscale": True},  # is in the key
        {"max_image_pixels": 10**9},
        {"caption_extension": ".caption"},
        {"missing_caption": "empty"},
        {"empty_caption": "allow"},
        {"on_error": "skip"},
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


@pytest.mark.parametrize(
    "change",
    [
        {"vae_dtype": "float16"},
        {"vae": "other", "posterior": "sample", "unet": "unet"},
        {"text": ["moved/one", "moved/two"]},
    ],
    ids=str,
)
def test_what_does_not_shape_embeddings_is_not_in_their_recipe(change: dict[str, Any]) -> None:
    assert text(**change) == text()


def test_both_recipes_name_the_format() -> None:
    assert latents()["format"] == cache_recipe.FORMAT_VERSIONS["plain"]
    assert text()["format"] == cache_recipe.FORMAT_VERSIONS["text"]


def test_without_an_architecture_the_recipe_of_text_is_what_it_has_always_been() -> None:
    assert text(text=[{"path": "one", "max_length": 20}], dtype="float16") == {
        "format": 1,
        "kind": "text",
        "layout": "plain",
        "dtype": "float16",
        "encoders": [{"weights": "w", "tokenizer": "t", "max_length": 20}],
    }


TEXTS = {"sd1": ["one"], "sd2": ["one"], "sdxl": ["one"] * 2, "sd3": ["one"] * 3}


@pytest.mark.parametrize(
    ("architecture", "change"),
    [
        ("sd1", {"clip_skip": 1}),
        ("sd2", {"clip_skip": 2}),
        ("sd1", {"max_token_length": 150}),
        ("sdxl", {"max_token_length": "auto"}),
        ("sdxl", {"layout": "sdscripts"}),
        ("sd3", {"apply_lg_attn_mask": True}),
        ("sd3", {"layout": "sdscripts"}),
        ("sd3", {"layout": "sdscripts", "apply_t5_attn_mask": True}),
    ],
    ids=str,
)
def test_what_an_architecture_makes_of_text_is_in_its_recipe(
    architecture: str, change: dict[str, Any]
) -> None:
    values = {"text": TEXTS[architecture], "architecture": architecture}
    found = [text(text=values["text"]), text(**values), text(**values, **change)]
    if len(change) > 1:
        found.append(text(**values, layout="sdscripts"))
    assert differ(*found)


def test_a_mask_of_padding_that_there_is_not_changes_no_recipe() -> None:
    values = {"text": TEXTS["sd3"], "architecture": "sd3"}
    assert text(**values, apply_t5_attn_mask=True) == text(**values)


def wan(tmp_path: Path, **text: Any) -> Model:
    put(tmp_path / "umt5", weights__pth="weights")
    place = {"path": f"{tmp_path}/umt5/weights.pth", **text}
    return Model.model_validate({"vae": "vae", "text": [place], "task": "t2v-1.3B"})


def test_a_missing_tokenizer_of_umt5_is_said_where_to_come_from(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no tokenizer here") as caught:
        cache_recipe.make("text", None, wan(tmp_path))
    line = str(caught.value)
    for part in ("google/umt5-xxl on the hub", "spiece.model", "Wan-AI/Wan2.1-T2V-14B", "hub:"):
        assert part in line
    assert "\n" not in line


def test_a_tokenizer_on_the_hub_counts_by_its_commit_and_none_is_looked_for_here(
    tmp_path: Path,
) -> None:
    place = {"hub": "Wan-AI/Wan2.1-T2V-14B", "subfolder": "google/umt5-xxl"}

    def made(**tokenizer: Any) -> dict[str, object]:
        return cache_recipe.make("text", None, wan(tmp_path, tokenizer=tokenizer))

    first = made(**place, revision="a" * 40)
    assert made(**place, revision="a" * 40) == first
    assert made(**place, revision="b" * 40) != first
    assert made(**{**place, "subfolder": "other"}, revision="a" * 40) != first
    with pytest.raises(ValueError, match="`hub` model needs a commit"):
        made(**place, revision="main")


@pytest.mark.parametrize("layout", ["plain", "sdscripts"])
def test_a_recipe_is_made_for_each_layout_of_images(tmp_path: Path, layout: str) -> None:
    network(tmp_path / "vae")
    for name in ("text_encoder", "text_encoder_2"):
        network(tmp_path / name)
        put(tmp_path / name, tokenizer__json="{}")
    texts = [f"{tmp_path}/text_encoder", f"{tmp_path}/text_encoder_2"]
    values = {"vae": f"{tmp_path}/vae", "text": texts, "architecture": "sdxl", "layout": layout}
    model = Model.model_validate(values)
    assert cache_recipe.make("text", None, model)["layout"] == layout
    assert cache_recipe.make("latents", Dataset(path="x"), model)["kind"] == "latents"
