"""A file of trained weights is explained wherever it lies and whatever it is called."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from config_world import smallest
from latentmake.base import digest
from latentmake.base.errors import SourceError
from latentmake.commands.explain import without_project
from latentmake.commands.file_origin import Explanation
from latentmake.commands.weights_origin import WeightsExplanation, explained
from latentmake.config.root import parse
from latentmake.data.memo import Memo
from latentmake.plan.facts import Facts
from latentmake.plan.product import Parts
from latentmake.runs import history
from latentmake.runs.history import RosterItem
from latentmake.runs.order import Record
from PIL import Image
from safetensors.torch import save_file

pytestmark = pytest.mark.usefixtures("own_folder")

PARTS: Parts = {"dataset": "d" * 64, "settings": "s" * 64, "network": "n" * 64}
ITEMS = [
    RosterItem(dataset="cats", stem=stem, source=stem, texts=[f"a {stem} cat"])
    for stem in ("red", "blue", "old", "fat")
]
KOHYA = {
    "ss_output_name": "theirs",
    "ss_base_model_version": "sdxl_base_v1-0",
    "ss_new_sd_model_hash": "IsADirectory",
    "ss_network_dim": "16",
    "ss_learning_rate": "0.0001",
    "ss_optimizer": "None",
    "ss_training_started_at": "1700000000.5",
    "ss_dataset_dirs": '{"10_cat": {"n_repeats": 10, "img_count": 7}}',
    "ss_tag_frequency": '{"10_cat": {"cat": 7, "tree": 2}}',
}


def write(path: str, **metadata: str) -> Path:
    save_file({"x": torch.ones(2)}, path, metadata)
    return Path(path)


def train(**metadata: str) -> Path:
    """Note a training in the history of the run `cats`, and return its weights."""
    lines = "".join(f"{item.model_dump_json()}\n" for item in ITEMS).encode()
    record = Record(
        parts=PARTS, values={"settings": {"rank": "4"}}, places={"network": "models/unet"},
        seconds=90, steps=20, device="cpu", loss_start=0.5, loss_end=0.25,
    )  # fmt: skip
    record = history.begin("cats", lines, record)
    folder = history.history_folder("cats", record.parts, record.roster)
    named = {"latentmake.run": "cats", "latentmake.training": folder.name}
    weights = write("runs/cats/lora.safetensors", **(named if metadata else {}), **metadata)
    files = {weights.name: digest.of_file(weights)}
    record.model_copy(update={"files": files}).write(folder / "training.json")
    return weights


def said(path: Path | str) -> str:
    explanation = explained(None, str(path))
    assert explanation is not None
    return "\n".join(explanation.lines())


def test_a_renamed_copy_elsewhere_tells_its_training_items_and_captions() -> None:
    weights = train(**{"modelspec.title": "My cats"})
    Path("elsewhere").mkdir()
    copy = shutil.copy(weights, "elsewhere/renamed.safetensors")
    lines = said(copy)
    for words in (
        *("cats, recognised by the digest", ", 20 steps, ", "on cpu, loss 0.5000 -> 0.2500"),
        *("rank 4", "(models/unet)"),
        *("4 (cats 4)", 'cats/red: "a red cat"', "and 1 more", "My cats"),
    ):
        assert words in lines, words


def test_a_file_without_header_is_recognised_by_its_digest() -> None:
    weights = train()
    shutil.move(weights, "x.safetensors")
    assert "cats, recognised by the digest of the file" in said("x.safetensors")
    write("changed.safetensors", other="1")
    assert "no training of this folder made it" in said("changed.safetensors")


def test_a_file_that_another_program_changed_is_recognised_by_its_header() -> None:
    weights = train(title="x")
    (training,) = history.trainings("cats")
    named = {"latentmake.run": "cats", "latentmake.training": training.folder.name}
    save_file({"x": torch.zeros(2)}, weights, named)
    assert "cats, recognised by its header" in said(weights) and "4 (cats 4)" in said(weights)


def test_without_its_history_the_header_is_all() -> None:
    captions = json.dumps({"cats/red": ["a red cat"]})
    weights = train(**{"latentmake.items": "4", "latentmake.captions": captions})
    copy = Path("copy.safetensors")
    shutil.move(weights, copy)
    shutil.rmtree("runs")
    lines = said(copy)
    assert "cats, recognised by its header; the history of the run is not here" in lines
    assert "items       4" in lines and 'cats/red: "a red cat"' in lines


def test_the_header_of_a_file_of_kohyas_is_told_in_the_same_form() -> None:
    lines = said(write("theirs.safetensors", **KOHYA))
    for words in (
        *(
            "unknown (no training of this folder",
            "sdxl_base_v1-0",
            "2023-11-1",
            "10_cat (7 images)",
        ),
        *("network_dim 16, learning_rate 0.0001", "cat (7), tree (2)", "1 (F32)"),
    ):
        assert words in lines, words
    assert "optimizer" not in lines and "IsADirectory" not in lines
    assert "has no metadata" in said(write("plain.safetensors"))


def test_values_of_unexpected_kinds_break_nothing() -> None:
    odd = {"ss_tag_frequency": '{"a": 3, "b": {"c": "d"}}', "ss_dataset_dirs": "[1]"}
    odd |= {"latentmake.captions": '{"a": 1, "b": {"c": 2}}', "ss_training_started_at": "long ago"}
    odd |= {"ss_sd_model_name": "x", "modelspec.title": "\x1b[31mred\na line"}
    lines = said(write("odd.safetensors", **odd))
    assert "trained" not in lines and "tags" not in lines and "base        x" in lines
    assert "title       \\x1b[31mred\\na line" in lines


def test_no_file_of_weights_and_a_damaged_one_are_told_apart(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write("cut.safetensors")
    data = Path("cut.safetensors").read_bytes()
    Path("cut.safetensors").write_bytes(data[:-1])
    with pytest.raises(SourceError, match=r"cut\.safetensors: is cut short"):
        explained(None, "cut.safetensors")
    assert explained(None, "cut.safetensors", Explanation("cut.safetensors", "stale")) is None
    assert explained(None, "none.safetensors") is None and explained(None, "train_cats") is None
    assert not without_project("train_cats", False, False, None, None)
    assert without_project(str(write("theirs.safetensors", **KOHYA)), False, True, None, None)
    (values,) = json.loads(capsys.readouterr().out)
    assert values["metadata"] == KOHYA and values["state"] == "unknown"
    Path("cats.yaml").write_text("runs: {}\n")
    assert not without_project("theirs.safetensors", False, True, None, None)


def test_a_page_has_the_items_and_the_pictures_that_still_exist_under_any_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("typer.launch", opened.append)
    facts = Facts(parse(smallest()), Memo(None))
    Path("data/cats").mkdir(parents=True)
    for name in ("red", "blue"):
        Image.new("RGB", (30, 20), name).save(f"data/cats/{name}.png")
        Path(f"data/cats/{name}.txt").write_text("another caption")
    sources = [digest.of_file(Path(f"data/cats/{name}.png")) for name in ("red", "blue")]
    Path("data/cats/blue.png").unlink()
    items = [
        RosterItem(dataset="old", stem=stem, source=source, texts=[f"a {stem} <b>cat</b>"])
        for stem, source in zip(("one", "two"), sources, strict=True)
    ]
    explanation = WeightsExplanation("x.safetensors", "fresh", items=items)
    explanation.open_page(facts)
    page = Path("reports/explain_x.html")
    assert opened == [page.absolute().as_uri()]
    text = page.read_text()
    assert text.count("data:image/webp;base64,") == 1
    assert text.count("no dataset has this picture today") == 1
    assert "a two " in text and "<b>cat" not in text
    explanation.open_page(None)
    assert "data:image/webp" not in page.read_text()
    Path("data/cats/red.png").unlink()
    explanation.open_page(Facts(parse(smallest()), Memo(None)))
    assert page.read_text().count("no dataset has this picture today") == 2
    with pytest.raises(SourceError, match="not known here"):
        WeightsExplanation("x.safetensors", "unknown").open_page(None)
