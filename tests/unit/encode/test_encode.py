"""Orders are carried out once, whatever befalls them; one bad source stops no other.

Orders that one process carries out share a GPU, and the account of its time names the bottleneck.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from item_world import inputs_of
from latentmake.base import atomic, digest
from latentmake.base.digest import source_stat, target_stat
from latentmake.base.errors import ModelError, SourceError
from latentmake.encode import pipeline
from latentmake.encode import runner as encode
from latentmake.encode.job import Job
from latentmake.encode.pipeline import Pipeline
from latentmake.encode.reading import Loaded, Reading, Sample
from latentmake.formats import cachefile
from latentmake.formats.media import probe_image
from latentmake.plan import store
from latentmake.plan.orders import Order, Work
from latentmake.plan.receipts import Receipt, read_receipt
from order_world import Encoder, carry_out, key_of, order, put_image, silent, target, whole_numbers
from safetensors import safe_open
from safetensors.torch import load_file

pytestmark = pytest.mark.usefixtures("own_folder")


def cats(count: int, **options: Any) -> dict[str, Path | str]:
    return {
        f"{number:02}": put_image(Path(f"data/{number:02}.png"), (number, 2, 3), **options)
        for number in range(count)
    }


def carry(work: Order, encoder: Any, **options: Any) -> Receipt:
    return carry_out(work, encoder=Loaded(encoder, options.pop("batch_size", 1)), **options)


def cache_of(stem: str, part: str = "16") -> Path:
    return Path(target(stem, part).path)


def into_store(path: Path) -> Path:
    """Move a cache file to where a build keeps what it replaces."""
    place = store.stored(cachefile.read_header(path).key)
    place.parent.mkdir(parents=True, exist_ok=True)
    return path.rename(place)


def caches() -> list[str]:
    return sorted(path.name.split(".")[0] for path in Path("cache").rglob("*.safetensors"))


def test_a_target_holds_the_tensors_and_says_what_they_were_made_from() -> None:
    work = order("latents", cats(1), parts=("16", "32"))
    carry(work, Encoder())
    for part, side in (("16", 2), ("32", 4)):
        path = cache_of("00", part)
        latents = load_file(path)["latents"]
        assert latents.shape == (4, side, side)
        assert latents[:, 0, 0].tolist() == [0, 64 * 2, 64 * 3, 1]
        source = digest.of_file(Path("data/00.png"))
        header = cachefile.read_header(path)
        assert header.source == source
        assert header.recipe == digest.of_value(work.recipe)
        assert header.key == key_of(work, Path("data/00.png"), part)
        with safe_open(path, "pt") as file:
            assert file.metadata()["made"] == "here"


def test_a_receipt_says_what_was_read_written_and_counted() -> None:
    receipt = carry(order("latents", cats(2)), Encoder())
    assert receipt.counts == {"encoded": 2, "spooled": 0, "linked": 0, "kept": 0}
    assert receipt.faults == []
    for stem in ("00", "01"):
        image, cache = Path(f"data/{stem}.png"), cache_of(stem)
        size = probe_image(str(image))[:2]
        expected = [*source_stat(image.stat()), digest.of_file(image), *size, True]
        assert [*receipt.sources[str(image)]] == expected
        key = cachefile.read_header(cache).key
        assert [*receipt.targets[str(cache)]] == [*target_stat(cache.stat()), key]


def test_a_mark_of_kept_tags_that_is_encoded_is_told_once() -> None:
    said = list[str]()
    captions = {stem: f"sks cat ||| {stem}" for stem in "abcd"} | {"e": "a dog"}
    for stem, text in captions.items():
        Path("data").mkdir(exist_ok=True)
        Path(f"data/{stem}.txt").write_text(text)
    work = order("text", {stem: Path(f"data/{stem}.txt") for stem in captions})
    encode.carry_out([work], say=said.append, load=lambda _: Loaded(Encoder()))
    (line,) = [line for line in said if "|||" in line]
    assert line.startswith("warning: 4 captions hold `|||`, which is encoded as it stands: data/a.")
    assert "data/c.txt ...; remove it, or set `keep_tokens_separator`" in line


def test_a_job_that_died_leaves_what_it_finished_and_stored_targets_are_linked() -> None:
    work = order("latents", cats(5))

    def dies(sample: Sample, tensor: torch.Tensor) -> torch.Tensor:
        if sample.item.stem == "03":
            raise KeyboardInterrupt
        return tensor

    with pytest.raises(KeyboardInterrupt):
        carry(work, Encoder(dies))
    assert caches() == ["00", "01", "02"]
    into_store(cache_of("00"))
    again = Encoder()
    counts = carry(work, again).counts
    assert counts == {"encoded": 2, "spooled": 1, "linked": 0, "kept": 2}
    assert again.stems == ["03", "04"] and caches() == ["00", "01", "02", "03", "04"]


def test_what_another_build_takes_from_the_store_at_the_last_moment_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put_image(Path("data/same.png"), (0, 2, 3))  # the content of 00
    sources = {**cats(3), "same": Path("data/same.png")}
    work, link = order("latents", sources, parts=("16", "32")), atomic.link
    carry(work, Encoder())
    before = {path: path.read_bytes() for path in Path("cache").rglob("*.*")}
    for path in before:
        into_store(path)
    taken: list[Path] = []

    def another_build_tidies(existing: Path, path: Path) -> None:
        if not taken and path == cache_of("01", "16"):
            taken.extend(store.STORE.iterdir())
            for each in taken:
                each.unlink()
        link(existing, path)

    monkeypatch.setattr(atomic, "link", another_build_tidies)
    receipt = carry(work, encoder := Encoder())
    assert taken
    assert len(receipt.targets) == 8
    assert sorted(encoder.stems) == ["01", "01", "02", "02"]  # 00 stands, under its names
    assert {path: path.read_bytes() for path in before} == before
    for name, (*_, key) in receipt.targets.items():
        assert cachefile.read_header(name).key == key


def test_equal_content_is_encoded_once_and_linked() -> None:
    sources: dict[str, Path | str] = {
        stem: put_image(Path(f"data/{stem}.png"), (9, 9, 9)) for stem in "abc"
    }
    encoder = Encoder()
    receipt = carry(order("latents", sources, parts=("16", "32")), encoder, threads=2)
    assert sorted(encoder.stems) == ["a", "a"] and receipt.counts["encoded"] == 2
    assert cache_of("a").samefile(cache_of("b")) and cache_of("a").samefile(cache_of("c"))
    assert not cache_of("a").samefile(cache_of("a", "32"))
    assert sum(receipt.counts.values()) == 6


def spoil(path: Path) -> str:
    path.write_bytes(b"no image at all")
    return f"{path}: is not an image that can be read (JPEG, PNG, WebP, BMP, TIFF, GIF or AVIF)"


def test_a_bad_image_is_named_and_the_others_are_finished() -> None:
    sources, said, encoder = cats(4), list[str](), Encoder()
    fault = spoil(Path("data/01.png"))
    Path("data/02.png").unlink()
    with pytest.raises(SourceError) as caught:
        carry(order("latents", sources), encoder, say=said.append)
    line = str(caught.value)
    assert line.startswith("2 of 4 items are faulty: ") and fault in line
    assert "data/02.png: cannot be read (No such file or directory)" in line
    assert "run the same command" in line and "\n" not in line
    assert any(fault in each for each in said)
    assert encoder.stems == ["00", "03"]
    cats(4)
    assert carry(order("latents", sources), Encoder()).counts["kept"] == 2


def test_where_bad_items_are_skipped_the_receipt_names_them_and_the_others_stand() -> None:
    def change(sample: Sample, tensor: torch.Tensor) -> torch.Tensor:
        bad = sample.item.stem == "00" and tensor.shape[1] == 4
        return torch.zeros_like(tensor) if bad else tensor

    sources = cats(3)
    spoil(Path("data/01.png"))
    work = order("latents", sources, parts=("16", "32"), on_error="skip")
    receipt = carry(work, Encoder(change))
    assert caches() == ["00", "02", "02"]  # the good one of 00 is found fresh when it is asked for
    unread, zeros = sorted(receipt.faults, key=lambda each: each["stem"], reverse=True)
    assert zeros["stem"] == "00"
    assert (unread["stem"], unread["path"]) == ("01", "data/01.png")
    assert unread["digest"] == digest.of_bytes(b"no image at all")
    assert unread["recipe"] == digest.of_value(work.recipe)
    assert (unread["dataset"], unread["model"], unread["kind"]) == ("cats", "tiny", "latents")
    assert "data/01.png: is not an image" in unread["line"]


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", "is an empty caption"),
        (b" \n", "is an empty caption"),
        (b"ok\xff", "not UTF-8 (byte 3)"),
    ],
)
def test_a_bad_caption_is_named(data: bytes, fault: str) -> None:
    Path("data").mkdir()
    Path("data/a.txt").write_bytes(data)
    Path("data/b.txt").write_text("good")
    with pytest.raises(SourceError, match=r"data/a\.txt") as caught:
        carry(order("text", {"a": Path("data/a.txt"), "b": Path("data/b.txt")}), Encoder())
    assert fault in str(caught.value)


def test_a_caption_of_spaces_is_not_told_as_edited_since_the_plan() -> None:
    Path("data").mkdir()
    Path("data/a.txt").write_bytes(b" \n")
    said, work = list[str](), order("text", {"a": Path("data/a.txt")})
    planned = tuple(row._replace(content=digest.of_bytes(b"")) for row in work.items)
    with pytest.raises(SourceError, match="is an empty caption"):
        carry(dataclasses.replace(work, items=planned), Encoder(), say=said.append)
    assert not any("was edited" in line for line in said)


def test_an_empty_caption_may_be_allowed_or_be_none_at_all() -> None:
    Path("data").mkdir()
    Path("data/a.txt").touch()
    carry(order("text", {"a": Path("data/a.txt")}, empty_caption="allow"), Encoder())
    carry(order("text", {"b": ""}), Encoder())
    assert torch.equal(load_file(cache_of("a", "text"))["latents"], whole_numbers(""))
    assert cachefile.read_header(cache_of("a", "text")) == cachefile.read_header(
        cache_of("b", "text")
    )


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (0.0, "nothing but zeros"),
        (float("nan"), "NaN or infinity"),
        (float("inf"), "NaN or infinity"),
    ],
)
def test_values_that_no_encoder_should_give_are_refused_and_never_written(
    value: float, fault: str
) -> None:
    def change(sample: Sample, tensor: torch.Tensor) -> torch.Tensor:
        if sample.item.stem != "01":
            return tensor
        return torch.zeros_like(tensor) if value == 0 else torch.where(tensor == 1, value, tensor)

    work = order("latents", cats(3))
    with pytest.raises(SourceError) as caught:
        carry(work, Encoder(change), batch_size=2)
    assert "data/01.png: the encoder returned" in str(caught.value)
    assert fault in str(caught.value)
    assert "; check the image and the weights" in str(caught.value)  # float32 has it already
    assert caches() == ["00", "02"]
    assert not store.STORE.exists()


@pytest.mark.parametrize("threads", [1, 3])
def test_no_batch_is_larger_than_asked_or_of_two_shapes(threads: int) -> None:
    encoder = Encoder()
    work = order("latents", cats(11), parts=("16", "32", "48"))
    assert carry(work, encoder, batch_size=4, threads=threads).counts["encoded"] == 33
    assert max(map(len, encoder.batches)) == 4
    assert all(len({shape for _, shape in batch}) == 1 for batch in encoder.batches)
    assert sorted(encoder.stems) == sorted([f"{number:02}" for number in range(11)] * 3)
    # Only what was left at the end makes a smaller batch.
    assert len(encoder.batches) == 9


def samples_alive() -> list[Sample]:
    return [each for each in gc.get_objects() if type(each) is Sample]


def test_pictures_of_many_shapes_do_not_pile_up() -> None:
    sources: dict[str, Path | str] = {
        f"{number:02}": put_image(
            Path(f"data/{number:02}.png"), (number, 2, 3), (16, 16 + 8 * number)
        )
        for number in range(48)
    }
    others = samples_alive()  # that another test may have left
    alive: list[int] = []

    class Counting(Encoder):
        def __call__(self, samples: list[Sample]) -> Any:
            if len(self.batches) % 5 == 0:
                alive.append(len(samples_alive()) - len(others))
            return super().__call__(samples)

    encoder = Counting()
    shapes: dict[str, Any] = {"fit": "bucket", "bucket_reso_steps": 8, "bucket_no_upscale": True}
    carry(order("latents", sources, parts=("256",), **shapes), encoder, batch_size=4, threads=2)
    assert sorted(encoder.stems) == sorted(sources)
    assert len({shape for batch in encoder.batches for _, shape in batch}) == 48
    assert alive[0] > 4  # they are counted
    # Four batches that wait, one for the encoder and one in it, what two threads have read ahead.
    assert max(alive) <= 4 * 4 + 2 * 4 + 2 * 2 + 2


@pytest.mark.parametrize(("budget", "most"), [(None, 4), (160, 3), (1, 1)])
def test_captions_of_like_length_go_together(budget: int | None, most: int) -> None:
    texts = ["x" * (1 + at * 37 % 50) for at in range(200)]
    batches: list[list[Sample]] = []

    def encode(samples: list[Sample]) -> Any:
        batches.append([*samples])
        return [({}, {})] * len(samples)

    loaded = Loaded(encode, 4, budget, lengths=lambda text: (7, len(text)))
    job: Any = SimpleNamespace(
        order=None, loaded=None, waiting=0, store=lambda *_: None, take_gpu=bool
    )
    with Pipeline(lambda _: loaded) as pipeline:
        for number, text in enumerate(texts):
            item = inputs_of(f"{number}", None, text)
            pipeline.add(Sample(f"{number}", "s", item, text, (0, 0)), job)
    assert job.waiting == 0
    assert sorted(int(sample.key) for batch in batches for sample in batch) == list(range(200))
    assert all(len({sample.shape for sample in batch}) == 1 for batch in batches)
    for sample in (sample for batch in batches for sample in batch):
        assert 0 <= sample.shape[1] - len(str(sample.content)) < 16  # little padding
    longest = [len(batch) for batch in batches if batch[0].shape == (16, 48)]
    assert max(longest) == most


def test_captions_are_encoded_while_others_are_read_by_several_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first ones of an order of the default size, 1,024 items."""
    sources = {f"{number}": Path(f"{number}.txt") for number in range(1024)}
    for stem, path in sources.items():
        path.write_text(stem)
    read: list[int] = []
    read_item = Job.read

    def noted(job: Job, item: Work, *options: Any) -> Reading:
        read.append(threading.get_ident())
        return read_item(job, item, *options)

    monkeypatch.setattr(Job, "read", noted)
    seen: list[int] = []
    encoder = Encoder(lambda sample, tensor: seen.append(len(read)) or tensor)
    loaded = Loaded(encoder, 4, lengths=lambda text: (len(text),))
    carry_out(order("text", {**sources}), say=silent, threads=2, encoder=loaded)
    assert len(seen) == 1024 and seen[0] < 1024
    assert threading.get_ident() not in read and len(set(read)) == 2


