"""Caches of other programs become ours where they are what a plan asks for."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import world
from latentmake.base.errors import ConfigError
from latentmake.config.root import parse
from latentmake.data.memo import Memo
from latentmake.formats.cachefile import read_header, read_metadata
from latentmake.geometry.buckets import Size, crop_ltrb
from latentmake.plan.facts import Facts
from latentmake.plan.planner import make_plan
from latentmake.plan.run_plan import RunPlan
from latentmake.trainers.exchange.adopt import folders_of
from latentmake.trainers.exchange.adoption import STATES, adopt
from numpy.typing import NDArray
from PIL import ExifTags, Image
from refusals import refused
from safetensors.numpy import load, load_file, save_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch

Arrays = dict[str, NDArray[Any]]
SIZES = {"ant": (200, 120), "bee": (64, 64), "cat": (64, 160)}
SDXL = {
    "architecture": "sdxl",
    "layout": "sdscripts",
    "vae": "models/vae",
    "text": ["models/one", "models/two"],
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number, (stem, size) in enumerate(SIZES.items()):
        world.draw(tmp_path / f"data/{stem}.png", number, size)
        (tmp_path / f"data/{stem}.txt").write_text(f"caption of {stem}\n")
    for name in ("vae", "text", "clip", "dit"):
        put_weights(f"models/{name}.safetensors")


def put_weights(path: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    save_file({"weight": np.full(3, len(path), np.float32)}, path)


def put_network(folder: str, config: dict[str, Any], file: str = "model.safetensors") -> None:
    """Write a folder of weights as diffusers or transformers would."""
    put_weights(f"{folder}/{file}")
    (Path(folder) / "config.json").write_text(json.dumps(config))
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        (Path(folder) / name).write_text("{}")


def numbers(*shape: int, seed: int = 0, dtype: Any = np.float32) -> NDArray[Any]:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


class Run:
    """A run of one dataset, and what is said of its adoption."""

    def __init__(self, model: dict[str, Any], sizes: list[int], **dataset: Any) -> None:
        settings = {"path": "data", "adopt_from": ["theirs"], "fit": "crop", **dataset}
        self.values = {
            "datasets": {"cats": settings},
            "models": {"big": model},
            "runs": {"cats": {"datasets": ["cats"], "model": "big", "resolutions": sizes}},
            "musubi_tuner": {"path": "musubi-tuner"},
        }
        self.said: list[str] = []

    def plan(self) -> tuple[Facts, RunPlan]:
        facts = Facts(
            parse(self.values),
            Memo(Path(".latentmake/memo.sqlite")),
            program_digest=lambda *_: "p" * 64,
        )
        return facts, make_plan(facts, ["cats"]).runs["cats"]

    def stale(self) -> dict[str, str]:
        """Return the name of each stale target and why, as a plan says."""
        _, plan = self.plan()
        return {
            each.path.rpartition("/big/")[2]: each.reason
            for state in plan.parts.values()
            for each in state.to_make
        }

    def adopt(self) -> list[int]:
        """Adopt; return how many targets are in which state."""
        facts, plan = self.plan()
        folders = folders_of(facts.config, "cats")
        self.said = []
        counts = adopt(plan, folders, say=self.said.append)
        return [counts[state] for state in STATES]

    def line(self, *words: str) -> str:
        found = [line for line in self.said if all(word in line for word in words)]
        assert found, (words, self.said)
        assert "\n" not in found[0]
        return found[0]


# -- musubi-tuner ---------------------------------------------------------------------------------


def put_latents(folder: str, stem: str, side: int, suffix: str, header: str, **more: Any) -> Path:
    """Write latents of an image as musubi-tuner does, in no particular order of metadata."""
    width, height = SIZES[stem]
    path = Path(f"{folder}/{stem}_{width:04d}x{height:04d}_{suffix}.safetensors")
    path.parent.mkdir(parents=True, exist_ok=True)
    latent = side // 8
    tensors = {f"latents_1x{latent}x{latent}_float32": numbers(16, 1, latent, latent, seed=width)}
    metadata = {"width": str(width), "height": str(height), "format_version": "1.0.1"}
    save_file({**tensors, **more}, path, {**metadata, "architecture": header})
    return path


def put_text(folder: str, stem: str, suffix: str, header: str, *names: str) -> Path:
    path = Path(f"{folder}/{stem}_{suffix}_te.safetensors")
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {f"{name}float32": numbers(5, 8, seed=len(stem)) for name in names}
    caption = Path(f"data/{stem}.txt").read_text().strip()
    metadata = {"caption1": caption, "architecture": header, "format_version": "1.0.1"}
    save_file(tensors, path, metadata)
    return path


def z_image() -> Run:
    model = {"vae": "models/vae.safetensors", "text": ["models/text.safetensors"]}
    folders = ["theirs/64", "theirs/128"]
    return Run({"architecture": "z_image", **model}, [64, 128], adopt_from=folders)


def put_all() -> list[Path]:
    """Write what musubi-tuner would, in a folder for each resolution."""
    return [
        path
        for side in (64, 128)
        for stem in SIZES
        for path in (
            put_latents(f"theirs/{side}", stem, side, "zi", "z_image"),
            put_text(f"theirs/{side}", stem, "zi", "z_image", "varlen_llm_embed_"),
        )
    ]


def content(paths: list[Path]) -> dict[Path, tuple[bytes, int]]:
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


def test_what_musubi_tuner_made_is_fresh_after_adoption_and_a_second_one_does_nothing() -> None:
    run, paths = z_image(), put_all()
    before = content(paths)
    assert len(run.stale()) == 12
    assert run.adopt() == [12, 0, 0, 0, 0]
    assert run.stale() == {}
    assert run.adopt() == [0, 12, 0, 0, 0]
    assert content(paths) == before
    for path in paths:
        ours = Path("cache/cats/big", path.parent.name, path.name)
        assert read_header(ours).adopted
        for name, tensor in load(before[path][0]).items():
            assert np.array_equal(load_file(ours)[name], tensor)
    Path(".latentmake/memo.sqlite").unlink()
    assert run.stale() == {}


def test_a_caption_edited_afterwards_is_stale_alone_and_its_old_file_is_not_taken() -> None:
    run = z_image()
    put_all()
    run.adopt()
    Path("data/bee.txt").write_text("another")
    texts = {f"{side}/bee_zi_te.safetensors": "edited" for side in (64, 128)}
    assert run.stale() == texts
    assert run.adopt() == [0, 10, 0, 0, 2]
    run.line("'caption of bee'", "data/bee.txt is another")
    assert run.stale() == texts
    put_text("theirs/64", "bee", "zi", "z_image", "varlen_llm_embed_")
    assert run.adopt()[0] == 2
    assert run.stale() == {}


def test_latents_of_an_image_that_was_edited_are_not_replaced_by_some_that_may_be_older() -> None:
    run = z_image()
    put_all()
    run.adopt()
    world.draw(Path("data/bee.png"), 7, SIZES["bee"])
    latents = {f"{side}/bee_0064x0064_zi.safetensors" for side in (64, 128)}
    assert set(run.stale()) == latents
    assert run.adopt() == [0, 10, 0, 0, 2]
    run.line("may be of what data/bee.png held before it was edited", "remove that file")
    for path in latents:
        Path("cache/cats/big", path).unlink()
    assert run.adopt() == [2, 10, 0, 0, 0]


def _control(path: Path) -> None:
    metadata = {"architecture": "z_image", "width": "64", "height": "64"}
    tensors = {"latents_1x8x8_float32": numbers(16, 1, 8, 8) * np.float32("nan")}
    save_file(tensors, path, metadata)


def _of(side: int, architecture: str) -> Callable[[Path], object]:
    return lambda path: put_latents("theirs/64", "bee", side, "zi", architecture)


def _no_text(path: Path) -> None:
    put_text("theirs/64", "bee", "zi", "z_image", "llm_")


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "another bucket": (_of(96, "z_image"), "no latents of 8x8"),
    "another architecture": (_of(64, "wan"), "is of the architecture wan, not z_image"),
    "NaN": (_control, "NaN or infinity (latents_1x8x8_float32)"),
    "cut short": (lambda path: os.truncate(path, path.stat().st_size - 1), "cut short"),
    "no safetensors": (lambda path: path.write_bytes(b"x" * 100), "no safetensors file"),
    "empty": (lambda path: path.write_bytes(b""), "no safetensors file"),
    "a tensor of text": (_no_text, "holds no varlen_llm_embed_*"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_file_that_is_no_such_cache_is_named_and_what_has_none_is_left_to_the_build(
    name: str,
) -> None:
    spoil, word = FAULTS[name]
    run = z_image()
    for path in put_all():
        if path.name.startswith("cat"):
            path.unlink()
    file = "bee_zi_te.safetensors" if "text" in name else "bee_0064x0064_zi.safetensors"
    Path("theirs/128", file).unlink()
    spoil(Path("theirs/64", file))
    counts = run.adopt()
    assert (counts[0], counts[2], sum(counts[3:])) in ((6, 4, 2), (6, 5, 1))
    assert word in run.line(f"not adopted: theirs/64/{file}")
    assert len(run.stale()) == 6


def test_controls_count_by_their_number() -> None:
    texts = ["models/text.safetensors", "models/clip.safetensors"]
    model = {"architecture": "flux_kontext", "vae": "models/vae.safetensors", "text": texts}
    for number, stem in enumerate(SIZES):
        world.draw(Path(f"control/{stem}.png"), number, (64, 64))
    run = Run(model, [64], control_directory="control")
    control = {"latents_control_1x8x8_float32": numbers(16, 1, 8, 8)}
    put_latents("theirs", "ant", 64, "fk", "flux_kontext", **control)
    put_latents("theirs", "bee", 64, "fk", "flux_kontext")
    assert run.adopt() == [1, 0, 4, 1, 0]
    run.line("bee", "latents_control_*")


# -- sd-scripts -----------------------------------------------------------------------------------


def put_models() -> None:
    put_network("models/vae", {"block_out_channels": [8] * 4, "latent_channels": 4})
    for folder, width in (("one", 16), ("two", 24)):
        config = {"model_type": "clip_text_model", "hidden_size": width}
        put_network(f"models/{folder}", config)


def latents_of(stem: str, target: tuple[int, int], ending: str = "") -> Arrays:
    size = Size(*SIZES[stem])
    crop = np.array(crop_ltrb(Size(*target), size))
    arrays = {
        "latents": numbers(4, target[1] // 8, target[0] // 8, seed=size.width),
        "original_size": np.array(size),
        "crop_ltrb": crop,
    }
    return {f"{name}{ending}": array for name, array in arrays.items()}


def put_npz(name: str, arrays: Arrays) -> Path:
    path = Path("data", name)
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return path


def put_sdxl(old: bool = False, text: Any = np.float32) -> list[Path]:
    """Write what sd-scripts would beside the images, at 64."""
    paths = []
    for stem, (width, height) in SIZES.items():
        name = f"{stem}.npz" if old else f"{stem}_{width:04d}x{height:04d}_sdxl.npz"
        paths.append(put_npz(name, latents_of(stem, (64, 64))))
        states = {
            "hidden_state1": numbers(77, 16, dtype=text),
            "hidden_state2": numbers(77, 24, dtype=text),
            "pool2": numbers(24, dtype=text),
        }
        paths.append(put_npz(f"{stem}_te_outputs.npz", states))
    return paths


@pytest.mark.parametrize("old", [False, True], ids=["named", "of old names"])
def test_what_sdscripts_made_is_fresh_after_adoption_with_all_its_bytes(old: bool) -> None:
    put_models()
    run, paths = Run(SDXL, [64], adopt_from="data"), put_sdxl(old)
    before = content(paths)
    assert run.adopt() == [6, 0, 0, 0, 0]
    assert run.stale() == {}
    assert run.adopt() == [0, 6, 0, 0, 0]
    assert content(paths) == before
    ours = Path("cache/cats/big/64/ant_0200x0120_sdxl.npz").read_bytes()
    theirs = before[paths[0]][0]
    assert ours[: len(theirs) - 2] == theirs[:-2]  # a comment was added
    with np.load("cache/cats/big/text/ant_te_outputs.npz") as found:
        assert found["pool2"].shape == (24,)
    Path("data/bee.txt").write_text("another")
    assert run.stale() == {"text/bee_te_outputs.npz": "edited"}
    assert run.adopt() == [0, 5, 0, 0, 1]  # which is older than the edit


def _with(**arrays: NDArray[Any]) -> Callable[[Path], object]:
    return lambda path: put_npz(path.name, latents_of("bee", (64, 64)) | arrays)


NPZ_FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no archive": (lambda path: path.write_bytes(b"x"), "no npz file"),
    "cut short": (lambda path: os.truncate(path, path.stat().st_size // 2), "no npz file"),
    "another image": (_with(original_size=np.array([9, 9])), "an image of [9, 9] pixels"),
    "another crop": (_with(crop_ltrb=np.ones(4)), "another bucket"),
    "no latents": (lambda path: put_npz(path.name, {"x": np.ones(2)}), "holds no crop_ltrb"),
    "zeros": (_with(latents=np.zeros((4, 8, 8), np.float32)), "is all zeros (latents)"),
    "objects": (_with(latents=np.array([{}], dtype=object)), "not adopted"),
}


@pytest.mark.parametrize("name", NPZ_FAULTS)
def test_an_npz_that_is_no_such_cache_is_named_and_not_taken(name: str) -> None:
    spoil, word = NPZ_FAULTS[name]
    put_models()
    put_sdxl()
    spoil(Path("data/bee_0064x0064_sdxl.npz"))
    run = Run(SDXL, [64], adopt_from="data")
    assert run.adopt() == [5, 0, 0, 1, 0]
    assert word in run.line("not adopted: data/bee_0064x0064_sdxl.npz")


@pytest.mark.parametrize(
    ("sizes", "text", "dataset", "counts", "words"),
    [
        ([64, 128], np.float32, {}, [6, 0, 0, 3, 0], "not of 16 x 16"),
        ([64], np.float16, {}, [3, 0, 0, 3, 0], "set text_dtype: float16 of models.big"),
        (
            [64],
            np.float32,
            {"captions": {"caption_prefix": "art,"}},
            [3, 0, 0, 3, 0],
            "captions.caption_prefix",
        ),
        ([64], np.float32, {"flip_aug": True}, [3, 0, 0, 3, 0], "holds no latents_flipped"),
    ],
    ids=["resolution", "dtype", "captions", "flip_aug"],
)
def test_caches_of_other_settings_are_left_with_the_key_that_they_are_of(
    sizes: list[int], text: Any, dataset: dict[str, Any], counts: list[int], words: str
) -> None:
    put_models()
    put_sdxl(text=text)
    run = Run(SDXL, sizes, adopt_from="data", **dataset)
    assert run.adopt() == counts
    run.line("not adopted", words)
    if "text_dtype" in words:
        run.values["models"]["big"] = {**SDXL, "text_dtype": "float16"}
        assert run.adopt() == [3, 3, 0, 0, 0]


def test_flux_has_arrays_of_each_resolution_in_one_file() -> None:
    put_network("models/vae", {"block_out_channels": [8] * 4, "latent_channels": 16})
    put_network("models/one", {"model_type": "clip_text_model", "hidden_size": 16})
    put_network("models/two", {"model_type": "t5", "d_model": 24})
    model = {**SDXL, "architecture": "flux"}
    for stem, (width, height) in SIZES.items():
        arrays: Arrays = {}
        for side in (64, 128):
            found = latents_of(stem, (side, side), f"_{side // 8}x{side // 8}")
            name = f"latents_{side // 8}x{side // 8}"
            arrays |= {**found, name: numbers(16, side // 8, side // 8)}
        put_npz(f"{stem}_{width:04d}x{height:04d}_flux.npz", arrays)
        text: Arrays = {
            "l_pooled": numbers(16),
            "t5_out": numbers(512, 24),
            "txt_ids": np.zeros((512, 3), np.float32),
            "t5_attn_mask": np.ones(512, np.int64),
            "apply_t5_attn_mask": np.array(False),
        }
        put_npz(f"{stem}_flux_te.npz", text)
    run = Run(model, [64, 128], adopt_from="data")
    assert run.adopt() == [9, 0, 0, 0, 0]
    assert run.stale() == {}
    run.values["models"]["big"] = {**model, "apply_t5_attn_mask": True}
    assert run.adopt() == [0, 6, 0, 3, 0]
    run.line("set apply_t5_attn_mask: false")


def test_stable_diffusion_1_has_latents_alone() -> None:
    put_models()
    model = {**SDXL, "architecture": "sd1", "text": ["models/one"]}
    for stem, (width, height) in SIZES.items():
        put_npz(f"{stem}_{width:04d}x{height:04d}_sd.npz", latents_of(stem, (64, 64)))
    run = Run(model, [64], adopt_from="data")
    assert run.adopt() == [3, 0, 0, 0, 0]
    assert run.stale() == {}


# -- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("folders", "words"),
    [
        ([], ["run cats", "datasets.cats.adopt_from"]),
        (["nowhere"], ["datasets.cats.adopt_from", "there is no folder nowhere"]),
        (["data/ant.png"], ["there is no folder data/ant.png"]),
    ],
)
def test_folders_that_are_none_are_one_line(folders: list[str], words: list[str]) -> None:
    put_models()
    run = Run(SDXL, [64], adopt_from=folders)
    line = refused(run.adopt, kind=ConfigError)
    assert all(word in line for word in words)


# -- ai-training ----------------------------------------------------------------------------------

AI_TRAINING = {
    "vae": "models/vae",
    "text": [{"path": "models/t5", "max_length": 6}],
    "text_dtype": "bfloat16",
    "ai_training": {"latents": ".img_sdxl", "text": ".txt_t5cache"},
}


def ai_training(sizes: list[int], **model: Any) -> Run:
    put_network("models/vae", {"block_out_channels": [8] * 4, "latent_channels": 4})
    put_network("models/t5", {"model_type": "t5", "d_model": 8})
    Path("models/t5/tokenizer.json").write_text("{}")
    return Run({**AI_TRAINING, **model}, sizes, adopt_from=[])


def put_ai_training(side: int = 64, tokens: int = 3) -> list[Path]:
    """Write what ai-training's scripts would beside the images."""
    paths = []
    for number, stem in enumerate(SIZES):
        emb = torch.randn(tokens, 8, generator=torch.Generator().manual_seed(number))
        for ending, tensors in (
            (".img_sdxl", {"latent": torch.from_numpy(numbers(4, side // 8, side // 8))}),
            (".txt_t5cache", {"emb": emb.to(torch.bfloat16)}),
        ):
            paths.append(Path(f"data/{stem}{ending}"))
            save_torch(tensors, paths[-1])
    return paths


def test_what_ai_training_made_is_fresh_after_adoption_and_has_all_that_an_encoder_writes() -> None:
    run, paths = ai_training([64, 96]), put_ai_training()
    before = content(paths)
    assert run.adopt() == [6, 0, 3, 0, 0]
    assert run.said == [run.line("cats: 6 adopted")]  # of the other resolution there is nothing
    assert len(run.stale()) == 3
    assert run.adopt() == [0, 6, 3, 0, 0]
    assert content(paths) == before
    latents, text = (
        load_torch(f"cache/cats/big/{each}.safetensors")
        for each in ("64/ant.latents", "text/ant.text")
    )
    assert latents["latents"].equal(load_torch(paths[0])["latent"])
    assert text["text_encoder.hidden_state"].equal(load_torch(paths[1])["emb"])
    metadata = read_metadata("cache/cats/big/64/ant.latents.safetensors")
    told = {"original_width": "200", "original_height": "120", "pixel_width": "64"}
    assert metadata.items() >= {**told, "scaling_factor": "0.18215"}.items()
    assert read_metadata("cache/cats/big/text/ant.text.safetensors")["caption"] == "caption of ant"
    Path("data/bee.txt").write_text("another")
    assert run.adopt() == [0, 5, 3, 0, 1]
    run.line("data/bee.txt_t5cache: may be of what data/bee.txt held before it was edited")


AI_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "another dtype": ({"text_dtype": "float32"}, "set text_dtype: bfloat16 of models.big"),
    "without the projection": ({"text": ["models/wide"]}, "is [3, 8], not [1 to 512, 32]; name"),
    "too many tokens": ({"text": [{"path": "models/t5", "max_length": 2}]}, "not [1 to 2, 8]"),
    "another size": ({}, "holds latents of [4, 8, 8], not of 16 x 16"),
}


@pytest.mark.parametrize("name", AI_FAULTS)
def test_a_file_of_ai_training_that_does_not_fit_is_named_with_the_key_to_set(name: str) -> None:
    model, word = AI_FAULTS[name]
    put_network("models/wide", {"model_type": "t5", "d_model": 32})
    Path("models/wide/tokenizer.json").write_text("{}")
    run = ai_training([128] if name == "another size" else [64], **model)
    put_ai_training()
    assert run.adopt() == [3, 0, 0, 3, 0]
    run.line("not adopted: data/ant", word)


def test_an_image_that_exif_turns_is_encoded_for_ai_training_does_not_turn_it() -> None:
    run = ai_training([64])
    put_ai_training()
    with Image.open("data/ant.png") as image:
        exif = image.getexif()
        exif[ExifTags.Base.Orientation] = 3
        image.save("data/ant.png", exif=exif)
    assert run.adopt() == [5, 0, 0, 1, 0]
    run.line("data/ant.img_sdxl", "its EXIF orientation turns it", "exif_rotation: false")


def test_a_run_whose_model_names_no_file_of_ai_training_is_refused() -> None:
    for keys, words in (
        ({"ai_training": None}, "models.big.ai_training: this key is missing"),
        ({"vae": "models/vae.safetensors"}, "models.big.vae: no config.json on this disk"),
    ):
        with pytest.raises(ConfigError, match=words):
            ai_training([64], **keys).adopt()
    run = ai_training([64])
    run.values["datasets"]["cats"]["captions"] = {"variants": 2, "shuffle_caption": True}
    with pytest.raises(ConfigError, match=r"leave out models\.big\.ai_training\.text"):
        run.adopt()
