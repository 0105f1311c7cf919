"""Wan's VAE gives its normalised latents, whatever form its weights come in."""

from __future__ import annotations

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL
from latentmake.config.weights import Weights
from latentmake.encode.encoders import wan
from latentmake.encode.encoders.local_state import place
from latentmake.encode.encoders.wan import WanVae, load_wan_vae
from safetensors.torch import save_file
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook
from wan_world import (
    State,
    assert_damaged_are_refused,
    original_vae,
    refusal,
    save_original,
    tiny_wan_vae,
    write_wan_vae,
)

CPU = torch.device("cpu")
EXACT = torch.float32
ROUNDING = {"rtol": 0.0, "atol": 1e-4}
FORMS = ("folder", ".pth", ".safetensors")
MEAN = [
    -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
    0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
]  # fmt: skip
STD = [
    2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
    3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160,
]  # fmt: skip


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_wan_vae(tmp_path_factory.mktemp("wan"))


@pytest.fixture(scope="module")
def state() -> State:
    """The weights of the tiny VAE, in the original's names."""
    return original_vae(tiny_wan_vae().state_dict())


def video(frames: int, height: int = 32, width: int = 48) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (1, frames, height, width, 3), generator=generator).byte()


def loaded(path: Path, dtype: torch.dtype = EXACT, **settings: bool) -> WanVae:
    return load_wan_vae(Weights(path=str(path)), CPU, dtype, **settings)


@torch.no_grad()
def directly(pixels: torch.Tensor, dtype: torch.dtype = EXACT, first: bool = False) -> torch.Tensor:
    """Encode by diffusers alone, pixels rounded to a dtype; of the `first` frame, then grey."""
    signal = (pixels.to(dtype) / 127.5 - 1.0).float().permute(0, 4, 1, 2, 3)
    if first:
        signal[:, :, 1:] = 0
    mode = tiny_wan_vae().encode(signal).latent_dist.mode()
    mean, std = (torch.tensor(each).reshape(1, 16, 1, 1, 1) for each in (MEAN, STD))
    return (mode - mean) / std


