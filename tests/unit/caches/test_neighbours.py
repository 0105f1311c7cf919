"""A job's files are the same to the byte, however many threads encode and whichever is first."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import order_world
import pytest
import sdscripts_world
import world
from item_world import inputs_of
from latentmake.caches import captions
from latentmake.caches.captions import CaptionBatches
from latentmake.caches.encode import carry_out
from latentmake.caches.encoders import Loaded, load
from latentmake.caches.inputs import Sample
from latentmake.caches.job import Job
from latentmake.caches.reading import Reading
from latentmake.caches.several import carry_out_all
from latentmake.config.root import parse
from latentmake.index.memo import Memo
from latentmake.plan.facts import Facts
from latentmake.plan.orders import Order, Work
from latentmake.plan.planner import make_plan
from order_world import Encoder, silent
from text_world import letters, make_texts
from wan_world import write_umt5, write_wan_vae

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (3, 12, 3, 30, 12, 3, 100, 12, 3, 30)  # of captions; some are equal


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_texts(folder)
    sdscripts_world.tiny_vae(16).save_pretrained(folder / "vae")
    write_wan_vae(folder / "wan", 4)
    write_umt5(folder / "wan")
    for number, length in enumerate(LENGTHS):
        size = (40, 36) if number % 2 else (36, 40)
        world.draw(folder / f"data/{number}.png", number, size)
        caption = letters(length) if number % 3 else f"{letters(length)} {number}"
        (folder / f"data/{number}.txt").write_text(caption)
    return folder


def orders(root: Path, layout: str, **changes: Any) -> tuple[Order, ...]:
    texts = [f"{root}/clip/text_encoder", f"{root}/t5/text_encoder"]
    models: dict[str, dict[str, Any]] = {
        "plain": {"vae": f"{root}/vae", "text": texts},
        "sdscripts": {
            "vae": f"{root}/vae", "layout": "sdscripts", "architecture": "flux",
            "text": [texts[0], {"path": texts[1], "max_length": 40}],
        },
        "musubi": {
            "vae": f"{root}/wan/vae",
            "task": "t2v-1.3B", "layout": "musubi",
            "text": [{"path": f"{root}/wan/text_encoder", "tokenizer": f"{root}/wan/tokenizer"}],
        },
    }  # fmt: skip
    sides = [32, 48] if layout == "plain" else [64]
    config = {
        "datasets": {"d": {"path": f"{root}/data"} | changes},
        "models": {"m": models[layout]},
        "runs": {"r": {"datasets": ["d"], "model": "m", "resolutions": sides}},
        "batch": {"items": 4},
    }
    with Memo(None) as memo:
        return tuple(make_plan(Facts(parse(config), memo), ["r"]).orders)


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("layout", ["plain", "sdscripts", "musubi"])
def test_threads_and_their_order_change_no_byte(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    found = {}
    for name, threads in (("alone", 1), ("beside", 4)):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        planned = orders(root, layout)
        assert {order.kind for order in planned} == {"latents", "text"}
        for order in planned:
            loaded = load.encoder(order, threads=threads, say=silent)
            assert loaded.workers == threads
            if threads == 1:  # a sample after the other, as they come
                loaded = loaded._replace(lengths=None, alike=None)
            else:
                loaded = loaded._replace(encode=delayed(loaded))
            carry_out(order, Path(order.receipt), say=silent, threads=threads, encoder=loaded)
        found[name] = files(tmp_path / name / "cache")
    assert len(found["alone"]) >= 2 * len(LENGTHS)
    assert found["beside"] == found["alone"]


def delayed(loaded: Loaded) -> Any:
    dice = random.Random(0)

    def encode(samples: list[Sample]) -> Any:
        time.sleep(dice.random() / 200)
        return loaded.encode(samples)

    return encode


def test_equal_captions_are_encoded_once_in_all_items_orders_and_variants(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # Nothing to shuffle: the variants of a caption are equal.
    options = {"variants": 3, "shuffle_caption": True}
    texts = [order for order in orders(root, "plain", captions=options) if order.kind == "text"]
    loaded = load.encoder(texts[0], threads=2, say=silent)
    encoded: list[str] = []

    def encode(samples: list[Sample]) -> Any:
        encoded.extend(str(sample.content) for sample in samples)
        return loaded.encode(samples)

    ready = loaded._replace(encode=encode)
    carry_out_all(
        texts, say=silent, threads=2, may_skip=False,
        encoder_of=lambda _: ready, lease=contextlib.nullcontext,
    )  # fmt: skip
    captions = [path.read_text() for path in (root / "data").glob("*.txt")]
    assert sorted(encoded) == sorted(set(captions))
    found = files(tmp_path / "cache")
    assert len(texts) > 1
    assert len(found) == 3 * len(LENGTHS)
    assert len(set(found.values())) == len(set(captions)) < len(captions)


# -- batches of captions --------------------------------------------------------------------------


def batches(
    texts: Iterable[str], monkeypatch: pytest.MonkeyPatch, *, waiting: int = 4096, **changes: Any
) -> list[list[Sample]]:
    """Return the batches that captions are encoded in, of as many tokens as letters."""
    monkeypatch.setattr(captions, "_WAITING", waiting)
    ready = Loaded(lambda samples: [], 4, lengths=lambda text: (77, len(text)))._replace(**changes)
    found: list[list[Sample]] = []
    collected = CaptionBatches(lambda samples, _: found.append(samples), lambda: ready)
    for number, text in enumerate(texts):
        item = inputs_of(f"{number}", None, text)
        collected.add(Sample(f"{number}", "s", item, text, (0, 0)))
        collected.encode_full()
        assert len(collected._waiting) < waiting
    collected.flush()
    return found


def lengths_of(found: list[list[Sample]]) -> list[list[int]]:
    return [[len(str(sample.content)) for sample in batch] for batch in found]


TEXTS = ["x" * (1 + at * 37 % 50) for at in range(200)]


def test_captions_of_like_length_go_together_longest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    found = batches(TEXTS, monkeypatch)
    flat = [length for lengths in lengths_of(found) for length in lengths]
    assert flat == sorted(map(len, TEXTS), reverse=True)
    assert {len(batch) for batch in found} == {4}
    for batch, lengths in zip(found, lengths_of(found), strict=True):
        shapes = {sample.shape for sample in batch}  # one for all, a multiple of 16
        assert shapes == {(80, -(-max(lengths) // 16) * 16)}
    padded = sum(4 * max(lengths) for lengths in lengths_of(found))
    unsorted = sum(4 * max(map(len, TEXTS[at : at + 4])) for at in range(0, 200, 4))
    assert padded < 1.02 * sum(flat)
    assert unsorted > 1.2 * sum(flat)


def test_few_captions_wait_whatever_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    found = batches(TEXTS, monkeypatch, waiting=20)
    assert sorted(int(sample.key) for batch in found for sample in batch) == list(range(200))
    assert max(lengths_of(found)[0]) == max(map(len, TEXTS[:20]))


def test_captions_are_encoded_while_others_are_read_by_several_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first ones of an order of the default size, 1,024 items."""
    monkeypatch.chdir(tmp_path)
    sources = {f"{number}": Path(f"{number}.txt") for number in range(1024)}
    for stem, path in sources.items():
        path.write_text(stem)
    read: list[int] = []
    read_item = Job.read

    def noted(job: Job, item: Work, known: Any = None) -> Reading:
        read.append(threading.get_ident())
        return read_item(job, item, known)

    monkeypatch.setattr(Job, "read", noted)
    seen: list[int] = []
    encoder = Encoder(lambda sample, tensor: seen.append(len(read)) or tensor)
    loaded = Loaded(encoder, 4, lengths=lambda text: (len(text),))
    order = order_world.order("text", {**sources})
    carry_out(order, Path("receipt.json"), say=silent, threads=2, encoder=loaded)
    assert len(seen) == 1024 and seen[0] < 1024
    assert threading.get_ident() not in read and len(set(read)) == 2


def test_captions_that_may_not_be_padded_go_with_equally_long_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = batches(TEXTS, monkeypatch, alike=lambda shape: 3)
    assert all(len(set(lengths)) == 1 for lengths in lengths_of(found))
    assert {batch[0].shape for batch in found} == {(77, length) for length in range(1, 51)}
    assert {len(batch) for batch in found} == {1, 3}  # four captions of each length


def test_captions_of_an_encoder_that_tells_no_lengths_go_in_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = batches(TEXTS[:10], monkeypatch, lengths=None)
    assert [sample.content for batch in found for sample in batch] == TEXTS[:10]
    assert [len(batch) for batch in found] == [4, 4, 2]
    assert {batch[0].shape for batch in found} == {()}
