"""Where memory runs out the rest goes on, and no target's bytes tell of it."""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from item_world import inputs_of
from latentmake.base.errors import DeviceError, SourceError
from latentmake.config.datasets import Dataset
from latentmake.config.models import Model
from latentmake.encode.encoders.device import encoder
from latentmake.encode.job import Job
from latentmake.encode.pipeline import Pipeline
from latentmake.encode.reading import Loaded, Sample
from latentmake.formats.safetensors import parse_head
from latentmake.plan.orders import Order
from latentmake.plan.receipts import Receipt
from order_world import Encoded, Encoder, carry_out, order, put_image, silent, target
from sdscripts_world import tiny_vae
from torch.nn.modules.module import register_module_forward_hook
from wan_world import write_wan_vae

Error = tuple[type[Exception], str]
ERRORS: dict[str, Error] = {
    "CUDA": (torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 20.00 MiB."),
    "MPS": (RuntimeError, "MPS backend out of memory (MPS allocated: 8.94 GB, max: 9.07 GB)"),
    "Python": (MemoryError, ""),
}
MIDDLE = ("UNetMidBlock2D", "WanMidBlock")
HELD = "latentmake.encode.encoders.device.held_by_others"
IDLE, CROWDED = (1_000_000_000, 80_000_000_000), (70_000_000_000, 80_000_000_000)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(HELD, lambda: IDLE)  # whatever else this machine does


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
    return encoder(order_for(model), threads=1, say=silent)._replace(size=4)


def order_for(model: Model) -> Order:
    return Order("latents", "cats", "tiny", Dataset(path="data"), model, {"made": "here"}, ())


def job_of(loaded: Loaded | None = None, say: Callable[[str], None] = silent) -> Job:
    """Return a job of the layout that an encoder is for."""
    model: dict[str, Any] = {"vae": "vae", "text": ["text"]}
    if is_wan(loaded):
        model |= {"task": "t2v-1.3B", "dtype": "float32"}
    return Job(order_for(Model(**model)), say)


def is_wan(loaded: Loaded | None) -> bool:
    return loaded is not None and loaded.frugal is not None


def sample(number: int, width: int = 32, *, wan: bool = False) -> Sample:
    content = np.random.default_rng(number).integers(0, 256, (24, width, 3), dtype=np.uint8)
    item = inputs_of(f"{number:02}", f"data/{number:02}.png", None)
    return Sample(f"{number:064x}", "source", item, content[None] if wan else content, (width, 24))


def encode(job: Job, loaded: Loaded, samples: list[Sample]) -> dict[str, bytes]:
    """Encode samples as one job does; return the bytes of their files, which are then gone."""
    files = {each.key: Path(f"cache/{each.item.stem}.safetensors") for each in samples}
    job.paths |= {key: str(path) for key, path in files.items()}
    with Pipeline(lambda _: loaded, job.say) as pipeline:
        for each in samples:
            pipeline.add(each, job)
    found = {key: path.read_bytes() for key, path in files.items() if path.exists()}
    for key in found:
        files[key].unlink()
    return found


def made(loaded: Loaded, samples: list[Sample]) -> dict[str, bytes]:
    """Encode samples one after the other, each alone."""
    job = job_of(loaded)
    return {key: data for x in samples for key, data in encode(job, loaded, [x]).items()}


@contextmanager
def memory_for(
    fits: Callable[[torch.Tensor], bool], error: Error = ERRORS["CUDA"]
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


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
def test_what_a_failed_encoding_held_is_free_when_half_as_many_are_tried(
    loaded: Loaded, error: Error
) -> None:
    said, four = list[str](), [sample(number, wan=is_wan(loaded)) for number in range(4)]
    job = job_of(loaded, said.append)
    with memory_for(lambda output: len(output) <= 1, error) as failed:
        encode(job, loaded, four)
    assert len(failed) == 2  # four at once, then a pair; the other pair is not tried
    assert job.counts["encoded"] == 4 and job.failed == {}
    assert sum("half as many" in line for line in said) == 2
    other = (RuntimeError, "shapes differ")
    with memory_for(lambda _: False, other), pytest.raises(RuntimeError, match="shapes differ"):
        encode(job, loaded, four[:2])


def test_what_lay_beside_it_and_how_much_memory_was_free_never_change_a_targets_bytes(
    loaded: Loaded,
) -> None:
    # Wider than one of Wan's tiles, so that tiles would show.
    widths = enumerate((320, 336, 320))
    samples = [sample(number, width, wan=is_wan(loaded)) for number, width in widths]
    expected: dict[str, bytes] = {}
    for each in samples:
        expected |= made(loaded, [each])
    with memory_for(lambda output: output.shape[-1] not in (336 // 4, 336 // 8)):
        found = made(loaded, samples)
    large = samples[1].key
    assert found == {key: data for key, data in expected.items() if key != large}
    assert made(loaded, samples) == expected  # with more memory, the refused one too


def test_wans_features_on_the_cpu_change_no_byte(tmp_path: Path) -> None:
    loaded, said, tried = wan(tmp_path), list[str](), list[int]()
    clip = np.random.default_rng(5).integers(0, 256, (9, 24, 320, 3), dtype=np.uint8)
    film = sample(0)._replace(content=clip)
    expected = made(loaded, [film])
    said_size = {"width": "320", "height": "24", "frame_count": "9"}
    assert said_size.items() <= parse_head(*expected.values()).metadata.items()
    with memory_for(lambda _: bool(tried.append(1)) or len(tried) not in (2, 4)) as failed:
        found = encode(job_of(loaded, said.append), loaded, [film])
    assert len(failed) == 2 and len(tried) == 2 + 2 + 3  # again from the first of three chunks
    assert found == expected and [line for line in said if "less memory" in line]
    # Afterwards features lie where they lay.
    with memory_for(lambda output: True):
        assert made(loaded, [film]) == expected


class Short(Encoder):
    """Has too little memory for some samples."""

    def __init__(self, fails: Callable[[Sample], bool], error: Error = ERRORS["CUDA"]) -> None:
        super().__init__()
        self._fails, self._error, self.tried = fails, error, 0

    def __call__(self, samples: list[Sample]) -> Encoded:
        self.tried += 1
        if any(map(self._fails, samples)):
            raise self._error[0](self._error[1])
        return super().__call__(samples)


def is_large(sample: Sample) -> bool:
    return sample.shape[0] > 16


def cats(count: int) -> dict[str, Path | str]:
    return {
        f"{number:02}": put_image(Path(f"data/{number:02}.png"), (number, 2, 3))
        for number in range(count)
    }


def latents(sources: dict[str, Path | str], *large: str, **dataset: Any) -> Order:
    """Return an order for latents of 16 x 16 pixels, of some images 32 x 32."""
    work = order("latents", sources, **dataset)
    items = (
        each._replace(targets=(target(each.item.stem, "32"),)) if each.item.stem in large else each
        for each in work.items
    )
    return replace(work, items=tuple(items))


def carry(work: Order, encoder: Encoder, **options: Any) -> Receipt:
    ready = Loaded(encoder, options.pop("batch_size", 1))
    options.setdefault("say", silent)
    return carry_out(work, encoder=ready, **options)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_one_that_does_not_fit_alone_is_named_and_stops_no_other(batch_size: int) -> None:
    again = Short(is_large)
    with pytest.raises(SourceError) as caught:
        carry(latents(cats(5), "01"), again, batch_size=batch_size)
    line = str(caught.value)
    assert line.startswith("1 of 5 items are faulty: data/01.png: not enough memory")
    words = ("32 x 32 pixels", "lower the resolution", "CUDA out of memory", "`vae_tiling: true`")
    assert all(word in line for word in words) and "\n" not in line
    assert "vae_cache_cpu" not in line  # which is about Wan
    assert sorted(again.stems) == ["00", "02", "03", "04"]
    put_image(Path("data/00.png"), (1, 2, 3))  # the content of 01
    work = latents(cats(5) | {"00": Path("data/01.png")}, "00", "01", on_error="skip")
    faults = carry(work, Short(is_large)).faults
    assert {(fault["stem"], fault["digest"]) for fault in faults} == {("00", ""), ("01", "")}
    receipt = carry(latents(cats(5), "01"), Encoder())
    assert receipt.counts["kept"] == 4 and receipt.counts["encoded"] == 1


@pytest.mark.parametrize("error", [ERRORS["CUDA"], ERRORS["Python"]], ids=["CUDA", "Python"])
@pytest.mark.parametrize("memory", [IDLE, CROWDED], ids=["idle", "crowded"])
def test_a_device_that_runs_out_of_memory_stops_the_job_and_no_item_is_faulty(
    error: Error, memory: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HELD, lambda: memory)
    work = latents(cats(12), on_error="skip")
    with pytest.raises(DeviceError) as caught:
        carry(work, Short(lambda each: each.item.stem >= "04", error))
    line = str(caught.value)
    assert line.startswith("data/04.png: not enough memory")
    assert "one as large was encoded before" in line and "\n" not in line
    assert (error[1] or "MemoryError") in line  # the library's words
    assert not work.receipt.exists()
    receipt = carry(work, Encoder())
    assert receipt.counts["kept"] == 4 and receipt.counts["encoded"] == 8
    assert receipt.faults == []


@pytest.mark.parametrize("memory", [IDLE, CROWDED], ids=["idle", "crowded"])
def test_a_huge_item_stops_no_job_wherever_smaller_ones_are_encoded_after_it(
    memory: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HELD, lambda: memory)
    for large in ("00", "04"):
        work, encoder = latents(cats(5), large, on_error="skip"), Short(is_large)
        assert [fault["stem"] for fault in carry(work, encoder).faults] == [large]
        for path in Path("cache").rglob("*.*"):
            path.unlink()
        assert sorted({*encoder.stems}) == sorted({*cats(5)} - {large})
    again = Short(lambda _: again.tried <= 6)  # memory that comes back costs no item
    receipt = carry(latents(cats(5), on_error="skip"), again)
    assert receipt.faults == [] and sorted(again.stems) == ["00", "01", "02", "03", "04"]


@pytest.mark.parametrize(("count", "memory"), [(2, IDLE), (2, CROWDED), (30, CROWDED)])
def test_where_no_item_fits_none_is_blamed(
    count: int, memory: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HELD, lambda: memory)
    work, full = latents(cats(count), on_error="skip"), Short(lambda _: True)
    with pytest.raises(DeviceError, match="no smaller one was encoded") as caught:
        carry(work, full)
    assert ("other programs hold 70.0 of 80.0 GB" in str(caught.value)) == (memory == CROWDED)
    assert full.tried <= 30 and not work.receipt.exists()
    if memory == CROWDED and count == 2:  # a huge last item, after which no other fits any more
        full = Short(lambda _: full.tried > 4)
        with pytest.raises(DeviceError, match=r"^data/04.png: .*does not fit any more"):
            carry(latents(cats(5), "04", on_error="skip"), full)


def test_items_that_an_earlier_build_skipped_stop_no_later_one() -> None:
    for stems in ("00", "01", "02", "03"), ("01", "03"):
        sources = {stem: cats(4)[stem] for stem in stems}
        receipt = carry(latents(sources, "01", "03", on_error="skip"), Short(is_large))
        assert sorted(fault["stem"] for fault in receipt.faults) == ["01", "03"]
        lock = Path("runs/first/dataset.lock")
        lock.parent.mkdir(parents=True, exist_ok=True)
        lock.write_text(json.dumps({"digest": "", "aside": {"cats": receipt.faults}}))


@pytest.mark.parametrize(
    ("words", "stem"),
    [
        ("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might", "02"),
        ("CUDA error: no kernel image is available for execution on the device", "02"),
        ("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", "02"),
        ("GET was unable to find an engine to execute this computation", "00"),
    ],
)
def test_a_device_in_error_stops_the_job_in_one_line(words: str, stem: str) -> None:
    broken = Short(lambda each: each.item.stem >= stem, (RuntimeError, words))
    work = latents(cats(5), on_error="skip")
    with pytest.raises(DeviceError) as caught:
        carry(work, broken)
    assert words.splitlines()[0] in str(caught.value) and "\n" not in str(caught.value)
    assert not work.receipt.exists()


def test_those_that_have_no_room_side_by_side_are_encoded_one_by_one() -> None:
    encoder, both = Encoder(), threading.Barrier(2)
    calls, inside, most = list[str](), list[str](), list[int]()

    def crowded(samples: list[Sample]) -> Encoded:
        stem = samples[0].item.stem
        calls.append(stem)
        if calls.count(stem) == 1:
            both.wait(60)
            raise MemoryError
        inside.append(stem)
        time.sleep(0.05)
        most.append(len(inside))
        inside.remove(stem)
        return encoder(samples)

    job = job_of()
    encode(job, Loaded(crowded, 1, workers=2), [sample(number) for number in range(2)])
    assert job.counts["encoded"] == 2 and not job.failed
    assert most == [1, 1]


def test_of_wan_the_line_names_what_takes_less_memory(tmp_path: Path) -> None:
    for settings, names in (({}, True), ({"vae_cache_cpu": True}, False)):
        model = Model(vae="vae", text=["t5"], task="t2v-1.3B", **settings)  # type: ignore[arg-type, list-item]
        job = Job(order_for(model), silent)
        encode(job, Loaded(Short(lambda _: True), 1), [sample(0, wan=True)])
        (line,) = job.failed.values()
        assert ("`vae_cache_cpu: true`" in line) == names and "1 x 24 x 32 pixels" in line


def test_encoders_that_do_not_fit_are_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_vae().save_pretrained("vae")

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch.nn.Module, "to", full)
    with pytest.raises(DeviceError, match=r"^models.tiny: not enough memory") as caught:
        carry_out(order("latents", cats(1)), say=silent)
    assert "\n" not in str(caught.value)
