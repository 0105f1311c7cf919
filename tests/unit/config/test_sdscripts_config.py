"""What sd-scripts would refuse or round in silence, the configuration refuses in one line."""

from __future__ import annotations

from typing import Any

import pytest
from latentmake.base.errors import ConfigError
from latentmake.config.root import Config, parse

BUCKETS = {"fit": "bucket", "min_bucket_reso": 64}


def values(architecture: str = "sdxl", resolutions: Any = 512, **dataset: Any) -> dict[str, Any]:
    texts = {"sdxl": 2, "sd3": 3, "flux": 2}.get(architecture, 1)
    return {
        "datasets": {"cats": {"path": "data", **dataset}},
        "models": {
            "big": {
                "vae": "vae",
                "text": [f"text_{number}" for number in range(texts)],
                "architecture": architecture,
                "layout": "sdscripts",
            }
        },
        "runs": {"first": {"datasets": "cats", "model": "big", "resolutions": resolutions}},
    }


def line(asked: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(asked)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("architecture", ["sd1", "sd2", "sdxl", "sd3", "flux"])
def test_every_architecture_is_accepted_with_and_without_buckets(architecture: str) -> None:
    assert isinstance(parse(values(architecture, [512, [768, 1024]])), Config)
    assert isinstance(parse(values(architecture, [64, 512], **BUCKETS)), Config)


@pytest.mark.parametrize(
    ("architecture", "resolutions", "dataset", "begins", "hint"),
    [
        ("sdxl", 500, {}, "runs.first.resolutions: 500 pixels", "use 496 or 504"),
        ("flux", 520, {}, "runs.first.resolutions: 520 pixels", "use 512 or 528"),
        ("sdxl", 128, {"fit": "bucket"}, "datasets.cats.min_bucket_reso: 256", "128 or less"),
        (
            "sdxl",
            [[512, 1536]],
            {"fit": "bucket"},
            "datasets.cats.max_bucket_reso: 1024",
            "1536 or more",
        ),
        (
            "sd1",
            512,
            {"fit": "bucket", "bucket_reso_steps": 32},
            "datasets.cats.bucket_reso_steps: 32 is not a multiple of 64",
            "use a multiple of 64",
        ),
        ("sdxl", 512, {"path": "s3://bucket/cats"}, "runs.first.datasets: ", "copy it"),
        ("sdxl", 512, {"target_frames": 5}, "datasets.cats.target_frames: ", "leave it out"),
        ("sdxl", 512, {"control_directory": "x"}, "datasets.cats.control_directory: ", "leave it"),
    ],
)
def test_what_sd_scripts_refuses_is_refused_with_a_mend(
    architecture: str, resolutions: Any, dataset: dict[str, Any], begins: str, hint: str
) -> None:
    said = line(values(architecture, resolutions, **dataset))
    assert said.startswith(begins) and hint in said.partition("; ")[2]


def test_the_script_of_flux_asks_for_larger_bucket_steps_than_its_network() -> None:
    asked = values("flux", fit="bucket", bucket_reso_steps=32)
    parse(asked)
    asked["models"]["big"]["checkpoint"] = "flux.safetensors"
    asked["runs"]["first"]["trainer"] = {"kind": "sdscripts"}
    asked["sd_scripts"] = {"path": "sd-scripts"}
    said = line(asked)
    assert said.startswith("datasets.cats.bucket_reso_steps: 32 is not a multiple of 64")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("flip_aug", True),
        ("alpha_mask", True),
        ("min_bucket_reso", 256),
        ("max_bucket_reso", 1024),
    ],
)
def test_what_no_other_layout_heeds_is_refused_there(key: str, value: Any) -> None:
    asked = values(**{key: value})
    parse(asked)
    del asked["models"]["big"]["layout"]
    assert line(asked).startswith(f"datasets.cats.{key}: ")


def test_captions_of_many_lengths_are_refused() -> None:
    asked = values()
    asked["models"]["big"]["max_token_length"] = "auto"
    assert "one length" in line(asked)


def test_our_own_trainer_cannot_read_its_caches() -> None:
    asked = values("sd1")
    asked["runs"]["first"]["trainer"] = {"kind": "sd"}
    assert line(asked).startswith("runs.first.trainer.kind: ")
    asked["models"]["big"]["unet"] = "unet"
    assert "`unet` is only for `layout: plain`: leave it out" in line(asked)


