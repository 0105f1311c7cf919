"""The drawn dataset and the tiny bundle are what their readers take them for."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from demo.autoencoder import make_autoencoder
from demo.bundle import build_tiny_bundle
from demo.draw import PICTURES, draw_dataset, draw_picture, draw_scene
from diffusers import AutoencoderKL, StableDiffusionPipeline, UNet2DConditionModel
from latentmake.errors import ModelError
from PIL import Image, ImageOps
from transformers import AutoTokenizer, CLIPTextModel, T5EncoderModel

COMMITTED = Path(__file__).parents[2] / "data" / "michael_gove"
LOSSY_TOLERANCE = 6.0  # mean difference a value, of 255; a wrong picture differs by ten times that


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image, dtype=np.float32)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-sd"
    build_tiny_bundle(folder, vae_steps=2, text_steps=2, unet_steps=2)
    return folder


class TestDataset:
    def test_committed_pictures_are_what_is_drawn_today(self, tmp_path: Path) -> None:
        drawn = draw_dataset(tmp_path)
        assert len(drawn) == 24
        for path in drawn:
            fresh, committed = pixels(path), pixels(COMMITTED / path.name)
            assert fresh.shape == committed.shape, path.name
            difference = np.abs(fresh - committed)
            if path.suffix == ".png":
                assert difference.max() == 0, path.name
            else:
                assert difference.mean() < LOSSY_TOLERANCE, path.name

    def test_committed_captions_are_what_is_drawn_today(self, tmp_path: Path) -> None:
        draw_dataset(tmp_path)
        captions = {path.name: path.read_bytes() for path in tmp_path.glob("*.txt")}
        committed = {path.name: path.read_bytes() for path in COMMITTED.glob("*.txt")}
        assert captions == committed
        assert all(b"michael_gove" in caption for caption in captions.values())

    def test_drawing_twice_gives_the_same_bytes(self, tmp_path: Path) -> None:
        for path in draw_dataset(tmp_path / "first"):
            again = tmp_path / "second" / path.name
            if not again.exists():
                draw_dataset(tmp_path / "second")
            assert path.read_bytes() == again.read_bytes(), path.name

    def test_another_seed_draws_other_pictures(self) -> None:
        assert draw_picture(PICTURES[0], seed=0) != draw_picture(PICTURES[0], seed=1)

    def test_the_folder_holds_pictures_and_captions_in_pairs_and_nothing_else(self) -> None:
        names = {path.name for path in COMMITTED.iterdir()}
        assert names == {f"{picture.stem}.{picture.suffix}" for picture in PICTURES} | {
            f"{picture.stem}.txt" for picture in PICTURES
        }
        assert len(names) == 48
        assert sum(path.stat().st_size for path in COMMITTED.iterdir()) < 1_000_000

    def test_all_formats_and_orientations_are_there(self) -> None:
        sizes = [picture.size for picture in PICTURES]
        assert {picture.suffix for picture in PICTURES} == {"jpg", "png", "webp"}
        assert {(width > height) - (width < height) for width, height in sizes} == {-1, 0, 1}
        assert all(160 <= side <= 320 for size in sizes for side in size)

    def test_one_picture_is_upright_only_by_its_exif_orientation(self) -> None:
        turned = {}
        for picture in PICTURES:
            with Image.open(COMMITTED / f"{picture.stem}.{picture.suffix}") as image:
                if image.getexif().get(0x0112, 1) != 1:
                    turned[picture] = (image.size, ImageOps.exif_transpose(image))
        ((picture, (stored_size, upright)),) = turned.items()
        assert "pointing up" in picture.caption
        assert stored_size == picture.size[::-1]
        difference = np.asarray(upright, np.float32) - np.asarray(draw_picture(picture), np.float32)
        assert np.abs(difference).mean() < LOSSY_TOLERANCE

    def test_one_picture_is_transparent_between_shape_and_frame(self) -> None:
        transparent = []
        for picture in PICTURES:
            with Image.open(COMMITTED / f"{picture.stem}.{picture.suffix}") as image:
                if image.mode == "RGBA":
                    transparent.append(picture)
                    alpha = np.asarray(image.getchannel("A"))
        (picture,) = transparent
        assert "transparent" in picture.caption
        assert 0.3 < (alpha == 0).mean() < 0.8
        assert (alpha == 255).mean() > 0.2


class TestScene:
    def test_a_scene_has_the_size_asked_for_and_a_caption_that_names_its_colours(self) -> None:
        image, caption = draw_scene(random.Random(3), (70, 50))
        assert (image.mode, image.size) == ("RGB", (70, 50))
        assert "background" in caption and "michael_gove" not in caption

    def test_the_same_chance_gives_the_same_scene(self) -> None:
        first, second = (draw_scene(random.Random(5), (64, 64)) for _ in range(2))
        assert first[1] == second[1]
        assert first[0].tobytes() == second[0].tobytes()


class TestBundle:
    def test_an_untrained_autoencoder_gives_back_a_plain_colour(self) -> None:
        torch.manual_seed(0)
        autoencoder = make_autoencoder().eval()
        colours = torch.tensor([[0.6, -0.5, 0.1], [-0.8, 0.4, 0.7]])
        pictures = colours[:, :, None, None].expand(2, 3, 64, 64)
        with torch.no_grad():
            latents = autoencoder.encode(pictures).latent_dist.mean
            decoded = autoencoder.decode(latents).sample
        assert latents.shape == (2, 8, 8, 8)
        assert (decoded[:, :, 16:48, 16:48].mean((2, 3)) - colours).abs().max() < 0.6

    def test_every_part_loads_by_its_ordinary_class(self, bundle: Path) -> None:
        autoencoder = AutoencoderKL.from_pretrained(bundle / "vae")
        assert autoencoder.config.latent_channels == 8
        assert autoencoder.config.scaling_factor != 0.18215
        unet = UNet2DConditionModel.from_pretrained(bundle / "unet")
        text_encoder = CLIPTextModel.from_pretrained(bundle / "text_encoder")
        assert unet.config.cross_attention_dim == text_encoder.config.hidden_size
        second = T5EncoderModel.from_pretrained(bundle / "text_encoder_2")
        parameters = [
            parameter
            for model in (autoencoder, unet, text_encoder, second)
            for parameter in model.parameters()
        ]
        assert {parameter.dtype for parameter in parameters} == {torch.float32}

    def test_the_folder_is_a_stable_diffusion_pipeline_that_runs(self, bundle: Path) -> None:
        pipeline = StableDiffusionPipeline.from_pretrained(bundle)
        assert pipeline.safety_checker is None
        assert pipeline.scheduler.config.prediction_type == "v_prediction"
        pipeline.set_progress_bar_config(disable=True)
        for width, height in ((64, 64), (96, 64)):
            image = pipeline(
                "a red circle", num_inference_steps=2, width=width, height=height
            ).images[0]
            assert image.size == (width, height)

    def test_weights_are_safetensors_that_the_group_may_read(self, bundle: Path) -> None:
        weights = sorted(
            path.relative_to(bundle).as_posix()
            for path in bundle.rglob("*")
            if path.is_file() and path.suffix not in (".json", ".txt")
        )
        assert weights == [
            "text_encoder/model.safetensors",
            "text_encoder_2/model.safetensors",
            "unet/diffusion_pytorch_model.safetensors",
            "vae/diffusion_pytorch_model.safetensors",
        ]
        (bundle.parent / "ordinary").write_text("")
        ordinary = (bundle.parent / "ordinary").stat().st_mode
        assert all((bundle / name).stat().st_mode == ordinary for name in weights)

    def test_the_clip_tokenizer_frames_pads_and_cuts_to_77_tokens(self, bundle: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(bundle / "tokenizer")
        bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        assert tokenizer.model_max_length == 77
        assert tokenizer("").input_ids == [bos, eos]
        tokens = tokenizer(PICTURES[0].caption, padding="max_length").input_ids
        assert len(tokens) == 77
        assert tokens[0] == bos and tokens[-1] == eos
        cut = tokenizer("a red circle " * 100, truncation=True).input_ids
        assert (len(cut), cut[0], cut[-1]) == (77, bos, eos)

    @pytest.mark.parametrize("text", ["zoë", "漢字", "🎈 balloon", "a_b-c 42", "\x00", "ﬁ ½"])
    def test_the_clip_tokenizer_encodes_any_text(self, bundle: Path, text: str) -> None:
        tokenizer = AutoTokenizer.from_pretrained(bundle / "tokenizer")
        tokens = tokenizer(text, add_special_tokens=False).input_ids
        assert tokens and tokenizer.unk_token_id not in tokens
        back = tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        assert back.replace(" ", "") == text.replace(" ", "")

    def test_the_t5_tokenizer_ends_every_text_and_marks_the_unknown(self, bundle: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(bundle / "tokenizer_2")
        caption = PICTURES[0].caption
        tokens = tokenizer(caption).input_ids
        assert tokens[-1] == tokenizer.eos_token_id
        assert tokenizer.unk_token_id not in tokens
        assert tokenizer.decode(tokens, skip_special_tokens=True) == caption
        assert tokenizer("").input_ids == [tokenizer.eos_token_id]
        assert tokenizer.unk_token_id in tokenizer("漢").input_ids

    def test_the_same_seed_gives_the_same_bytes(self, bundle: Path, tmp_path: Path) -> None:
        # Over an older bundle, which must go as a whole.
        again = tmp_path / "tiny-sd"
        again.mkdir()
        (again / "model_index.json").write_text("{}")
        (again / "stale.txt").write_text("")
        build_tiny_bundle(again, vae_steps=2, text_steps=2, unet_steps=2)
        files = {path.relative_to(bundle): path for path in bundle.rglob("*") if path.is_file()}
        assert {path.relative_to(again) for path in again.rglob("*") if path.is_file()} == set(
            files
        )
        for name, path in files.items():
            assert path.read_bytes() == (again / name).read_bytes(), name
        assert list(tmp_path.iterdir()) == [again]

    def test_a_folder_with_other_files_is_refused_and_left_alone(self, tmp_path: Path) -> None:
        folder = tmp_path / "pictures"
        folder.mkdir()
        (folder / "mine.png").write_bytes(b"mine")
        with pytest.raises(ModelError, match="pictures"):
            build_tiny_bundle(folder, vae_steps=2, text_steps=2, unet_steps=2)
        assert (folder / "mine.png").read_bytes() == b"mine"
        assert list(tmp_path.iterdir()) == [folder]

    def test_building_leaves_the_callers_chance_and_threads_alone(self, tmp_path: Path) -> None:
        torch.manual_seed(11)
        expected = torch.rand(3)
        torch.manual_seed(11)
        threads = torch.get_num_threads()
        build_tiny_bundle(tmp_path / "tiny", threads=1, vae_steps=1, text_steps=1, unet_steps=1)
        assert torch.equal(torch.rand(3), expected)
        assert torch.get_num_threads() == threads
