"""Caching scripts that go wrong: what they finished is kept, and one bad item stops no other."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import order_world
import psutil
import pytest
import scripts_world
from latentmake.base.errors import DeviceError, ModelError, SourceError
from latentmake.config.datasets import Dataset
from latentmake.encode import runner as encode
from latentmake.formats import cachefile
from latentmake.formats.safetensors import read_head
from latentmake.plan.orders import EncodingJob, Order
from latentmake.plan.receipts import Receipt
from latentmake.trainers.launched import encode as external_encode
from latentmake.trainers.musubi.encode import ScriptsEncoding
from scripts_world import STEMS, calls, stems

TUNER = Path("musubi-tuner")


@pytest.fixture(autouse=True)
def _in_a_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(external_encode, "_SECONDS", 0.02)


def carry_out(order: Order, **options: Any) -> tuple[Receipt, list[str]]:
    said: list[str] = []
    options = {"threads": 2, "say": said.append, **options}
    receipt = order_world.carry_out(order, encoder=ScriptsEncoding.make, **options)
    return receipt, said


def faults(order: Order, **options: Any) -> str:
    """Carry out an order some of whose items are faulty; return the one line about them."""
    with pytest.raises(SourceError) as caught:
        carry_out(order, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def finished() -> int:
    return len(list(Path("cache").rglob("*.safetensors")))


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def made(order: Order) -> list[str]:
    return [x.item.stem for x in order.items if Path(x.targets[0].path).exists()]


# -- one call for as many as possible --------------------------------------------------------------


@pytest.mark.parametrize("kind", ["latents", "text"])
def test_a_script_is_called_once_for_all_items_and_sizes(kind: str) -> None:
    tuner = scripts_world.install(TUNER)
    order = scripts_world.order(kind, tuner, parts=("64", "96x64"))
    receipt, _ = carry_out(order, threads=3)
    (call,) = calls(TUNER)
    # A caption is encoded once for all sizes.
    assert stems(call) == [list(STEMS)] * (2 if kind == "latents" else 1)
    assert all(Path(path).is_file() for path in order.paths)
    assert receipt.counts["encoded"] == 6 * len(call["blocks"])
    assert call["argv"][call["argv"].index("--num_workers") + 1] == "3"
    for path in order.paths:
        head = cachefile.read_header(path)
        assert head.key and read_head(path).metadata["architecture"] == "z_image"
    assert not list(Path(".latentmake/encoding").iterdir())


def test_a_receipt_tells_loading_from_encoding() -> None:
    taken = str(Path("cache/**/*.safetensors").absolute())  # it encodes on when one is
    tuner = scripts_world.install(TUNER, loading=0.4, seconds=0.1, until=taken)
    order = scripts_world.order("text", tuner)
    receipt, _ = carry_out(order)
    assert receipt.work == order.work
    assert receipt.starting is not None
    assert 0.4 < receipt.starting < receipt.seconds - 6 * 0.1


def test_captions_are_in_the_list_alone_and_equal_ones_are_encoded_once() -> None:
    tuner = scripts_world.install(TUNER)
    odd = '$(touch hacked) "quoted" \u2028 --skip_existing\nsecond line'
    order = scripts_world.order("text", tuner, captions={"ant": odd, "bee": "same", "cat": "same"})
    carry_out(order)
    (call,) = calls(TUNER)
    assert odd not in " ".join(call["argv"]) and not Path("hacked").exists()
    assert stems(call) == [["bee", "dog", "eel", "fox", "ant"]]  # the shortest first
    assert call["lists"][0][-1]["caption"] == odd
    assert made(order) == list(STEMS)


@pytest.mark.parametrize("kind", ["latents", "text"])
def test_pictures_of_one_name_in_two_folders_are_encoded_in_folders_apart(kind: str) -> None:
    tuner, named = scripts_world.install(TUNER), ("rain_ant", "sun_ant")
    made = scripts_world.order(kind, tuner, stems=named, captions={named[0]: "a", named[1]: "bb"})
    items = list(made.items)
    for number, name in enumerate(named if kind == "latents" else ()):
        place = Path(f"data/{name.replace('_', '/')}.png")
        place.parent.mkdir()
        Path(f"data/{name}.png").rename(place)
        (file,) = items[number].item.files
        item = items[number].item._replace(files=(file._replace(path=str(place)),))
        items[number] = items[number]._replace(item=item)
    order = replace(made, items=tuple(items))
    carry_out(order)
    (call,) = calls(TUNER)
    assert stems(call) == ([["ant"], ["ant"]] if kind == "latents" else [[*named]])
    assert [Path(path).name.split("_00")[0] for path in order.paths if Path(path).exists()]


# -- what is finished is kept ----------------------------------------------------------------------


@pytest.mark.parametrize("mood", ["raise", "kill", "cut"])
@pytest.mark.parametrize("kind", ["latents", "text"])
def test_an_item_that_a_script_dies_of_is_named_and_stops_no_other(kind: str, mood: str) -> None:
    tuner = scripts_world.install(TUNER, cat=mood)
    order = scripts_world.order(kind, tuner)
    line = faults(order)
    assert "1 of 6 items are faulty" in line and "cat" in line
    assert EncodingJob((order,)).log in line  # where all of the output is
    assert finished() == 5
    scripts_world.set_moods(TUNER)
    before = len(calls(TUNER))
    receipt, _ = carry_out(order)
    assert [stems(call) for call in calls(TUNER)[before:]] == [[["cat"]]]
    assert receipt.counts["kept"] == 5 and made(order) == list(STEMS)


def test_pictures_are_checked_by_their_headers_before_a_gpu_is_taken() -> None:
    order = scripts_world.order("latents", scripts_world.install(TUNER))
    held: list[str] = []

    @contextlib.contextmanager
    def lease(say: object) -> Iterator[None]:
        held.append("GPU")
        yield

    whole = {stem: Path(f"data/{stem}.png").read_bytes() for stem in STEMS}
    for stem, data in whole.items():
        Path(f"data/{stem}.png").write_bytes(data[: len(data) // 2] if stem != "dog" else b"")
    with pytest.raises(SourceError, match=r"^6 of 6 items are faulty.*ant\.png: is damaged or cut"):
        carry_out(order, lease=lease)
    assert not held and not calls(TUNER)
    for stem, data in whole.items():
        place = data.index(b"IDAT") + 6
        damaged = data[:place] + bytes(8) + data[place + 8 :]
        Path(f"data/{stem}.png").write_bytes(damaged if stem == "cat" else data)
    receipt, _ = carry_out(order, lease=lease)  # the script is what decodes
    assert receipt.counts["encoded"] == 6 and held == ["GPU"]


def test_a_failure_of_all_items_blames_none_of_them() -> None:
    tuner = scripts_world.install(TUNER, **dict.fromkeys(STEMS, "raise"))
    with pytest.raises(ModelError, match="encoder of latents failed: RuntimeError: Kernel size"):
        carry_out(scripts_world.order("latents", tuner))
    assert len(calls(TUNER)) == 1


HUNDRED = [f"item{number:02}" for number in range(100)]


def test_of_a_hundred_items_all_but_the_bad_ones_are_made_in_one_load() -> None:
    moods = {HUNDRED[number]: "raise" for number in (0, 1, 2, *range(12, 100, 8))}
    tuner = scripts_world.install(TUNER, **moods).model_copy(update={"batch_size": 3})
    order = scripts_world.order("latents", tuner, stems=HUNDRED)
    said: list[str] = []
    line = faults(order, say=said.append)
    assert f"{len(moods)} of 100 items are faulty" in line and " more; fix these files" in line
    assert {*re.findall(r"faulty: data/(\w+)\.png", "\n".join(said))} == {*moods}
    assert {*made(order)} == {*HUNDRED} - {*moods}
    assert len(calls(TUNER)) == 1


def test_items_that_an_earlier_build_skipped_stop_no_later_one() -> None:
    bad = [*STEMS[1:5]]
    order = scripts_world.order(
        "latents", scripts_world.install(TUNER, **dict.fromkeys(bad, "raise"))
    )
    order = replace(order, dataset_settings=Dataset(path="data", on_error="skip"))
    receipt, _ = carry_out(order)
    assert [fault["stem"] for fault in receipt.faults] == bad
    lock = Path("runs/first/dataset.lock")
    lock.parent.mkdir(parents=True)
    lock.write_text(json.dumps({"digest": "", "aside": {"cats": receipt.faults}}))
    again, _ = carry_out(order)
    assert sorted(fault["stem"] for fault in again.faults) == bad
    assert again.counts["kept"] == len(STEMS) - len(bad)


# -- memory ---------------------------------------------------------------------------------------


def of_lengths(*lengths: int) -> dict[str, str]:
    return {stem: "x" * length for stem, length in zip(STEMS, lengths, strict=True)}


@pytest.mark.parametrize(
    "lengths", [(5, 90, 91, 6, 7, 8), (90, 91, 5, 6, 7, 8), (5, 6, 7, 8, 91, 90)], ids=str
)
def test_items_larger_than_all_that_fit_are_named(lengths: tuple[int, ...]) -> None:
    tuner = scripts_world.install(TUNER, room=50)
    order = scripts_world.order("text", tuner, captions=of_lengths(*lengths))
    line = faults(order)
    assert "2 of 6 items are faulty" in line and "not enough memory to encode it" in line
    assert "OutOfMemoryError: CUDA out of memory" in line
    assert {*made(order)} == {stem for stem, x in zip(STEMS, lengths, strict=True) if x < 50}
    assert len(calls(TUNER)) == 1


def stopped(order: Order) -> str:
    """Carry out an order that a fault of the device stops; return its one line."""
    with pytest.raises(DeviceError) as caught:
        carry_out(order)
    assert not order.receipt.exists() and "\n" not in str(caught.value)
    assert EncodingJob((order,)).log in str(caught.value)
    return str(caught.value)


def test_a_device_that_another_program_fills_stops_the_job_and_blames_no_item() -> None:
    tuner = scripts_world.install(TUNER, **{"crowded after": 1})
    order = scripts_world.order("text", tuner, captions=of_lengths(5, 6, 30, 9, 8, 7))
    line = stopped(order)
    assert "CUDA out of memory" in line and "faulty" not in line
    kept = finished()
    scripts_world.set_moods(TUNER)
    receipt, _ = carry_out(order)
    assert kept and receipt.counts["kept"] == kept and made(order) == list(STEMS)


@pytest.mark.parametrize("stems", [STEMS, STEMS[:1]], ids=["several", "one"])
def test_where_nothing_fits_no_item_is_blamed(stems: tuple[str, ...]) -> None:
    tuner = scripts_world.install(TUNER, room=0)
    line = stopped(scripts_world.order("text", tuner, stems=stems))
    assert "CUDA out of memory" in line and "faulty" not in line
    assert len(calls(TUNER)) == 1


@pytest.mark.parametrize(
    ("moods", "words"),
    [
        ({"all_of_them": "crowded"}, "CUDA out of memory"),
        ({"cat": "lost"}, "CUDA error: unspecified launch failure"),
    ],
    ids=["no room for the weights", "a lost device"],
)
def test_a_fault_of_the_device_stops_the_job_at_once(moods: dict[str, str], words: str) -> None:
    tuner = scripts_world.install(TUNER, **moods)
    assert words in stopped(scripts_world.order("latents", tuner))
    assert len(calls(TUNER)) == 1


# -- what a script says of itself -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "mood", "words"),
    [
        ("latents", "load", r"KeyError: 'encoder\.conv_in\.weight'"),
        ("text", "hub", r"huggingface\.co.*HF_HOME"),  # with a hint
        ("latents", "nothing", "it ended well and wrote no ant_0080"),
    ],
)
def test_a_script_that_fails_for_all_items_is_called_once_and_its_own_words_are_one_line(
    kind: str, mood: str, words: str
) -> None:
    tuner = scripts_world.install(TUNER, all_of_them=mood)
    with pytest.raises(ModelError, match=f"(?s)encoder of {kind} failed: .*{words}") as caught:
        carry_out(scripts_world.order(kind, tuner))
    assert len(calls(TUNER)) == 1 and "\n" not in str(caught.value)


@pytest.mark.parametrize("mood", ["second pass", "raise"])
def test_half_of_a_file_is_never_taken(mood: str) -> None:
    tuner = scripts_world.install(TUNER, dog=mood)
    order = scripts_world.order("text", tuner, architecture="hunyuan_video")
    assert "a dog" in faults(order)
    scripts_world.set_moods(TUNER)
    carry_out(order)
    names = {"llm_float32", "llm_mask", "clipL_float32"}
    assert all(set(read_head(path).entries) == names for path in order.paths)


CHILD = """
import sys
from pathlib import Path
from latentmake.encode import runner as encode
from latentmake.plan.orders import Order
from latentmake.trainers.launched import encode as external_encode
from latentmake.trainers.musubi.encode import ScriptsEncoding
external_encode._SECONDS = 0.02
order = Order.read(Path(sys.argv[1]))
encode.carry_out([order], say=print, external=lambda _: ScriptsEncoding.make)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_job_that_is_killed_keeps_what_was_finished(number: signal.Signals) -> None:
    tuner = scripts_world.install(TUNER, cat="hang")
    order = scripts_world.order("latents", tuner.model_copy(update={"num_workers": 1}))
    order.write()
    path = os.pathsep.join(
        [str(Path(encode.__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    )
    job = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(order.path)],
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )
    try:
        hangs = TUNER / "src/musubi_tuner/hangs"
        deadline = time.monotonic() + 300
        while not (hangs.exists() and finished() == 2) and time.monotonic() < deadline:
            time.sleep(0.02)
        job.send_signal(number)
        assert job.wait(300) != 0
    finally:
        job.kill()
    assert finished() == 2
    (call,) = calls(TUNER)
    deadline = time.monotonic() + 100
    while runs(call["pid"]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not runs(call["pid"])  # it would keep its GPU
    scripts_world.set_moods(TUNER)
    receipt, _ = carry_out(order)
    assert receipt.counts["kept"] == 2 and receipt.counts["encoded"] == 4
    assert not list(Path(".latentmake/encoding").iterdir())


# -- files that are no caches ----------------------------------------------------------------------

WRONG = {
    "nothing": "wrote no cat_0080x0064_zi.safetensors",
    "nan": "had NaN",
    "header": "is one of the architecture wan, not z_image",
    "tensor": "holds no tensor latents_",
    "zeros": "nothing but zeros",
}


@pytest.mark.parametrize("mood", WRONG)
def test_a_file_that_is_no_cache_is_named_with_its_item(mood: str) -> None:
    tuner = scripts_world.install(TUNER, cat=mood)
    order = scripts_world.order("latents", tuner)
    line = faults(order)
    assert WRONG[mood] in line and "data/cat.png" in line and "1 of 6" in line
    assert len(calls(TUNER)) == 1 and finished() == 5
    if mood == "zeros":  # a hint that can be followed: a script has no `dtype`
        assert "check its file, and the weights and arguments of the model" in line


def test_a_file_of_another_caption_is_refused() -> None:
    tuner = scripts_world.install(TUNER, cat="caption")
    assert "is of another caption" in faults(scripts_world.order("text", tuner))
