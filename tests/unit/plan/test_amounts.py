"""Jobs are estimated, and cut, by the amount of work in them, which past jobs' receipts tell."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from latentmake.config.datasets import Dataset
from latentmake.config.models import Model
from latentmake.config.root import parse
from latentmake.files.media import Media
from latentmake.geometry.buckets import Size
from latentmake.geometry.clips import Clip
from latentmake.index.memo import Memo
from latentmake.index.rates import Work
from latentmake.plan.amounts import amount_of, order_amount
from latentmake.plan.batches import minutes_of
from latentmake.plan.estimates import Estimates
from latentmake.plan.facts import Facts
from latentmake.plan.jobs import jobs_of
from latentmake.plan.orders import Target, WorkItem, WorkOrder
from latentmake.plan.planner import make_plan
from latentmake.plan.receipts import Receipt, learn_receipts

DATA = Dataset(path="data")
TINY = Model.model_validate({"vae": "vae", "text": ["text"]})
SCRIPTED = Model.model_validate(
    {
        "vae": "vae",
        "text": ["text"],
        "task": "edit-2509",
        "dit": "dit",
        "architecture": "qwen_image_edit",
    }
)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def target(side: int, number: int = 0, clip: Clip | None = None) -> Target:
    return Target(str(side), f"cache/{side}/{number}", None, Size(side, side), clip)


def latents(model: Model, *sides: int, count: int = 100) -> WorkOrder:
    items = [
        WorkItem(f"{number}", f"{number}.png", None, tuple(target(side, number) for side in sides))
        for number in range(count)
    ]
    return WorkOrder("latents", "cats", "tiny", DATA, model, {"format": 1}, tuple(items))


def receipt_of(order: WorkOrder, seconds: float, size: int = 0, **others: Any) -> Receipt:
    count = len(order.paths)
    targets = {path: [size, 1, 2, "key"] for path in order.paths}
    values = {"starting": 2.0, "work": order.work, "amount": order_amount(order)}
    return Receipt({}, targets, [], {"encoded": count}, seconds + 2.0, 0.0, **(values | others))


def learnt(*receipts: Receipt) -> Memo:
    memo = Memo(None)
    for number, receipt in enumerate(receipts):
        receipt.write(Path(f".latentmake/orders/{number}.receipt.json"))
    learn_receipts(memo)
    return memo


def test_the_amount_of_latents_is_pixels_times_frames() -> None:
    items = [WorkItem("a", "a.mp4", None, (target(64), target(32, clip=Clip(0, 9))))]
    assert amount_of("latents", DATA, TINY, items) == 64 * 64 + 9 * 32 * 32
    small = [items[0]._replace(media=Media(16, 8, 0))]
    assert amount_of("latents", DATA, TINY, small) == 64 * 64 + 9 * 32 * 32
    not_scaled_up = DATA.model_copy(update={"bucket_no_upscale": True})
    assert amount_of("latents", not_scaled_up, TINY, small) == 16 * 8 + 9 * 16 * 8


def test_the_amount_of_text_is_the_tokens_of_all_captions() -> None:
    Path("a.txt").write_text("x" * 400)
    texts = (WorkItem("b", None, "x" * 200, (Target("text", "b", None),) * 3),)
    read = (WorkItem("a", "a.txt", None, (Target("text", "a", None),)),)
    assert amount_of("text", DATA, TINY, texts) == 3 * 51
    assert amount_of("text", DATA, TINY, read) == 101
    assert amount_of("text", DATA, TINY, [read[0]._replace(source="s3://gone/a.txt")]) == 1
    assert amount_of("text", DATA, TINY, ()) == 0


def test_the_time_of_a_larger_resolution_follows_from_a_smaller_one() -> None:
    """A target costs 1 ms besides encoding, 0.2 ms in it, and 0.5 us a pixel."""
    small, large = latents(TINY, 64), latents(TINY, 96, 128, 1024)

    def seconds(order: WorkOrder) -> float:
        return 1.2e-3 * len(order.paths) + 5e-7 * order_amount(order)

    encoding = seconds(small) - 1e-3 * len(small.paths)
    memo = learnt(receipt_of(small, seconds(small), stages={"encoding": encoding}))
    minutes = minutes_of(memo, large)
    assert minutes is not None
    assert 1 / 1.5 < (60 * minutes - 2.0) / seconds(large) < 1.5
    (line,) = Estimates(memo, jobs_of([(large, [])], 1)).lines()
    assert line.endswith("at the rate measured here")


def test_orders_that_share_a_process_start_once() -> None:
    first, second = latents(TINY, 64), latents(TINY, 96)
    started = replace(receipt_of(first, 0.0), starting=600.0, seconds=630.0)
    warm = replace(receipt_of(second, 0.0), starting=None, seconds=60.0)
    memo = learnt(started, warm)
    for side_by_side, starts in ((1, 1), (2, 2)):
        estimates = Estimates(memo, jobs_of([(first, []), (second, [])], side_by_side))
        (line,) = estimates.lines()
        minutes = re.findall(r"about (\d+) min at the rate", line)
        assert int(minutes[0]) == pytest.approx(10 * starts, abs=3)


def test_a_receipt_of_a_former_version_tells_the_time_of_a_target() -> None:
    order = latents(TINY, 64)
    receipt = vars(receipt_of(order, 50.0))
    for new in ("amount", "stages"):
        del receipt[new]
    path = Path(".latentmake/orders/0.receipt.json")
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(receipt))
    memo = Memo(None)
    learn_receipts(memo)
    assert minutes_of(memo, order) == pytest.approx(52 / 60)


def test_bytes_in_shapes_of_other_scripts_are_those_of_past_files() -> None:
    order = latents(SCRIPTED, 64)
    memo = learnt(receipt_of(order, 5.0, size=1000))
    twice = latents(SCRIPTED, 64, 128)
    (line,) = Estimates(memo, jobs_of([(twice, [])], 1)).lines()
    assert ": 200 images of up to 128 x 128, about 0.5 MB; " in line
    (need,) = Estimates(memo, jobs_of([(twice, [])], 1)).needs([twice])
    assert need.size == 100 * 5000


def test_jobs_are_as_large_as_their_pixels_allow() -> None:
    data = Path("data")
    data.mkdir()
    for number in range(32):
        (data / f"{number}.png").write_text(f"{number}")
        (data / f"{number}.txt").write_text("a cat")
    settings: dict[str, Any] = {
        "datasets": {"cats": {"path": "data"}},
        "models": {"tiny": {"vae": "vae", "text": "text"}},
        "runs": {
            str(side): {"datasets": "cats", "model": "tiny", "resolutions": [side]}
            for side in (64, 256)
        },
        "batch": {"items": "auto", "minutes": 0.5},
    }
    memo = Memo(None)
    # 64 x 64 pixels take 1 s, so that 30 s are 29 targets of 64 px, and one of 256 px.
    memo.learn_rate("latents tiny", Work(10, 10.0, 1.0, amount=10 * 64 * 64))
    memo.save()
    plan = make_plan(Facts(parse(settings), memo, encoders=False), ["64", "256"])
    found = {
        name: [len(order.items) for order in run.orders if order.kind == "latents"]
        for name, run in plan.runs.items()
    }
    assert found == {"64": [29, 3], "256": [1] * 32}
