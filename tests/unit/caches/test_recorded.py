"""A recorded network gives the network's own bits, or is not used."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from exact_world import error, narrow_vae
from latentmake.caches.encoders import recorded
from latentmake.caches.encoders.recorded import Recorded, by_onednn, pictures_at_once

SHAPES = [(64, 64), (96, 72), (40, 104)]


@pytest.fixture(autouse=True)
def _however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "_FIRST", 1e9)
    monkeypatch.setattr(recorded, "_LATER", 1e9)


def pictures(count: int) -> list[torch.Tensor]:
    dice = torch.Generator().manual_seed(0)
    sizes = [SHAPES[number % len(SHAPES)] for number in range(count)]
    return [torch.rand((1, 3, *size), generator=dice) * 2 - 1 for size in sizes]


def batches(size: tuple[int, int], *counts: int) -> list[torch.Tensor]:
    dice = torch.Generator().manual_seed(1)
    return [torch.rand((count, 3, *size), generator=dice) * 2 - 1 for count in counts]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("size", [*SHAPES, (128, 128)])
def test_small_pictures_in_batches_have_the_bits_that_they_have_alone(
    size: tuple[int, int], attention: bool
) -> None:
    vae = narrow_vae(attention=attention)
    by_onednn(vae)
    network = Recorded(torch.nn.Sequential(vae.encoder, vae.quant_conv))
    calls: list[int] = []
    vae.encoder.register_forward_hook(lambda _, given, __: calls.append(len(given[0])))
    with torch.inference_mode():
        for values in batches(size, 4, 4, 3, 2, 5, 1, 4):
            alone = torch.cat([vae.quant_conv(vae.encoder(row[None])) for row in values])
            assert torch.equal(network(values), alone)
    assert {*calls} == {1}


def test_batches_are_encoded_together_where_bits_stay_equal() -> None:
    network = Recorded(torch.nn.Tanh())
    for values in batches((8, 8), 4, 4, 3, 1):
        assert torch.equal(network(values), values.tanh())
    together = torch.Size((pictures_at_once((8, 8, 3)), 3, 8, 8))
    assert together[0] > 1 and network._is_equal[together]
    assert pictures_at_once((256, 256, 3)) == 1


def test_what_a_batch_does_otherwise_is_done_alone() -> None:
    class Mixing(torch.nn.Module):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return values - values.mean(dim=0)

    network = Recorded(Mixing())
    for values in batches((8, 8), 4, 4, 1):
        assert torch.equal(network(values), torch.zeros_like(values))


def test_onednn_is_as_exact_as_torch() -> None:
    vae, (values,) = narrow_vae(), batches((64, 64), 4)
    exact = copy.deepcopy(vae.encoder).double()(values.double()).detach()
    before = error(vae.encoder(values).detach(), exact)
    by_onednn(vae)
    assert error(vae.encoder(values).detach(), exact) < 2 * before + 1e-6


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
