"""Encoding on a CUDA device: nothing waits for it, memory that runs out, batch sizes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from item_world import inputs_of
from latentmake.base.errors import DeviceError
from latentmake.config.models import Model
from latentmake.encode.encoders import device
from latentmake.encode.encoders.device import (
    download,
    free_memory,
    held_by_others,
    stacked,
    upload,
)
from latentmake.encode.reading import Loaded, Sample
from latentmake.plan.orders import Order
from order_world import carry_out, order, silent
from PIL import Image
from wan_world import write_wan_vae

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
LONG = 2_000_000_000  # cycles: about a second


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def little_memory() -> Iterator[Callable[[int], None]]:
    """Limit what torch may take of the device, in bytes besides what is in use."""
    total = torch.cuda.get_device_properties(CUDA).total_memory

    def limit(size: int) -> None:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + size) / total)

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)


def queued() -> torch.cuda.Event:
    """Give the device work for a second; return an event that is reached afterwards."""
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    done = torch.cuda.Event()
    done.record()
    return done


def pictures(count: int, side: int, frames: int = 0) -> list[Sample]:
    shape = (side, side, 3) if not frames else (frames, side, side, 3)
    return [
        Sample(
            f"{number:064x}",
            "source",
            inputs_of(f"{number:02}", None, None),
            np.random.default_rng(number).integers(0, 256, shape, dtype=np.uint8),
            (side, side),
        )
        for number in range(count)
    ]


def latents_order(model: Model, paths: dict[str, Path], side: int) -> Order:
    made = order("latents", dict(paths), parts=(str(side),))
    return replace(made, model_settings=model, recipe={"dtype": model.dtype})


def vae(dtype: str, channels: tuple[int, ...] = (32, 64, 64)) -> Model:
    torch.manual_seed(0)
    AutoencoderKL(
        block_out_channels=channels,
        down_block_types=("DownEncoderBlock2D",) * len(channels),
        up_block_types=("UpDecoderBlock2D",) * len(channels),
        latent_channels=4,
    ).save_pretrained("vae")
    return Model(vae="vae", text=["clip"], dtype=dtype)  # type: ignore[arg-type, list-item]


def wan(dtype: str) -> Model:
    path = str(write_wan_vae(Path("wan"), base_dim=16)["folder"])
    return Model(vae=path, text=["t5"], task="t2v-1.3B", dtype=dtype)  # type: ignore[arg-type, list-item]


def loaded(model: Model) -> Loaded:
    return device.encoder(latents_order(model, {}, 64), threads=2, say=silent)


def images(count: int, side: int) -> dict[str, Path]:
    found = {f"{number:03}": Path(f"data/{number:03}.png") for number in range(count)}
    Path("data").mkdir()
    for sample, path in zip(pictures(count, side), found.values(), strict=True):
        Image.fromarray(np.asarray(sample.content)).save(path)
    return found


# -- transfers ------------------------------------------------------------------------------------


def test_what_is_on_its_way_is_never_overwritten() -> None:
    arrays = [
        [np.full((256, 256, 3), (number + row) % 251, np.uint8) for row in range(4)]
        for number in range(100)
    ]
    queued()
    waits = [download([stacked(each, CUDA) + 1]) for each in arrays]
    for wait, each in zip(waits, arrays, strict=True):
        (found,) = wait()
        assert found.is_pinned()
        assert np.array_equal(found.numpy(), np.stack(each) + 1)


def test_no_copy_waits_for_the_device() -> None:
    values = torch.arange(1000)
    download([upload(values, CUDA) * 2])()  # pinned memory and the kernel are there
    done = queued()
    wait = download([upload(values, CUDA) * 2])
    assert not done.query()
    assert torch.equal(wait()[0], values * 2) and done.query()


@pytest.mark.parametrize("make", [vae, wan])
def test_an_encoder_returns_before_the_device_is_done(make: Callable[[str], Model]) -> None:
    encoder = loaded(make("bfloat16"))
    samples = pictures(2, 64, frames=int(make is wan))
    for _ in range(2):  # kernels are loaded, and memory is reserved
        list(encoder.encode(samples))
    done = queued()
    results = encoder.encode(samples)
    assert not done.query()
    assert len(list(results)) == 2 and done.query()


# -- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "difference"), [("float32", 1e-4), ("bfloat16", 3e-2), ("float16", 4e-3)]
)
@pytest.mark.parametrize("make", [vae, wan])
def test_results_are_those_of_batches_of_one(
    make: Callable[[str], Model], dtype: str, difference: float
) -> None:
    encoder = loaded(make(dtype))
    samples = pictures(8, 96, frames=int(make is wan))
    together = list(encoder.encode(samples))
    for sample, (tensors, metadata) in zip(samples, together, strict=True):
        ((alone, told),) = encoder.encode([sample])
        assert metadata == told and list(tensors) == list(alone)
        for name, value in tensors.items():
            expected = alone[name].float()
            error = (value.float() - expected).abs().max() / expected.abs().max()
            assert error < difference


def test_float32_is_not_computed_in_tf32() -> None:
    model = vae("float32")
    encoder = loaded(model)
    (sample,) = pictures(1, 64)
    (((found, _),),) = (list(encoder.encode([sample])),)
    exact = AutoencoderKL.from_pretrained("vae").double()
    signal = torch.from_numpy(np.asarray(sample.content)).permute(2, 0, 1)[None].double()
    with torch.no_grad():
        expected = exact.encode(signal / 127.5 - 1.0).latent_dist.mean[0]
    error = (found["latents"].double() - expected).abs().max() / expected.abs().max()
    assert error < 1e-5  # in TF32 it is about a hundred times as large


# -- memory and batch sizes -----------------------------------------------------------------------


def peak_of(encoder: Loaded, samples: list[Sample]) -> int:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    list(encoder.encode(samples))
    return torch.cuda.max_memory_allocated() - before


def test_memory_that_runs_out_halves_batches_and_loses_nothing(
    little_memory: Callable[[int], None],
) -> None:
    model, side = vae("float32"), 256
    work = latents_order(model, images(16, side), side)
    encoder = device.encoder(work, threads=2, say=silent)
    peak = peak_of(encoder, pictures(16, side))
    little_memory(int(0.6 * peak))
    said: list[str] = []
    fixed = encoder._replace(size=16, budget=None)
    receipt = carry_out(work, say=said.append, threads=2, encoder=fixed)
    assert receipt.counts["encoded"] == 16
    assert any("half as many" in line for line in said)


def test_batches_keep_within_the_memory_that_is_free(little_memory: Callable[[int], None]) -> None:
    model, side = vae("float32"), 256
    work = latents_order(model, images(120, side), side)
    encoder = device.encoder(work, threads=2, say=silent)
    peak = max(peak_of(encoder, pictures(1, side)) for _ in range(2))
    little_memory(12 * peak)
    (sample,) = pictures(1, side)
    limit = device.encoder(work, threads=2, say=silent).limit(sample)
    assert limit >= 1 and limit * peak < free_memory(CUDA)
    said: list[str] = []
    receipt = carry_out(work, say=said.append, threads=2)
    assert receipt.counts["encoded"] == 120
    assert not any("out of memory" in line for line in said)


OTHER = """
import sys, torch
free, _ = torch.cuda.mem_get_info()
kept = torch.empty(free - int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print("full", flush=True)
sys.stdin.read()
"""


@contextmanager
def filled(left: int) -> Iterator[None]:
    """Let another program hold the device's memory but for some bytes."""
    torch.cuda.empty_cache()
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(left)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with other:
        assert other.stdout is not None and other.stdin is not None
        assert other.stdout.readline().strip() == "full"
        yield
        other.stdin.close()


def said_by(code: str, **environment: str) -> str:
    """Return the one line that a process of its own prints."""
    scripts = str(Path(device.__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": scripts, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    return line


def skipping(work: Order) -> Order:
    settings = work.dataset_settings.model_copy(update={"on_error": "skip"})
    return replace(work, dataset_settings=settings)


def test_another_program_that_fills_the_device_makes_no_item_faulty() -> None:
    model, side = vae("float32"), 1024
    work = skipping(latents_order(model, images(12, side), side))
    encoder = device.encoder(work, threads=2, say=silent)
    list(encoder.encode(pictures(1, 64)))  # the libraries have their workspaces
    with filled(64 << 20):
        held, total = held_by_others()
        assert held > 0.5 * total
        with pytest.raises(DeviceError, match="not enough memory") as caught:
            carry_out(work, say=silent, threads=2, encoder=encoder)
        assert "\n" not in str(caught.value) and not work.receipt.exists()
    receipt = carry_out(work, say=silent, threads=2, encoder=encoder)
    assert receipt.counts["encoded"] + receipt.counts["kept"] == 12 and receipt.faults == []


def test_an_item_too_large_for_a_device_of_its_own_is_faulty_and_stops_no_other(
    little_memory: Callable[[int], None],
) -> None:
    model = vae("float32")
    work = skipping(latents_order(model, images(4, 256), 256))
    (large,) = latents_order(model, {"large": Path("data/000.png")}, 1024).items
    encoder = device.encoder(work, threads=2, say=silent)
    peak = peak_of(encoder, pictures(1, 256))
    held, total = held_by_others()
    if held > total // 4:
        pytest.skip("other programs hold much of the device")
    little_memory(3 * peak)
    both = replace(work, items=(large, *work.items))
    receipt = carry_out(both, say=silent, threads=2, encoder=encoder)
    assert [fault["stem"] for fault in receipt.faults] == ["large"]
    assert receipt.counts["encoded"] == 4


def test_a_context_that_is_dead_stops_the_job_in_one_line() -> None:
    """An assertion on the device ends its context: in a process of its own."""
    code = """
import torch
from latentmake.encode.encoders.device import attempt
from latentmake.base.errors import DeviceError
try:
    attempt(lambda: torch.zeros(2, device="cuda")[torch.tensor([5], device="cuda")].cpu())
except DeviceError as error:
    print(error)
"""
    assert said_by(code).startswith("GPU: CUDA error: ")


def test_a_gpu_that_is_hidden_from_torch_alone_is_refused() -> None:
    code = """
from latentmake.encode.encoders.device import pick_device
from latentmake.base.errors import DeviceError
try:
    print(pick_device().type)
except DeviceError as error:
    print(error)
"""
    assert said_by(code, CUDA_VISIBLE_DEVICES="99").startswith("GPU 99: torch ")
    assert said_by(code, CUDA_VISIBLE_DEVICES="") == "cpu"


def test_a_job_keeps_the_device_busy() -> None:
    model, side = vae("bfloat16", (128, 256, 512, 512)), 512
    work = latents_order(model, images(96, side), side)
    encoder = device.encoder(work, threads=8, say=silent)
    busy: list[Callable[[], float]] = []

    def encode(samples: list[Sample]) -> Any:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        encoded = encoder.encode(samples)
        ended.record()
        busy.append(lambda: began.elapsed_time(ended) / 1000)
        return encoded

    watched = encoder._replace(encode=encode)
    receipt = carry_out(work, say=silent, threads=8, encoder=watched)
    assert sum(seconds() for seconds in busy) > 0.3 * receipt.seconds
