"""Text encoders on a CUDA device: batches give what captions alone give, and no launch waits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)

from exact_world import TOLERANCE, error
from latentmake.config.weights import TextWeights
from latentmake.encode.encoders.text import TextEncoders, load_umt5, text_encoders
from text_world import letters, make_texts, model_of
from wan_world import write_umt5

CUDA = torch.device("cuda")
CAPTIONS = [letters(length) for length in (0, 3, 9, 20, 31, 40, 60, 200)]
LONG = 2_000_000_000  # ticks, about a second


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    make_texts(folder)
    write_umt5(folder / "wan")
    return folder


def umt5(root: Path, dtype: torch.dtype) -> TextEncoders:
    folder = root / "wan"
    weights = TextWeights(path=f"{folder}/text_encoder", tokenizer=f"{folder}/tokenizer")
    return TextEncoders({"umT5": load_umt5(weights, CUDA, dtype)})


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_batch_differs_from_captions_alone_by_less_than_the_tolerance(
    root: Path, dtype: torch.dtype, count: int
) -> None:
    for architecture, settings in (("sdxl", {}), ("flux", {}), (None, {"kinds": ("clip", "t5")})):
        encoders = text_encoders(model_of(root, architecture, **settings), CUDA, dtype)
        for caption, found in zip(CAPTIONS, encoders.encode(CAPTIONS[:count]), strict=False):
            (alone,) = encoders.encode([caption])
            for name, value in found.items():
                assert value.shape == alone[name].shape
                assert error(value, alone[name].double()) < TOLERANCE[dtype]
    wan = umt5(root, dtype)
    bound = TOLERANCE[torch.bfloat16]  # in which its results are stored
    for caption, found in zip(CAPTIONS, wan.encode(CAPTIONS[:count]), strict=False):
        (alone,) = (each.double() for each in wan.encode([caption])[0].values())
        assert error(*found.values(), alone) < bound


@pytest.mark.parametrize("captions", [CAPTIONS, CAPTIONS[3:4] * 4], ids=["padded", "equal"])
def test_captions_are_queued_before_the_device_is_done(root: Path, captions: list[str]) -> None:
    plain = text_encoders(model_of(root, None, kinds=("clip", "t5")), CUDA, torch.bfloat16)
    wan = umt5(root, torch.bfloat16)
    for queue in (plain.queue, wan.queue):
        queue(captions)()  # kernels are loaded, and memory is reserved
        torch.cuda.synchronize()
        torch.cuda._sleep(LONG)
        done = torch.cuda.Event()
        done.record()
        wait = queue(captions)
        assert not done.query()
        assert len(wait()) == len(captions) and done.query()
