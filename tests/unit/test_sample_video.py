"""The shipped videos and the tiny Wan are what their readers take them for."""

from __future__ import annotations

import random
from pathlib import Path

import av
import numpy as np
import torch
from demo.motion import draw_motion
from demo.tiny_wan import PaddedAttention, write_tiny_wan
from diffusers import WanPipeline, WanTransformer3DModel
from latentmake.config.weights import TextWeights, Weights
from latentmake.encode.encoders.text import load_umt5
from latentmake.encode.encoders.wan import load_wan_vae
from PIL import Image

ROOT = Path(__file__).parents[2]
WAVES = ROOT / "data/waves"
MODEL = ROOT / "data/tiny-wan"
SIZE, FRAMES = (128, 80), 17


def frames(path: Path) -> np.ndarray:
    with av.open(str(path)) as file:
        return np.stack([each.to_ndarray(format="rgb24") for each in file.decode(video=0)])


def test_the_folder_holds_clips_pictures_and_captions_and_nothing_else() -> None:
    found = {path.relative_to(WAVES) for path in WAVES.rglob("*") if path.is_file()}
    stems = {path.with_suffix("") for path in found}
    clips, pictures = (
        {stem for stem in stems if stem.parts[0] == kind} for kind in ("clips", "pictures")
    )
    assert (len(clips), len(pictures)) == (20, 4)
    named = {stem.with_suffix(end) for stem in stems for end in (".txt",)}
    named |= {stem.with_suffix(".mp4") for stem in clips}
    named |= {stem.with_suffix(".png") for stem in pictures}
    assert found == named
    assert sum((WAVES / path).stat().st_size for path in found) < 500_000
    for path in WAVES.rglob("*.txt"):
        assert path.read_text(encoding="utf-8").endswith(" sky, papersea\n"), path.name


def test_water_moves_and_the_sky_stands_still() -> None:
    for path in (WAVES / "clips").glob("*.mp4"):
        clip = frames(path).astype(np.int16)
        assert clip.shape == (FRAMES, SIZE[1], SIZE[0], 3)
        moved = np.abs(np.diff(clip, axis=0)).mean(axis=(0, 2, 3))
        assert moved[: SIZE[1] // 4].max() < moved[SIZE[1] // 2 :].max() / 4, path.name
    for path in (WAVES / "pictures").glob("*.png"):
        with Image.open(path) as image:
            assert image.size == SIZE


def test_the_model_is_a_wan_pipeline_that_computes_in_float32() -> None:
    pipeline = WanPipeline.from_pretrained(MODEL)
    assert pipeline.scheduler.config.flow_shift == 2.0
    for part in (pipeline.vae, pipeline.text_encoder, pipeline.transformer):
        assert {value.dtype for value in part.parameters()} == {torch.float32}
    pipeline.set_progress_bar_config(disable=True)
    clip = pipeline(
        "high blue waves", num_inference_steps=2, width=64, height=48, num_frames=5
    ).frames
    assert clip.shape == (1, 5, 48, 64, 3) and np.isfinite(clip).all()


def test_the_vae_gives_back_clips_and_has_the_statistics_of_wans_own() -> None:
    vae = load_wan_vae(Weights(path=str(MODEL / "vae")), torch.device("cpu"), torch.float32)
    dice = random.Random(3)
    clips = np.stack([draw_motion(dice, (96, 64), 9)[0] for _ in range(8)])
    latents = vae.encode(torch.from_numpy(clips), torch.float32)
    assert latents.shape == (8, 16, 3, 8, 12)
    assert abs(latents.mean().item()) < 0.3
    assert 0.8 < latents.std().item() < 1.2


def test_the_text_encoder_tells_captions_apart() -> None:
    weights = TextWeights(path=str(MODEL / "text_encoder"))
    text = load_umt5(weights, torch.device("cpu"), torch.float32)
    first, second = (each["hidden_state"] for each in text.encode(["a blue ring", "a teal ring"]))
    assert first.shape[1] == 32 and not torch.equal(first, second)


def test_the_same_chance_gives_the_same_scene_and_no_wave() -> None:
    (first, caption), (second, again) = (
        draw_motion(random.Random(5), (96, 64), 9) for _ in range(2)
    )
    assert first.shape == (9, 64, 96, 3) and first.dtype == np.uint8
    assert np.array_equal(first, second) and caption == again
    assert "wave" not in caption


def test_a_token_that_stands_for_all_zeros_changes_nothing() -> None:
    denoiser = WanTransformer3DModel.from_pretrained(MODEL / "transformer")
    text = torch.zeros(1, 512, 32)
    text[:, :5] = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    clip, moment = torch.randn(1, 16, 2, 4, 4), torch.tensor([600.0])
    with torch.no_grad():
        complete = denoiser(clip, moment, text).sample
        for block in denoiser.blocks:
            block.attn2.set_processor(PaddedAttention())
        short = denoiser(clip, moment, text[:, :6]).sample
        other = denoiser(clip, moment, text[:, :5]).sample
    assert torch.allclose(short, complete, atol=1e-4)
    assert not torch.allclose(other, complete, atol=1e-3)


def test_equal_seeds_give_equal_bytes_in_the_shipped_files(tmp_path: Path) -> None:
    for name in ("first", "second"):
        write_tiny_wan(tmp_path / name, vae_steps=2, transformer_steps=2)
    names = {path.relative_to(MODEL) for path in MODEL.rglob("*") if path.is_file()}
    for name in names:
        first, second = (tmp_path / each / name for each in ("first", "second"))
        assert first.read_bytes() == second.read_bytes(), name