# -- regularisation images ------------------------------------------------------------------------


def regular(architecture: str = "sdxl", trainer: Any = None, **dataset: Any) -> dict[str, Any]:
    """Return a run of `cats` and of `man`, whose images are for regularisation."""
    asked = values(architecture, **dataset)
    asked["datasets"]["man"] = {"path": "man", "is_reg": True}
    asked["models"]["big"]["checkpoint"] = "big.safetensors"
    asked["runs"]["first"] |= {"datasets": ["cats", "man"]}
    asked["runs"]["first"] |= {"trainer": {"kind": "sdscripts", **(trainer or {})}}
    return {**asked, "sd_scripts": {"path": "sd-scripts"}}


def test_regularisation_images_and_their_weight_are_taken() -> None:
    parse(regular(trainer={"prior_loss_weight": 0.5}))
    parse(regular(trainer={"script": "sdxl_train"}))
    parse(regular(trainer={"arguments": ["--prior_loss_weight", "0.5"]}))  # as before the key


@pytest.mark.parametrize(
    ("architecture", "trainer", "dataset", "begins"),
    [
        ("sdxl", {}, {"is_reg": True}, "runs.first.datasets: all of its datasets are regular"),
        ("sdxl", {}, {"fit": "bucket"}, "datasets.man.fit: sd-scripts shows regularisation images"),
        ("sd1", {"script": "fine_tune"}, {}, "datasets.man.is_reg: fine_tune knows no regular"),
        (
            "sdxl",
            {"script": "sdxl_train", "prior_loss_weight": 0.5},
            {},
            "runs.first.trainer.prior_loss_weight: sdxl_train does not weight the loss",
        ),
    ],
)
def test_regularisation_images_without_an_effect_are_refused(
    architecture: str, trainer: dict[str, Any], dataset: dict[str, Any], begins: str
) -> None:
    assert line(regular(architecture, trainer, **dataset)).startswith(begins)


@pytest.mark.parametrize(
    ("trainer", "validation", "begins"),
    [
        ({"script": "sdxl_train"}, {}, "runs.first.validation: sdxl_train has no held-out loss"),
        ({"logging": False}, {}, "runs.first.validation: the loss of held-out items is seen in"),
        ({}, {"clips": 2}, "runs.first.validation.clips: sdscripts draws no held-out items"),
    ],
)
def test_items_held_out_without_an_effect_are_refused(
    trainer: dict[str, Any], validation: dict[str, Any], begins: str
) -> None:
    asked = regular(trainer=trainer)
    asked["runs"]["first"]["validation"] = {"items": 2, **validation}
    assert line(asked).startswith(begins)
    del asked["runs"]["first"]["validation"]
    parse(asked)


def test_another_network_than_a_lora_needs_a_script_that_trains_one() -> None:
    asked = regular(trainer={"script": "sdxl_train", "network_args": "conv_dim=4"})
    said = "runs.first.trainer.network_args: sdxl_train trains the complete network"
    assert line(asked).startswith(said)
    parse(regular(trainer={"network_module": "lycoris.kohya", "network_args": "algo=loha"}))


def test_a_weight_without_regularisation_images_is_refused() -> None:
    asked = regular(trainer={"prior_loss_weight": 0.5})
    del asked["datasets"]["man"]["is_reg"]
    assert line(asked).startswith("runs.first.trainer.prior_loss_weight: no dataset of the run")


@pytest.mark.parametrize("kind", ["musubi", "wan"])
def test_trainers_of_musubi_tuners_caches_have_no_regularisation_images(kind: str) -> None:
    asked = regular()
    files = {"vae": "vae.pth", "text": "t5.pth", "dit": "dit.safetensors"}
    asked["models"]["big"] = {"task": "t2v-14B", **files}
    asked["runs"]["first"] |= {"trainer": {"kind": kind}}
    said = line({**asked, "musubi_tuner": {"path": "musubi-tuner"}})
    assert said.startswith("datasets.man.is_reg: Wan ") and said.endswith("; leave it out")
    assert "is trained without regularisation images" in said
