"""The dataset TOML: the keys that musubi-tuner knows, one block for each dataset and resolution."""

from __future__ import annotations

import tomllib
from typing import Any

import tomli_w
from controlled_world import configured
from latentmake.config.datasets import Dataset
from latentmake.trainers.musubi.deploy import dataset_toml, shapes, training_toml
from latentmake.trainers.musubi.order import MusubiOrder
from publish_world import order_of

SHARED = {
    *("resolution", "caption_extension", "batch_size", "num_repeats"),
    *("enable_bucket", "bucket_no_upscale"),
}
IMAGES = SHARED | {"image_directory", "cache_directory", "control_directory", "multiple_target"}
VIDEOS = SHARED | {
    *("video_directory", "cache_directory", "control_directory", "target_frames"),
    *("frame_extraction", "frame_stride", "frame_sample", "max_frames", "source_fps"),
}


def parsed(order: MusubiOrder, root: str = "/p") -> dict[str, Any]:
    toml = tomllib.loads(
        dataset_toml(
            order,
            lambda name, size: tuple(
                f"{root}/{name}_{size[0]}x{size[1]}{ending}"
                for ending in ("", "_cache", "_control")
            ),  # type: ignore[arg-type, return-value]
        )
    )
    assert set(toml) == {"general", "datasets"}
    assert set(toml["general"]) <= SHARED
    for block in toml["datasets"]:
        assert set(block) <= (VIDEOS if "video_directory" in block else IMAGES)
    return toml


def test_images_of_one_dataset_at_two_resolutions() -> None:
    toml = parsed(order_of(trainer={"batch_size": 3}))
    assert toml["general"] == {"batch_size": 3, "caption_extension": ".txt"}
    assert toml["datasets"] == [
        {
            "image_directory": f"/p/gove_{width}x{height}",
            "cache_directory": f"/p/gove_{width}x{height}_cache",
            "resolution": [width, height],
            "num_repeats": 1,
            "enable_bucket": False,
            "bucket_no_upscale": False,
        }
        for width, height in ((256, 256), (480, 832))
    ]


def test_videos_set_buckets_and_a_float_for_the_frame_rate() -> None:
    videos = Dataset(
        path="v",
        target_frames=[1, 17],
        frame_extraction="slide",
        frame_stride=4,
        source_fps=30,
        num_repeats=2,
    )
    (block,) = parsed(order_of(datasets={"v": videos}, resolutions=[(256, 256)]))["datasets"]
    assert block == {
        "video_directory": "/p/v_256x256",
        "cache_directory": "/p/v_256x256_cache",
        "resolution": [256, 256],
        "num_repeats": 2,
        "enable_bucket": True,
        "target_frames": [1, 17],
        "frame_extraction": "slide",
        "frame_stride": 4,
        "frame_sample": 1,
        "max_frames": 129,
        "source_fps": 30.0,
    }
    assert isinstance(block["source_fps"], float)
    plain = Dataset(path="v", target_frames=[5])
    (block,) = parsed(order_of(datasets={"v": plain}, resolutions=[(64, 64)]))["datasets"]
    assert "source_fps" not in block


def test_keys_about_controls_layers_and_framepack_are_there_where_they_are_set() -> None:
    def written(**settings: Any) -> dict[str, Any]:
        section = Dataset.model_validate({"path": "data", **settings})
        return tomllib.loads(tomli_w.dumps(shapes(section)))

    plain = written()
    assert plain == {"enable_bucket": False, "bucket_no_upscale": False}
    asked: dict[str, Any] = {
        "no_resize_control": True,
        "control_resolution": [64, 96],
        "multiple_target": True,
        "fp_latent_window_size": 8,
        "fp_1f_clean_indices": [0, 10],
        "fp_1f_target_index": 0,
        "fp_1f_no_post": True,
    }
    assert written(**asked) == plain | asked
    video = written(target_frames=[5], fp_latent_window_size=8)
    assert video == written(target_frames=[5]) | {"fp_latent_window_size": 8}


def test_datasets_that_differ_say_so_in_their_own_blocks() -> None:
    datasets = {
        "a": Dataset(path="a", fit="bucket", bucket_no_upscale=True, control_directory="c"),
        "b": Dataset(path="b", caption_extension=".caption", bucket_no_upscale=True),
    }
    toml = parsed(order_of(datasets=datasets, resolutions=[(64, 96)]))
    a, b = toml["datasets"]
    assert toml["general"] == {"batch_size": 1}
    assert (a["caption_extension"], b["caption_extension"]) == (".txt", ".caption")
    assert (a["enable_bucket"], a["bucket_no_upscale"]) == (True, True)
    # Without buckets an image always gets the resolution's size.
    assert (b["enable_bucket"], b["bucket_no_upscale"]) == (False, False)
    assert a["control_directory"] == "/p/a_64x96_control"
    assert "control_directory" not in b


def test_a_training_from_caches_is_not_told_of_controls_and_layers_that_it_would_look_for() -> None:
    for architecture, settings, told in (
        ("qwen_image_layered", {"multiple_target": True}, "multiple_target"),
        ("flux_kontext", {"control_directory": "control"}, "control_directory"),
    ):
        config = configured(architecture, **settings)
        order = order_of(datasets=config.datasets)
        order = order.model_copy(update={"model": config.models["model"]})
        (first, *_) = tomllib.loads(training_toml(order))["datasets"]
        assert not {"multiple_target", "control_directory"} & first.keys()
        assert told in parsed(order)["datasets"][0]
    order = order_of(datasets={"gove": Dataset(path="data", control_directory="control")})
    assert tomllib.loads(training_toml(order))["datasets"][0]["control_directory"]