def at_hand(work: Order, *paths: str) -> Order:
    """Return an order whose targets seem to be at hand in some files."""
    items = tuple(
        item._replace(targets=tuple(x._replace(at_hand=paths) for x in item.targets))
        for item in work.items
    )
    return dataclasses.replace(work, items=items, dataset="elsewhere")


def test_a_file_at_hand_is_linked_where_its_header_keeps_its_word() -> None:
    sources = cats(2)
    work = order("latents", sources)
    carry(work, Encoder())
    first, second = (cache_of(stem) for stem in ("00", "01"))
    again = order("latents", {"new": sources["00"]})
    encoder = Encoder()
    done = carry(at_hand(again, "cache/gone", str(second), str(first)), encoder)
    assert (done.counts["linked"], encoder.stems) == (1, [])
    assert cache_of("new").samefile(first)
    second.unlink()
    other = order("latents", {"other": sources["01"]})
    done = carry(at_hand(other, str(second), str(first)), encoder)
    assert (done.counts["encoded"], encoder.stems) == (1, ["other"])


def test_a_job_waits_for_a_gpu_when_it_has_something_to_encode_and_not_before() -> None:
    sources = cats(2)
    carry(order("latents", {"00": sources["00"]}), Encoder())
    asked: list[str] = []

    @contextlib.contextmanager
    def lease(say: Callable[[str], None]) -> Iterator[str]:
        asked.append("a GPU")
        yield "0"

    again = at_hand(order("latents", {"new": sources["00"]}), str(cache_of("00")))
    done = carry_out(again, say=asked.append, lease=lease)
    assert done.counts["linked"] == 1
    assert "a GPU" not in asked
    other = order("latents", {"other": sources["01"]})
    with pytest.raises(ModelError):  # there is no VAE here
        carry_out(other, say=asked.append, lease=lease)
    assert "a GPU" in asked


