"""Where memory runs out the rest goes on, and no target's bytes tell of it."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from latentmake.caches.encode import carry_out
from latentmake.caches.encoders import Loaded
from latentmake.caches.encoders.load import encoder
from latentmake.caches.inputs import Sample
from latentmake.caches.job import Job
from latentmake.config import Dataset, Model
from latentmake.errors import ModelError, SourceError
from latentmake.plan.orders import WorkItem, WorkOrder
from latentmake.plan.receipts import Receipt
from order_world import Encoded, Encoder, order, put_image, silent
from test_encoders import tiny_vae
from torch.nn.modules.module import register_module_forward_hook
from wan_world import write_wan_vae

ERRORS: dict[str, tuple[type[Exception], str]] = {
    "CUDA": (torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 20.00 MiB."),
    "MPS": (RuntimeError, "MPS backend out of memory (MPS allocated: 8.94 GB, max: 9.07 GB)"),
    "MPS, one tensor": (RuntimeError, "Invalid buffer size: 20.00 GB"),
    "CPU": (RuntimeError, "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"),
    "Python": (MemoryError, ""),
}
MIDDLE = ("UNetMidBlock2D", "WanMidBlock")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=["plain", "musubi"])
def loaded(request: pytest.FixtureRequest, tmp_path: Path) -> Loaded:
    return wan(tmp_path) if request.param == "musubi" else autoencoder_kl(tmp_path)


def wan(tmp_path: Path, **settings: Any) -> Loaded:
    path = str(write_wan_vae(tmp_path / "wan")["folder"])
    return ready(Model(vae=path, text=["t5"], task="t2v-1.3B", dtype="float32", **settings))  # type: ignore[arg-type, list-item]


def autoencoder_kl(tmp_path: Path) -> Loaded:
    tiny_vae().save_pretrained(tmp_path / "vae")
    # What is encoded in tiles, if large enough, is not recorded: it has layers to look at.
    model = {"vae": str(tmp_path / "vae"), "text": ["clip"], "vae_tiling": True}
    return ready(Model.model_validate(model))


def ready(model: Model) -> Loaded:
    return encoder(work_of(model), threads=1, say=silent)._replace(size=4)


def work_of(model: Model) -> WorkOrder:
    return WorkOrder(
        kind="latents",
        dataset="cats",
        model="tiny",
        dataset_settings=Dataset(path="data"),
        model_settings=model,
        recipe={"made": "for this test"},
        items=(),
    )


def job_of(layout: str, say: Callable[[str], None] = silent) -> Job:
    model: dict[str, Any] = {"vae": "vae", "text": ["text"]}
    if layout == "musubi":
        model |= {"task": "t2v-1.3B", "dtype": "float32"}
    return Job(work_of(Model(**model)), {"made": "for this test"}, say)


def sample(number: int, layout: str, width: int = 32, height: int = 24) -> Sample:
    content = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    name = f"{number:02}"
    item = WorkItem(name, f"data/{name}.png", None, ())
    pixels = content[None] if layout == "musubi" else content
    return Sample(f"{number:064x}", "source", item, pixels, (width, height))


def encode(job: Job, loaded: Loaded, samples: list[Sample]) -> None:
    job.paths |= {each.key: str(cache_of(each)) for each in samples}
    job.encode(loaded, samples)


def cache_of(sample: Sample) -> Path:
    return Path(f"cache/{sample.item.stem}.safetensors")


@contextmanager
def memory_for(
    fits: Callable[[torch.Tensor], bool], error: tuple[type[Exception], str] = ERRORS["CUDA"]
) -> Iterator[list[weakref.ref[torch.Tensor]]]:
    """Let real encoders run out of memory half way, where what is encoded does not fit.

    Yields:
        The activations of failed encodings: all must be dead when the next one begins.
    """
    failed: list[weakref.ref[torch.Tensor]] = []

    def look(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if getattr(module, "in_channels", None) == 3:  # the first layer of an encoding
            assert [each for each in failed if each() is not None] == []
        if type(module).__name__ in MIDDLE and not fits(output):
            failed.append(weakref.ref(inputs[0]))
            raise error[0](error[1])

    handle = register_module_forward_hook(look)
    try:
        yield failed
    finally:
        handle.remove()


def layout_of(loaded: Loaded) -> str:
    return "plain" if loaded.frugal is None else "musubi"


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
def test_what_a_failed_encoding_held_is_free_when_half_as_many_are_tried(
    loaded: Loaded, error: tuple[type[Exception], str]
) -> None:
    layout, said = layout_of(loaded), list[str]()
    job = job_of(layout, said.append)
    with memory_for(lambda output: len(output) <= 1, error) as failed:
        encode(job, loaded, [sample(number, layout) for number in range(4)])
    assert len(failed) == 3  # four at once, then two pairs
    assert job.counts["encoded"] == 4 and job.failed == {}
    assert sum("half as many" in line for line in said) == 3


def test_another_error_is_not_taken_for_too_little_memory(loaded: Loaded) -> None:
    layout = layout_of(loaded)
    job, error = job_of(layout), (RuntimeError, "shapes differ")
    with memory_for(lambda _: False, error), pytest.raises(RuntimeError, match="shapes differ"):
        encode(job, loaded, [sample(0, layout), sample(1, layout)])


def made(loaded: Loaded, samples: list[Sample]) -> dict[str, bytes]:
    """Encode samples one after the other; return the bytes of their files."""
    job = job_of(layout_of(loaded))
    for each in samples:
        encode(job, loaded, [each])
    found = {each.key: cache_of(each) for each in samples}
    return {key: path.read_bytes() for key, path in found.items() if path.exists()}


def emptied(samples: list[Sample]) -> None:
    for each in samples:
        cache_of(each).unlink(missing_ok=True)


def test_what_lay_beside_it_and_how_much_memory_was_free_never_change_a_targets_bytes(
    loaded: Loaded,
) -> None:
    layout = layout_of(loaded)
    # Wider than one of Wan's tiles, so that tiles would show.
    samples = [sample(0, layout, 320), sample(1, layout, 336), sample(2, layout, 320)]
    expected: dict[str, bytes] = {}
    for each in samples:
        expected |= made(loaded, [each])
    emptied(samples)
    with memory_for(lambda output: output.shape[-1] not in (336 // 4, 336 // 8)):
        found = made(loaded, samples)
    large = samples[1].key
    assert sorted(found) == sorted(set(expected) - {large})
    assert found == {key: data for key, data in expected.items() if key != large}
    assert made(loaded, samples) == expected  # with more memory, the refused one too


def test_wans_features_on_the_cpu_change_no_byte(tmp_path: Path) -> None:
    loaded, said = wan(tmp_path), list[str]()
    clip = np.random.default_rng(5).integers(0, 256, (9, 24, 320, 3), dtype=np.uint8)
    sample_ = sample(0, "musubi")._replace(content=clip, clip=True)
    expected = made(loaded, [sample_])
    emptied([sample_])
    job = job_of("musubi", said.append)
    tried: list[int] = []
    with memory_for(lambda _: bool(tried.append(1)) or len(tried) != 2) as failed:
        encode(job, loaded, [sample_])
    assert len(failed) == 1 and len(tried) == 2 + 3  # again from the first of three chunks
    assert cache_of(sample_).read_bytes() == expected[sample_.key]
    assert [line for line in said if "less memory" in line]
    # Afterwards features lie where they lay.
    with memory_for(lambda output: True):
        assert made(loaded, [sample_]) == expected


# -- what is said ---------------------------------------------------------------------------------


class Large(Encoder):
    """Has too little memory for the items of some stems."""

    def __init__(self, *stems: str) -> None:
        super().__init__()
        self._stems = stems

    def __call__(self, samples: list[Sample]) -> Encoded:
        if any(each.item.stem in self._stems for each in samples):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().__call__(samples)


def cats(count: int) -> dict[str, Path | str]:
    return {
        f"{number:02}": put_image(Path(f"data/{number:02}.png"), (number, 2, 3))
        for number in range(count)
    }


def carry(work: WorkOrder, encoder: Encoder, **options: Any) -> Receipt:
    ready = Loaded(encoder, options.pop("batch_size", 1))
    return carry_out(work, Path("receipt.json"), say=silent, encoder=ready, **options)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_one_that_does_not_fit_alone_is_named_and_stops_no_other(batch_size: int) -> None:
    again = Large("01")
    with pytest.raises(SourceError) as caught:
        carry(order("latents", cats(5)), again, batch_size=batch_size)
    line = str(caught.value)
    assert line.startswith("1 of 5 items are faulty: data/01.png: memory does not suffice")
    assert "16 x 16 pixels" in line and "lower the resolution" in line and "\n" not in line
    assert "vae_cache_cpu" not in line  # which is about Wan
    assert "`vae_tiling: true`" in line
    assert sorted(again.stems) == ["00", "02", "03", "04"]
    receipt = carry(order("latents", cats(5)), Encoder())
    assert receipt.counts["kept"] == 4 and receipt.counts["encoded"] == 1


def test_those_that_have_no_room_side_by_side_are_encoded_one_by_one() -> None:
    encoder, both = Encoder(), threading.Barrier(2)
    calls: list[str] = []
    inside: list[str] = []
    most: list[int] = []

    def crowded(samples: list[Sample]) -> Encoded:
        stem = samples[0].item.stem
        is_first = stem not in calls
        calls.append(stem)
        if is_first:
            both.wait(60)
            raise MemoryError
        inside.append(stem)
        time.sleep(0.05)
        most.append(len(inside))
        inside.remove(stem)
        return encoder(samples)

    job, loaded = job_of("plain"), Loaded(crowded, 1, workers=2)
    with ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(encode, job, loaded, [sample(x, "plain")]) for x in range(2)]:
            each.result()
    assert job.counts["encoded"] == 2 and not job.failed
    assert most == [1, 1]


def test_of_wan_the_line_names_what_takes_less_memory(tmp_path: Path) -> None:
    for settings, names in (({}, True), ({"vae_cache_cpu": True}, False)):
        model = Model(vae="vae", text=["t5"], task="t2v-1.3B", **settings)  # type: ignore[arg-type, list-item]
        job = Job(work_of(model), {}, silent)
        encode(job, Loaded(Large("00"), 1), [sample(0, "musubi")])
        (line,) = job.failed.values()
        assert ("`vae_cache_cpu: true`" in line) == names and "1 x 24 x 32 pixels" in line


def test_a_skipped_one_is_tried_again_by_the_next_build() -> None:
    sources = cats(3)
    put_image(Path("data/02.png"), (1, 2, 3))  # the content of 01
    receipt = carry(order("latents", sources, on_error="skip"), Large("01"))
    assert sorted(fault["stem"] for fault in receipt.faults) == ["01", "02"]
    assert {fault["digest"] for fault in receipt.faults} == {""}


def test_encoders_that_do_not_fit_are_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_vae().save_pretrained("vae")

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch.nn.Module, "to", full)
    with pytest.raises(ModelError, match=r"^models.tiny: memory does not suffice") as caught:
        carry_out(order("latents", cats(1)), Path("receipt.json"), say=silent)
    assert "\n" not in str(caught.value)