@pytest.mark.parametrize("frames", [1, 5])
def test_all_forms_give_the_same_latents_to_the_last_bit(
    places: dict[str, Path], frames: int
) -> None:
    pixels = video(frames)
    found = [loaded(places[form]).encode(pixels, EXACT) for form in FORMS]
    assert found[0].shape == (1, 16, 1 + frames // 4, 4, 6)
    assert found[0].dtype == torch.float32
    assert found[0].std() > 0.1
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("frames", [1, 5, 9])
def test_the_first_frame_is_followed_by_grey_and_marked(
    places: dict[str, Path], frames: int
) -> None:
    pixels = video(frames)
    found = loaded(places["folder"]).encode_first_frame(pixels, EXACT)
    assert found.shape == (1, 20, 1 + frames // 4, 4, 6)
    assert torch.equal(found[:, :4, 0], torch.ones(1, 4, 4, 6))
    assert torch.equal(found[:, :4, 1:], torch.zeros(1, 4, frames // 4, 4, 6))
    torch.testing.assert_close(found[:, 4:], directly(pixels, first=True), **ROUNDING)


def test_pixels_are_rounded_to_the_stored_format_first(places: dict[str, Path]) -> None:
    vae, pixels = loaded(places["folder"]), video(1)
    found = vae.encode(pixels, torch.bfloat16)
    torch.testing.assert_close(found, directly(pixels, torch.bfloat16), **ROUNDING)
    assert not torch.equal(found, vae.encode(pixels, EXACT))


@pytest.mark.parametrize(("hip", "computed"), [("7.1", EXACT), (None, torch.bfloat16)])
def test_rocm_computes_in_float32_where_half_precision_can_overflow(
    places: dict[str, Path], monkeypatch: pytest.MonkeyPatch, hip: str | None, computed: torch.dtype
) -> None:
    def on_the_cpu(network: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        assert device.type == "cuda"
        place(network, CPU, dtype)

    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(wan, "place", on_the_cpu)
    vae = load_wan_vae(Weights(path=str(places["folder"])), torch.device("cuda"), torch.bfloat16)
    assert {each.dtype for each in vae._network.parameters()} == {computed}


@pytest.mark.parametrize("normalised", [False, True])
def test_zeros_of_a_broken_network_get_no_mask_so_that_they_are_refused(
    state: State, tmp_path: Path, normalised: bool
) -> None:
    bias = torch.zeros_like(state["conv1.bias"])
    bias[:16] = torch.tensor(MEAN) * normalised
    broken = {**state, "conv1.weight": 0 * state["conv1.weight"], "conv1.bias": bias}
    vae = loaded(save_original(broken, tmp_path / "broken")[".pth"])
    assert not vae.encode(video(5), EXACT).any()
    assert not vae.encode_first_frame(video(5), EXACT).any()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_a_first_frame_is_convolved_without_the_padding_before_it(
    places: dict[str, Path], dtype: torch.dtype, bound: float
) -> None:
    vae, pixels = loaded(places["folder"], dtype), video(9)
    expected = directly(pixels)
    found, whole = vae.encode(pixels[:, :1], EXACT), vae.encode(pixels, EXACT)
    assert (found - expected[:, :, :1]).abs().max() <= bound * expected.abs().max()
    assert (whole - expected).abs().max() <= bound * expected.abs().max()


@pytest.mark.parametrize("shape", [(2, 32, 32), (4, 32, 32), (1, 30, 32), (5, 32, 20), (0, 32, 32)])
def test_no_frame_or_edge_is_left_out_in_silence(
    places: dict[str, Path], shape: tuple[int, int, int]
) -> None:
    with pytest.raises(ValueError, match="are not 4n"):
        loaded(places["folder"]).encode(video(*shape), EXACT)


def test_other_files_serve(places: dict[str, Path], state: State, tmp_path: Path) -> None:
    file, single = "diffusion_pytorch_model.safetensors", tmp_path / "a.safetensors"
    shutil.copy(places["folder"] / file, single)  # one file in the names of diffusers
    torch.save(state, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    torch.save({"state_dict": state}, tmp_path / "wrapped.pt")
    # The configuration of a DiT beside the file is not the VAE's.
    (tmp_path / "dit").mkdir()
    beside = Path(shutil.copy(places[".pth"], tmp_path / "dit"))
    dit = {"_class_name": "WanModel", "dim": 1536}
    beside.with_name("config.json").write_text(json.dumps(dit))
    found = [loaded(x) for x in (single, tmp_path / "old.pth", tmp_path / "wrapped.pt", beside)]
    weights = Weights(path=f"{single}", config=f"{places['folder']}")
    found.append(load_wan_vae(weights, CPU, EXACT))
    expected = loaded(places["folder"]).encode(video(1), EXACT)
    assert all(torch.equal(each.encode(video(1), EXACT), expected) for each in found)


@pytest.mark.parametrize("size", [(32, 48), (264, 24), (16, 456)])
def test_tiles_change_large_pictures_alone_and_little(
    places: dict[str, Path], size: tuple[int, int]
) -> None:
    pixels = video(5, *size)
    whole = loaded(places["folder"]).encode(pixels, EXACT)
    vae = loaded(places["folder"], tiled=True)
    tiled = vae.encode(pixels, EXACT)
    assert torch.equal(tiled, whole) == (max(size) <= 256)
    # Far from the first tile's edge nothing but attention differs.
    assert functional.cosine_similarity(tiled.flatten(), whole.flatten(), dim=0) > 0.98
    pair = torch.cat([pixels, 255 - pixels])
    assert torch.equal(vae.encode(pair, EXACT)[:1], tiled)  # one sample after the other


def test_damaged_files_are_refused_in_one_line(places: dict[str, Path], tmp_path: Path) -> None:
    assert_damaged_are_refused(loaded, places, tmp_path / "damaged")


def test_the_vae_of_stable_diffusion_is_refused(tmp_path: Path) -> None:
    AutoencoderKL(block_out_channels=(8,), norm_num_groups=8).save_pretrained(tmp_path / "vae")
    assert "is AutoencoderKL, not AutoencoderKLWan" in refusal(lambda: loaded(tmp_path / "vae"))
    single = tmp_path / "vae" / "diffusion_pytorch_model.safetensors"
    assert "faults more" in refusal(lambda: loaded(single))
    weights = Weights(path=str(single), config=f"{tmp_path}/vae")
    assert "is AutoencoderKL" in refusal(lambda: load_wan_vae(weights, CPU, EXACT))


BIAS = "encoder.middle.0.residual.2.bias"
FAULTS: dict[str, tuple[State, str]] = {
    "decoder.head.2.weight": ({}, "lacks decoder.conv_out.weight"),
    "encoder.conv1.weight": ({}, "lacks encoder.conv_in.weight"),
    "encoder.downsamples.0.residual.2.weight": ({}, "lacks encoder.down_blocks.0.conv1.weight"),
    "more": ({"step": torch.ones(1)}, "holds step, which it should not"),
    "shape": (
        {BIAS: torch.ones(3)},
        "encoder.mid_block.resnets.0.conv1.bias of shape [3] instead of [32]",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_weights_that_are_missing_too_many_or_of_another_shape_are_named(
    state: State, tmp_path: Path, name: str
) -> None:
    more, fault = FAULTS[name]
    odd = {key: value for key, value in (state | more).items() if key != name}
    for path in save_original(odd, tmp_path / "odd").values():
        assert fault in refusal(lambda path=path: loaded(path))


def test_incomplete_and_other_models_are_refused(places: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(places["folder"], tmp_path / "vae")
    config = tmp_path / "vae/config.json"
    before = config.read_text()
    for mean in (["0"] * 16, [0.0] * 8):
        config.write_text(json.dumps({**json.loads(before), "latents_mean": mean}))
        assert "cannot be loaded as Wan's VAE" in refusal(lambda: loaded(tmp_path / "vae"))
    config.write_text(before)
    state = dict(tiny_wan_vae().state_dict())
    del state["encoder.conv_in.bias"]
    save_file(state, tmp_path / "vae" / "diffusion_pytorch_model.safetensors")
    weights = Weights(hub=f"{tmp_path}/vae", revision="1" * 40)
    assert "encoder.conv_in.bias" in refusal(lambda: load_wan_vae(weights, CPU, EXACT))
    state = tiny_wan_vae(z_dim=4, latents_mean=MEAN[:4], latents_std=STD[:4]).state_dict()
    path = save_original(original_vae(state), tmp_path / "narrow")[".pth"]
    assert "4 channels, not 16" in refusal(lambda: loaded(path))


def test_threads_that_encode_at_once_get_what_each_gets_alone(places: dict[str, Path]) -> None:
    vae = loaded(places["folder"])
    clips = [video(9), video(5, 48, 32), video(9, 16, 24), video(1)]
    alone = [vae.encode(clip, EXACT) for clip in clips]
    with torch.autocast("cpu", torch.bfloat16):  # nothing is left of the others, either
        assert torch.equal(vae.encode(clips[0], EXACT), alone[0])
    met = threading.Barrier(2, timeout=60)
    waited = threading.local()

    def meet(module: torch.nn.Module, inputs: object, output: object) -> None:
        """Let each thread wait in the middle of a clip until another is there too."""
        if type(module).__name__ == "WanMidBlock" and not getattr(waited, "once", False):
            waited.once = True
            met.wait()

    with ThreadPoolExecutor(2) as pool:
        handle = register_module_forward_hook(meet)
        try:
            found = list(pool.map(lambda clip: vae.encode(clip, EXACT), clips))
        finally:
            handle.remove()
    for one, other in zip(found, alone, strict=True):
        assert torch.equal(one, other)
