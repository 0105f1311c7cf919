"""The drawn videos and the tiny Wan bundle are what their readers take them for."""

from __future__ import annotations

import random
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from demo.motion import draw_motion
from demo.wan_autoencoder import encode_clips, make_wan_autoencoder, train_wan_autoencoder
from demo.wan_bundle import build_tiny_wan
from demo.wan_denoiser import PaddedAttention, make_wan_denoiser
from demo.waves import FRAMES, SIZE, STILLS, VIDEOS, draw_clip, draw_waves
from diffusers import WanPipeline
from latentmake.caches.encoders.umt5 import load_umt5
from latentmake.caches.encoders.wan_vae import load_wan_vae
from latentmake.config import TextWeights, Weights
from latentmake.errors import ModelError
from PIL import Image

COMMITTED = Path(__file__).parents[2] / "data/waves"
LOSSY_TOLERANCE = 6.0  # mean difference a value, of 255


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-wan"
    build_tiny_wan(folder, vae_steps=2, transformer_steps=2)
    return folder


def frames(path: Path) -> np.ndarray:
    with av.open(str(path)) as file:
        return np.stack([each.to_ndarray(format="rgb24") for each in file.decode(video=0)])


class TestVideos:
    def test_committed_videos_are_what_is_drawn_today(self) -> None:
        for waves in VIDEOS:
            committed = frames(COMMITTED / f"clips/{waves.stem}.mp4").astype(np.float32)
            drawn = draw_clip(waves)
            assert committed.shape == drawn.shape == (FRAMES, SIZE[1], SIZE[0], 3)
            assert np.abs(committed - drawn).mean() < LOSSY_TOLERANCE, waves.stem
        for waves in STILLS:
            with Image.open(COMMITTED / f"pictures/{waves.stem}.png") as image:
                assert np.array_equal(np.asarray(image), draw_clip(waves, 1)[0])

    def test_the_folder_holds_clips_pictures_and_captions_and_nothing_else(
        self, tmp_path: Path
    ) -> None:
        draw_waves(tmp_path)
        for folder in (tmp_path, COMMITTED):
            found = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
            if folder == tmp_path:
                drawn = found
        assert found == drawn
        assert sum((COMMITTED / path).stat().st_size for path in found) < 500_000
        for path in found:
            if path.suffix == ".txt":
                assert (COMMITTED / path).read_bytes() == (tmp_path / path).read_bytes()

    def test_water_moves_and_the_sky_stands_still(self) -> None:
        for waves in VIDEOS:
            clip = draw_clip(waves).astype(np.int16)
            moved = np.abs(np.diff(clip, axis=0)).max(axis=(0, 2, 3))
            assert moved[: SIZE[1] // 4].max() == 0 < moved[SIZE[1] // 2 :].max(), waves.stem

    def test_drawing_twice_gives_the_same_bytes(self, tmp_path: Path) -> None:
        for first, second in zip(
            draw_waves(tmp_path / "a"), draw_waves(tmp_path / "b"), strict=True
        ):
            assert first.read_bytes() == second.read_bytes(), first.name


def test_the_same_chance_gives_the_same_scene_and_no_wave() -> None:
    (first, caption), (second, again) = (
        draw_motion(random.Random(5), (96, 64), 9) for _ in range(2)
    )
    assert first.shape == (9, 64, 96, 3) and first.dtype == np.uint8
    assert np.array_equal(first, second) and caption == again
    assert "wave" not in caption


def test_an_untrained_autoencoder_gives_back_colours_that_change() -> None:
    torch.manual_seed(0)
    autoencoder = make_wan_autoencoder().eval()
    shades = torch.linspace(-0.6, 0.6, 9)[None, None, :, None, None]
    tint = torch.tensor([1.0, -1.0, 0.3])[None, :, None, None, None]
    clip = (shades * tint).expand(1, 3, 9, 64, 64)
    with torch.no_grad():
        latents = autoencoder.encode(clip).latent_dist.mean
        decoded = autoencoder.decode(latents).sample
    assert latents.shape == (1, 16, 3, 8, 8)
    assert (decoded - clip)[..., 16:48, 16:48].mean((3, 4)).abs().max() < 0.3


def test_latents_have_the_statistics_that_the_configuration_says() -> None:
    torch.manual_seed(0)
    dice = random.Random(0)
    clips = [draw_motion(dice, (64, 64), 9)[0] for _ in range(8)]
    pixels = torch.from_numpy(np.stack(clips)).permute(0, 4, 1, 2, 3) / 127.5 - 1
    autoencoder = make_wan_autoencoder().eval()
    with torch.no_grad():
        before = autoencoder.decode(autoencoder.encode(pixels).latent_dist.mean).sample
    train_wan_autoencoder(autoencoder, pixels, 0, torch.Generator().manual_seed(0))
    latents = encode_clips(autoencoder, pixels)
    assert latents.mean((0, 2, 3, 4)).abs().max() < 1e-4
    assert latents.std().item() == pytest.approx(1, abs=1e-3)
    with torch.no_grad():
        after = autoencoder.decode(autoencoder.encode(pixels).latent_dist.mean).sample
    assert (after - before).abs().max() < 1e-3


def test_a_token_that_stands_for_all_zeros_changes_nothing() -> None:
    torch.manual_seed(0)
    denoiser = make_wan_denoiser(8)
    text = torch.zeros(1, 512, 8)
    text[:, :5] = torch.randn(5, 8)
    clip, moment = torch.randn(1, 16, 2, 4, 4), torch.tensor([600.0])
    with torch.no_grad():
        complete = denoiser(clip, moment, text).sample
        for block in denoiser.blocks:
            block.attn2.set_processor(PaddedAttention())
        short = denoiser(clip, moment, text[:, :6]).sample
        other = denoiser(clip, moment, text[:, :5]).sample
    assert torch.allclose(short, complete, atol=1e-5)
    assert not torch.allclose(other, complete, atol=1e-3)


class TestBundle:
    def test_the_folder_is_a_wan_pipeline_that_runs(self, bundle: Path) -> None:
        pipeline = WanPipeline.from_pretrained(bundle)
        assert pipeline.scheduler.config.flow_shift == 2.0
        pipeline.set_progress_bar_config(disable=True)
        clip = pipeline(
            "high blue waves", num_inference_steps=2, width=64, height=48, num_frames=5
        ).frames
        assert clip.shape == (1, 5, 48, 64, 3) and np.isfinite(clip).all()

    def test_encoders_are_those_of_wan(self, bundle: Path) -> None:
        cpu = torch.device("cpu")
        vae = load_wan_vae(Weights(path=str(bundle / "vae")), cpu, torch.float32)
        pixels = torch.randint(0, 256, (1, 5, 32, 32, 3), dtype=torch.uint8)
        assert vae.encode(pixels, torch.float32).shape == (1, 16, 2, 4, 4)
        text = load_umt5(TextWeights(path=str(bundle / "text_encoder")), cpu, torch.float32)
        first, second = text.encode(["calm blue waves", "calm teal waves"])
        assert first.shape[1] == 32 and not torch.equal(first, second)

    def test_equal_seeds_give_equal_bytes(self, bundle: Path, tmp_path: Path) -> None:
        again = tmp_path / "tiny-wan"
        build_tiny_wan(again, vae_steps=2, transformer_steps=2)
        files = [path.relative_to(bundle) for path in bundle.rglob("*") if path.is_file()]
        assert len(files) > 8
        for path in files:
            assert (bundle / path).read_bytes() == (again / path).read_bytes(), path

    def test_a_folder_of_something_else_is_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "note").write_text("mine")
        with pytest.raises(ModelError, match="something other"):
            build_tiny_wan(tmp_path, vae_steps=1, transformer_steps=1)
        assert [path.name for path in tmp_path.iterdir()] == ["note"]
