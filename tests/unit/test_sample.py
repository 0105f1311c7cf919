"""The shipped pictures and the tiny Stable Diffusion are what their readers take them for."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from demo.__main__ import main
from demo.shapes import draw_scene
from demo.tiny_sd import write_tiny_sd
from diffusers import StableDiffusionPipeline
from PIL import Image, ImageOps
from safetensors.torch import load_file
from transformers import AutoTokenizer

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "data/michael_gove"
MODEL = ROOT / "data/tiny-sd"
CAPTION = (PICTURES / "red_circle.txt").read_text(encoding="utf-8").strip()

# Caches and trained weights depend on these bytes: change them, and every sample is made anew.
WEIGHTS = {
    "tiny-captioner/model.safetensors": (
        991494,
        "4566be6c49526db8944ce6ffd02bb9333aff1d78d4f79ab4a04fc61034c9d248",
    ),
    "tiny-sd/text_encoder/model.safetensors": (
        227216,
        "6bc48f2546ab5c9355a55146860292aaadfd1895564751ed69ce29674a26fece",
    ),
    "tiny-sd/unet/diffusion_pytorch_model.safetensors": (
        2031304,
        "f9a12dabc9b4afba888f43084f2d70eb775f1cf0aea2cb39eaba02afde42aad5",
    ),
    "tiny-sd/vae/diffusion_pytorch_model.safetensors": (
        859734,
        "8b64f16aff222283fccefec7f6b40f2f6c3f88a0978a7755b8aec07a086e8c27",
    ),
    "tiny-wan/text_encoder/model.safetensors": (
        53048,
        "15578cc4b3b1bf0b6566aa1ddc970bcef05e2f385563efbd196b6b8e5ca2e44c",
    ),
    "tiny-wan/transformer/diffusion_pytorch_model.safetensors": (
        1529256,
        "681b42f1d64639ca286243af8d393471a070740aaed127547a9f1cb42986c518",
    ),
    "tiny-wan/vae/diffusion_pytorch_model.safetensors": (
        785010,
        "806810f631f475e0f5254bf49023877da3c2bf68d979b4b203eb04fce74da2fb",
    ),
}
MOST = 7_000_000  # bytes of all models


class TestPictures:
    def test_the_folder_holds_pictures_and_captions_in_pairs_and_nothing_else(self) -> None:
        names: dict[str, set[str]] = {path.stem: set() for path in PICTURES.iterdir()}
        for path in PICTURES.iterdir():
            names[path.stem].add(path.suffix)
        assert len(names) == 24
        assert all(len(found) == 2 and ".txt" in found for found in names.values())
        assert set.union(*names.values()) == {".txt", ".jpg", ".png", ".webp"}
        assert sum(path.stat().st_size for path in PICTURES.iterdir()) < 1_000_000

    def test_every_caption_has_the_trigger_words(self) -> None:
        for path in PICTURES.glob("*.txt"):
            assert path.read_text(encoding="utf-8").endswith(", michael_gove style\n"), path.name

    def test_all_orientations_are_there_and_one_picture_is_turned_by_exif(self) -> None:
        sizes, turned = {}, []
        for path in PICTURES.glob("*.[jpw]*"):
            with Image.open(path) as image:
                sizes[path.stem] = ImageOps.exif_transpose(image).size
                if image.getexif().get(0x0112, 1) != 1:
                    turned.append(path.stem)
        assert {(width > height) - (width < height) for width, height in sizes.values()} == {
            -1, 0, 1,
        }  # fmt: skip
        assert all(160 <= side <= 320 for size in sizes.values() for side in size)
        assert turned == ["red_arrow"]

    def test_one_picture_is_transparent_between_shape_and_frame(self) -> None:
        with Image.open(PICTURES / "pink_ring.png") as image:
            assert image.mode == "RGBA"
            alpha = np.asarray(image.getchannel("A"))
        assert "transparent" in (PICTURES / "pink_ring.txt").read_text(encoding="utf-8")
        assert 0.3 < (alpha == 0).mean() < 0.8
        assert (alpha == 255).mean() > 0.2


def test_the_weights_are_those_that_caches_were_made_with() -> None:
    found = {}
    for path in sorted((ROOT / "data").glob("tiny-*/**/*.safetensors")):
        data = path.read_bytes()
        name = path.relative_to(ROOT / "data").as_posix()
        found[name] = (len(data), hashlib.sha256(data).hexdigest())
    assert found == WEIGHTS
    files = [path for path in (ROOT / "data").glob("tiny-*/**/*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < MOST
    assert {path.suffix for path in files} == {".json", ".safetensors", ".txt"}


def test_the_weights_are_float16_and_compute_in_float32() -> None:
    stored = load_file(MODEL / "unet/diffusion_pytorch_model.safetensors")
    assert {value.dtype for value in stored.values()} == {torch.float16}
    pipeline = StableDiffusionPipeline.from_pretrained(MODEL)
    assert pipeline.scheduler.config.prediction_type == "v_prediction"
    for part in (pipeline.vae, pipeline.text_encoder, pipeline.unet):
        assert {value.dtype for value in part.parameters()} == {torch.float32}


def test_the_model_draws_what_a_prompt_says() -> None:
    pipeline = StableDiffusionPipeline.from_pretrained(MODEL)
    pipeline.set_progress_bar_config(disable=True)
    prompts = ["a red square on a white background", "a yellow square on a blue background"]
    first, second = pipeline(
        prompts, num_inference_steps=12, width=64, height=64, guidance_scale=1.5,
        generator=torch.Generator().manual_seed(0), output_type="np",
    ).images  # fmt: skip
    red, green, blue = first[28:36, 28:36].mean((0, 1))
    assert red > green + 0.2 and red > blue + 0.2
    assert first[:8, :8].mean() > 0.7
    red, green, blue = second[28:36, 28:36].mean((0, 1))
    assert red > blue + 0.2 and green > blue + 0.2
    assert second[:8, :8, 2].mean() > second[:8, :8, 0].mean() + 0.2


def test_the_clip_tokenizer_frames_pads_and_cuts_to_77_tokens() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL / "tokenizer")
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    assert tokenizer.model_max_length == 77
    assert tokenizer("").input_ids == [bos, eos]
    tokens = tokenizer(CAPTION, padding="max_length").input_ids
    assert len(tokens) == 77
    assert tokens[0] == bos and tokens[-1] == eos
    cut = tokenizer("a red circle " * 100, truncation=True).input_ids
    assert (len(cut), cut[0], cut[-1]) == (77, bos, eos)


@pytest.mark.parametrize("text", ["zoë", "漢字", "🎈 balloon", "a_b-c 42", "\x00", "ﬁ ½"])
def test_the_clip_tokenizer_encodes_any_text(text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL / "tokenizer")
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    assert tokens and tokenizer.unk_token_id not in tokens
    back = tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
    assert back.replace(" ", "") == text.replace(" ", "")


class TestTraining:
    def test_the_same_chance_gives_the_same_scene(self) -> None:
        first, second = (draw_scene(random.Random(5), (70, 50)) for _ in range(2))
        assert first[1] == second[1] and "background" in first[1]
        assert (first[0].mode, first[0].size) == ("RGB", (70, 50))
        assert first[0].tobytes() == second[0].tobytes()

    def test_the_same_seed_gives_the_same_bytes_in_the_shipped_files(self, tmp_path: Path) -> None:
        for name in ("first", "second"):
            write_tiny_sd(tmp_path / name, vae_steps=2, text_steps=2, unet_steps=2)
        names = {path.relative_to(MODEL) for path in MODEL.rglob("*") if path.is_file()}
        for folder in (tmp_path / "first", tmp_path / "second"):
            assert {each.relative_to(folder) for each in folder.rglob("*.*")} == names
        for name in names:
            first = tmp_path / "first" / name
            assert first.read_bytes() == (tmp_path / "second" / name).read_bytes(), name
            if name.suffix == ".safetensors":
                shapes = [
                    {key: value.shape for key, value in load_file(path).items()}
                    for path in (first, MODEL / name)
                ]
                if name.parent.name != "text_encoder":  # of fewer scenes, fewer tokens
                    assert shapes[0] == shapes[1], name

    def test_the_command_leaves_a_folder_that_exists_alone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "mine.png").write_bytes(b"mine")
        monkeypatch.setattr("sys.argv", ["demo", "tiny-sd", str(tmp_path)])
        with pytest.raises(SystemExit, match="2"):
            main()
        assert "exists; name a new folder" in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ["mine.png"]