def latents(*stems: str, **options: Any) -> Order:
    sources = {stem: put_image(Path(f"data/{stem}.png"), (ord(stem), 2, 3)) for stem in stems}
    return order("latents", {**sources}, **options)


def carry_all(orders: Iterable[Order], batch_size: int = 1) -> Encoder:
    """Carry out some orders with one encoder."""
    encoder = Encoder()
    encode.carry_out(orders, say=silent, load=lambda _: Loaded(encoder, batch_size))
    return encoder


def test_a_faulty_item_stops_no_other_order_and_all_are_named() -> None:
    orders = [latents("a", "b"), latents("c"), latents("d")]
    for stem in "ad":
        Path(f"data/{stem}.png").write_bytes(b"")
    with pytest.raises(SourceError) as caught:
        carry_all(orders)
    for words in ("1 of 2 items", "a.png: is an empty", "1 of 1 items", "d.png: is an empty"):
        assert words in str(caught.value)
    assert [each.receipt.exists() for each in orders] == [False, True, False]
    put_image(Path("data/a.png"), (1, 2, 3))
    put_image(Path("data/d.png"), (4, 5, 6))
    assert sorted(carry_all(orders).stems) == ["a", "d"]


def test_what_an_order_has_made_is_linked_for_the_next() -> None:
    orders = [latents("a", "b"), latents("c", "d")]
    Path("data/c.png").write_bytes(Path("data/b.png").read_bytes())
    assert sorted(carry_all(orders).stems) == ["a", "b", "d"]
    assert read_receipt(orders[1].receipt).counts["linked"] == 1
    # The time until something is encoded is no start of a process that has encoded before.
    assert [read_receipt(each.receipt).starting is None for each in orders] == [False, True]
    first, second = (list(read_receipt(each.receipt).targets) for each in orders)
    assert any(Path(one).samefile(other) for one in first for other in second)


