"""A job's files have the same names and keys, and nearly the same values, whatever lies beside."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import order_world
import pytest
import sdscripts_world
import torch
import world
from exact_world import TOLERANCE, error
from item_world import inputs_of
from latentmake.caches.encoders import device
from latentmake.caches.inputs import Loaded, Reading, Sample
from latentmake.caches.job import Job
from latentmake.caches.pipeline import Pipeline
from latentmake.config.root import parse
from latentmake.index.memo import Memo
from latentmake.plan.facts import Facts
from latentmake.plan.orders import Order, Work
from latentmake.plan.planner import make_plan
from order_world import Encoder, carry_out, silent
from safetensors.torch import load_file
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


@pytest.mark.parametrize("layout", ["plain", "sdscripts", "musubi"])
def test_threads_and_batches_change_no_name_nor_key_and_hardly_a_value(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    found: dict[str, dict[str, dict[str, torch.Tensor]]] = {}
    keys: dict[str, dict[str, str]] = {}
    for name, threads in (("alone", 1), ("beside", 4)):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        found[name], keys[name] = {}, {}
        for order in orders(root, layout):
            loaded = device.encoder(order, threads=threads, say=silent)
            if threads == 1:  # a sample after the other
                loaded = loaded._replace(size=1)
            else:
                assert loaded.workers == threads
                loaded = loaded._replace(encode=delayed(loaded))
            receipt = carry_out(order, say=silent, threads=threads, encoder=loaded)
            for path, values in receipt.targets.items():
                keys[name][path] = str(values[-1])
                found[name][path] = values_of(Path(path))
    assert keys["beside"] == keys["alone"]
    assert len(keys["alone"]) >= 2 * len(LENGTHS)
    for path, arrays in found["alone"].items():
        for array, alone in arrays.items():
            beside = found["beside"][path][array]
            same = torch.equal(beside, alone)
            assert same or error(beside, alone.double()) < TOLERANCE[alone.dtype], path


def values_of(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a cache file."""
    if path.suffix != ".npz":
        return load_file(path)
    with np.load(path) as file:
        return {
            name: torch.from_numpy(np.asarray(file[name]))
            for name in file.files
            if file[name].dtype == np.float32
        }


def delayed(loaded: Loaded) -> Any:
    dice = random.Random(0)

    def encode(samples: list[Sample]) -> Any:
        time.sleep(dice.random() / 200)
        return loaded.encode(samples)

    return encode


# -- batches of captions --------------------------------------------------------------------------


@pytest.mark.parametrize(("budget", "most"), [(None, 4), (160, 3), (1, 1)])
def test_captions_of_like_length_go_together(budget: int | None, most: int) -> None:
    texts = ["x" * (1 + at * 37 % 50) for at in range(200)]
    batches: list[list[Sample]] = []

    def encode(samples: list[Sample]) -> Any:
        batches.append([*samples])
        return [({}, {})] * len(samples)

    loaded = Loaded(encode, 4, budget, lengths=lambda text: (7, len(text)))
    job: Any = SimpleNamespace(order=None, loaded=None, waiting=0, store=lambda *_: None)
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first ones of an order of the default size, 1,024 items."""
    monkeypatch.chdir(tmp_path)
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
    order = order_world.order("text", {**sources})
    carry_out(order, say=silent, threads=2, encoder=loaded)
    assert len(seen) == 1024 and seen[0] < 1024
    assert threading.get_ident() not in read and len(set(read)) == 2
