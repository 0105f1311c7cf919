"""A recorded network gives the network's own bits, or is not used."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from exact_world import narrow_vae
from latentmake.caches.encoders import recorded
from latentmake.caches.encoders.recorded import Recorded

SHAPES = [(64, 64), (96, 72), (40, 104)]


@pytest.fixture(autouse=True)
def _however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "_FIRST", 1e9)
    monkeypatch.setattr(recorded, "_LATER", 1e9)


def pictures(count: int) -> list[torch.Tensor]:
    dice = torch.Generator().manual_seed(0)
    sizes = [SHAPES[number % len(SHAPES)] for number in range(count)]
    return [torch.rand((1, 3, *size), generator=dice) * 2 - 1 for size in sizes]


@pytest.mark.parametrize("flux", [False, True])
def test_a_recorded_vae_gives_its_own_bits_in_threads_too(flux: bool) -> None:
    vae = narrow_vae(flux=flux)
    network = Recorded(vae.encoder)
    layers: list[str] = []
    vae.encoder.register_forward_hook(lambda *_: layers.append(threading.current_thread().name))
    images = pictures(18)
    with torch.inference_mode():
        expected = [vae.encoder(image) for image in images]
    del layers[:]

    @torch.inference_mode()
    def encode(image: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = network(image)
        return found

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(encode, images))
    assert all(map(torch.equal, found, expected))
    assert len(layers) < len(images)  # the others were the recording's


class Different(torch.nn.Module):
    """What it does depends on its input, which no recording tells."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values * 2 if bool(values.sum() > 0) else values * 3


def test_what_a_recording_does_otherwise_is_left_to_the_network() -> None:
    network = Recorded(Different())
    for sign in (1, -1):
        values = torch.full((1, 3), float(sign))
        assert torch.equal(network(values), Different()(values))
    assert torch.equal(network(torch.ones(1, 3)), torch.ones(1, 3) * 2)


def test_a_slow_network_is_never_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "_FIRST", 0.0)
    monkeypatch.setattr(recorded, "_LATER", 0.0)
    calls: list[int] = []
    network = Recorded(torch.nn.Identity())
    network.network.register_forward_hook(lambda *_: calls.append(1))
    for _ in range(3):
        network(torch.ones(1, 2))
    assert len(calls) == 3