def test_a_batch_holds_samples_of_several_orders_and_each_leaves_its_receipt_once_it_is_done() -> (
    None
):
    first, second, third = latents("a"), latents("b", "c"), latents("d")

    def orders() -> Iterator[Order]:
        yield first
        assert not first.receipt.exists()
        yield second
        deadline = time.monotonic() + 60
        while not Path(first.paths[0]).exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not second.receipt.exists()
        yield third

    encoder = carry_all(orders(), 2)
    assert [[stem for stem, _ in batch] for batch in encoder.batches] == [["a", "b"], ["c", "d"]]
    counts = [read_receipt(each.receipt).counts["encoded"] for each in (first, second, third)]
    assert counts == [1, 2, 1]


def test_what_an_order_could_not_encode_is_refused_for_the_next() -> None:
    orders = [latents("a", on_error="skip"), latents("b", "c", on_error="skip")]
    Path("data/b.png").write_bytes(Path("data/a.png").read_bytes())
    zeros = Encoder(lambda sample, tensor: tensor * (sample.item.stem == "c"))
    encode.carry_out(orders, say=silent, load=lambda _: Loaded(zeros, 1))
    faults = [[each["stem"] for each in read_receipt(x.receipt).faults] for x in orders]
    assert faults == [["a"], ["b"]] and sorted(zeros.stems) == ["a", "c"]


