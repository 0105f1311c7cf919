"""The history of a run: every training keeps what it saw and how it went."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from latentmake.base import atomic
from latentmake.commands.uses import advice, trainings_with
from latentmake.formats import cachefile
from latentmake.plan.product import Made, Parts
from latentmake.runs import history
from latentmake.runs.history import UNKNOWN_END, RosterItem, items_of, trainings
from latentmake.runs.order import Record, RunFiles, write_parts
from PIL import Image

pytestmark = pytest.mark.usefixtures("own_folder")

RUN = Path("runs/cats")
MANIFEST = RUN / "manifest.jsonl"
PACKED = gzip.compress(b'{"dataset": "cats", "stem": "a"}\n', mtime=0)


def cache(path: str, source: str, **metadata: str) -> str:
    stamp = cachefile.stamp(key="k", source=source, recipe={}, view='{"flip":true}')
    atomic.write(Path(path), cachefile.serialize({"x": torch.ones(1)}, {**stamp, **metadata}))
    return path


def manifest(**captions: str) -> None:
    """Write a manifest with an item for each caption, and its cache files."""
    size = {"original_width": "640", "original_height": "480"}
    rows = [
        {
            "dataset": "cats",
            "stem": stem,
            "source": f"data/{stem}.png",
            "repeats": 2,
            "latents": {"64": cache(f"cache/{stem}.l", f"picture of {stem}", **size)},
            "text": cache(f"cache/{stem}.t", "text", caption=caption),
        }
        for stem, caption in captions.items()
    ]
    atomic.write(MANIFEST, "".join(f"{json.dumps(row)}\n" for row in rows).encode())


def parts(rank: int = 4) -> Parts:
    return {"dataset": "d", "settings": f"rank {rank}", "network": "w"}


def order(keep: int = 50) -> Any:
    return SimpleNamespace(
        run="cats", manifest=str(MANIFEST), output=str(RUN), results=["lora"], keep=keep
    )


def train(rank: int = 4, keep: int = 50) -> Record:
    """Train, as far as the history is concerned."""
    record = Record(parts=parts(rank), seconds=1.5, files={"lora": "digest"})
    record = history.begin("cats", history.roster_of(MANIFEST), record)
    atomic.write(RUN / "lora", b"")
    record.write(RUN / "training.json")
    history.finish(order(keep), record, RUN / "trained.json")
    return record


def test_a_training_keeps_texts_digests_repeats_and_sizes_of_its_items() -> None:
    manifest(a="a red cat")
    train()
    manifest(a="a blue cat")
    ((_, folder, record, _),) = trainings("cats")
    assert items_of(folder) == items_of(RUN) == [
        RosterItem(
            dataset="cats", stem="a", source="picture of a", texts=["a red cat"], repeats=2,
            size=(640, 480), resolutions=["64"], view='{"flip":true}',
        )
    ]  # fmt: skip
    assert (record.ended, record.seconds) == ("", 1.5)


def test_each_training_has_a_folder_of_its_own_and_an_equal_one_has_the_same() -> None:
    manifest(a="a red cat")
    first, second = train(4), train(8)
    manifest(a="a blue cat")
    third = train(8)
    assert [training.record for training in trainings("cats")] == [third, second, first]
    bytes_before = {path: path.read_bytes() for path in RUN.glob("history/*/roster.jsonl.gz")}
    train(8)
    assert bytes_before == {p: p.read_bytes() for p in RUN.glob("history/*/roster.jsonl.gz")}


def test_a_training_that_does_not_finish_is_known_with_its_reason_until_it_does() -> None:
    manifest(a="a red cat")
    record = Record(parts=parts(), seconds=0)
    begun = history.begin("cats", history.roster_of(MANIFEST), record)
    assert [training.record.ended for training in trainings("cats")] == [UNKNOWN_END]
    history.note_end("cats", begun, "the loss is NaN at step 3")
    (noted,) = trainings("cats")
    assert noted.record.ended == "the loss is NaN at step 3"
    assert noted.items
    again = train()
    assert [training.record.ended for training in trainings("cats")] == [""]
    assert again.began == begun.began


def test_old_trainings_are_forgotten_but_those_whose_weights_are_there() -> None:
    manifest(a="a red cat")
    train(1)
    shutil.copytree(RUN, RUN / "previous", ignore=shutil.ignore_patterns("history"))
    for rank in (2, 3, 4):
        train(rank, keep=2)
    settings = [training.record.parts["settings"] for training in trainings("cats")]
    assert settings == ["rank 4", "rank 3", "rank 1"]


def test_a_damaged_sample_picture_does_not_keep_a_training_from_finishing() -> None:
    manifest(a="a red cat")
    whole, cut = (RUN / f"output/sample/{name}.png" for name in ("whole", "cut"))
    whole.parent.mkdir(parents=True)
    Image.effect_noise((64, 48), 50).save(whole)
    cut.write_bytes(whole.read_bytes()[:500])
    train()
    ((_, folder, *_),) = trainings("cats")
    with Image.open(folder / "samples.webp") as small:
        assert small.size == (64, 48)


def as_release_0_2(record: Record) -> None:
    shutil.rmtree(RUN / "history")
    earlier = record.model_copy(update={"roster": "", "began": 0})
    Made.write(earlier, RUN / "training.json")


def test_a_result_of_an_earlier_release_is_in_the_history_from_its_manifest() -> None:
    manifest(a="a red cat")
    as_release_0_2(train())
    assert items_of(RUN) is None  # the lock is not that of the training
    atomic.write(RUN / "dataset.lock", json.dumps({"digest": "d"}).encode())
    (training,) = trainings("cats")
    texts = [item.texts for item in training.items or ()]
    assert (training.folder, texts) == (RUN, [["a red cat"]])
    history.keep_earlier("cats")
    manifest(a="a blue cat")
    atomic.write(RUN / "dataset.lock", json.dumps({"digest": "other"}).encode())
    (training,) = trainings("cats")
    assert [item.texts for item in training.items or ()] == [["a red cat"]]
    assert training.weights == [str(RUN / "lora")]


@pytest.mark.parametrize(
    "content",
    [PACKED[:-9], b"no gzip", gzip.compress(b'{"stem": 1}\n')],
    ids=["cut", "other", "damaged"],
)
def test_a_damaged_roster_is_unknown_and_written_again(
    content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest(a="a red cat")
    train()
    (training,) = trainings("cats")
    (training.folder / "roster.jsonl.gz").write_bytes(content)
    assert training.items is None
    assert "); Latentmake no longer knows what this training saw; " in capsys.readouterr().err
    train()
    assert training.items


def test_the_folder_is_found_by_files_of_the_run() -> None:
    assert RunFiles(order()).history == RUN / "history"


@pytest.mark.parametrize(
    "place",
    [
        "saved/step-000005/wanted.json",
        "checkpoints/step-000005/progress.json",
        "output/wanted.json",
    ],
)
def test_weights_of_an_unfinished_training_are_deleted_and_not_trained_again(place: str) -> None:
    manifest(a="a red cat")
    record = Record(parts=parts(), seconds=0)
    history.begin("cats", history.roster_of(MANIFEST), record)
    write_parts(RUN / place, parts())
    (training,) = trainings_with(lambda source, texts: source == "picture of a")
    assert training["saved"] == []
    (RUN / place).with_name("weights.safetensors").touch()
    (training,) = trainings_with(lambda source, texts: source == "picture of a")
    folder = str((RUN / place).parent)
    assert (training["weights"], training["saved"]) == ([], [folder])
    assert [*advice([training], [])] == [
        f"only saved steps or checkpoints contain it: delete {folder}"
    ]
