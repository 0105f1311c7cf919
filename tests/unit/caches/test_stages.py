"""The account of a job's time names its bottleneck, and the share in which the device was busy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from latentmake.caches import pipeline
from latentmake.caches.inputs import Loaded
from latentmake.caches.pipeline import Pipeline
from order_world import Encoder, carry_out, order, put_image


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


def words_of(clock: Clock, *seconds: tuple[str, float], workers: int, queues: bool) -> str:
    """Return the words on stays one after the other; `idle` is none."""
    made = Pipeline(lambda _: Loaded(Encoder()))
    made.loaded = Loaded(Encoder(), workers=workers, queues=queues)
    for stage, passed in seconds:
        if stage == "idle":
            clock.now += passed
            continue
        with made._stage(stage):
            clock.now += passed
    return made.words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        ([("encoding", 9.0), ("writing", 1.0)], "busy 90%, bottleneck: encoding"),
        ([("encoding", 3.0), ("idle", 7.0), ("writing", 0.0)], "busy 30%, bottleneck: reading"),
        ([("encoding", 3.0), ("writing", 7.0)], "busy 30%, bottleneck: writing"),
        ([("encoding", 4.0)], ""),  # too short to tell
    ],
)  # fmt: skip
def test_the_bottleneck_is_what_the_device_waits_for(
    clock: Clock, seconds: list[tuple[str, float]], words: str
) -> None:
    words = words.replace("busy", "device busy")
    assert words_of(clock, *seconds, workers=1, queues=True) == words


def test_each_worker_of_a_cpu_is_a_part_of_the_device(clock: Clock) -> None:
    words = words_of(clock, ("encoding", 8.0), workers=2, queues=False)
    assert words == "device busy 50%, bottleneck: reading"


def test_the_last_line_of_a_job_and_its_receipt_have_the_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pipeline, "_SHORTEST", 0.0)
    work = order("latents", {"a": put_image(Path("data/a.png"), (1, 2, 3))})
    said: list[str] = []
    receipt = carry_out(work, say=said.append, encoder=Loaded(Encoder()))
    words = r"device busy \d+%, bottleneck: (reading|encoding|writing)"
    assert re.fullmatch(rf"latents of cats: 1 encoded; {words}", said[-1])
    assert said[-1].endswith(f"; {receipt.words}")