class Clock:
    """A clock that goes on as a test says."""

    def __init__(self) -> None:
        self.now = 1.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(pipeline, "time", made)
    return made


@pytest.mark.parametrize(
    ("seconds", "workers", "words"),
    [
        ([("encoding", 9.0), ("writing", 1.0)], 1, "busy 90%, bottleneck: encoding"),
        ([("encoding", 3.0), ("idle", 7.0), ("writing", 0.0)], 1, "busy 30%, bottleneck: reading"),
        ([("encoding", 3.0), ("writing", 7.0)], 1, "busy 30%, bottleneck: writing"),
        ([("encoding", 8.0)], 2, "busy 50%, bottleneck: reading"),  # each is a part of a CPU
        ([("encoding", 4.0)], 1, ""),  # too short to tell
    ],
)  # fmt: skip
def test_the_bottleneck_is_what_the_device_waits_for(
    clock: Clock, seconds: list[tuple[str, float]], workers: int, words: str
) -> None:
    made = Pipeline(lambda _: Loaded(Encoder()))
    made.loaded = Loaded(Encoder(), workers=workers, queues=workers == 1)
    for stage, passed in seconds:
        with contextlib.nullcontext() if stage == "idle" else made._stage(stage):
            clock.now += passed
    assert made.bottleneck == words.replace("busy", "device busy")


def test_the_last_line_of_a_job_and_its_receipt_have_the_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipeline, "_SHORTEST", 0.0)
    said: list[str] = []
    receipt = carry(order("latents", cats(1)), Encoder(), say=said.append)
    words = r"device busy \d+%, bottleneck: (reading|encoding|writing)"
    assert re.fullmatch(rf"latents of cats: 1 encoded; {words}", said[-1])
    assert said[-1].endswith(f"; {receipt.words}")
