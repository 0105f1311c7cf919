"""The header of trained weights tells as much of the data as the user lets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from latentmake.formats import cachefile
from latentmake.formats.safetensors import read_head
from latentmake.runs import history
from latentmake.runs.order import Record, RunFiles
from latentmake.trainers.musubi.backend import Musubi
from latentmake.trainers.weights_metadata import base_of, describe_copy, for_copy, metadata_of
from musubi_world import RUN, make_run, stand_in, write_order
from safetensors.torch import load_file, save_file
from trainer_world import make_manifest, make_order, make_training

pytestmark = pytest.mark.usefixtures("own_folder")

CAPTIONS = {
    "anna_schmidt": "sks, red hair, Anna Schmidt smiling, indoors",
    "bernd": "sks, red hair, Bernd Huber in the rain",
    "clara/portrait": "sks, red hair, indoors",
    "same": "sks, Clara Maier",
}
NAMES = ("anna", "schmidt", "bernd", "huber", "clara", "maier", "portrait", "people", "indoors")


def people(root: Path) -> None:
    """Write a manifest of a dataset with names of people in captions and file names."""
    path = make_manifest(root, tokens=(7,) * len(CAPTIONS))
    rows = [json.loads(row) for row in path.read_text().splitlines()]
    for row, (stem, caption) in zip(rows[:-1], CAPTIONS.items(), strict=True):
        row |= {"dataset": "people", "stem": stem, "texts": [caption], "repeats": 3}
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows[:-1]))


MODES: dict[str, dict[str, Any]] = {
    "none": {},
    "standard": {"trigger": "sks", "title": "Red", "author": "me", "license": "CC0-1.0"},
    "full": {"prompts": True},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished training of each mode, and of their history."""
    root = tmp_path_factory.mktemp("metadata")
    people(root)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(root)
        for mode, settings in MODES.items():
            given = {"metadata": mode, "output": mode, **settings}
            make_training(make_order(root, steps=2, rank=2, **given)).run()
    return root


def header(folder: Path, name: str = "kohya") -> dict[str, str]:
    (path,) = folder.glob(f"*{name}*.safetensors")
    return read_head(path).metadata


def test_standard_tells_no_caption_and_no_file_name(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained)
    folder = trained / "standard"
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes().lower()
        assert [name for name in NAMES if name.encode() in data] == []
    said = header(folder)
    assert said == header(folder) | {
        "latentmake.run": "tiny",
        "latentmake.items": "4",
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": "stable-diffusion-v1/lora",
        "modelspec.title": "Red",
        "modelspec.trigger_phrase": "sks",
        "modelspec.author": "me",
        "modelspec.license": "CC0-1.0",
        "modelspec.tags": "sks, red hair",
        "modelspec.resolution": "16x16",
        "ss_network_dim": "2",
        "ss_num_train_images": "12",
        "ss_steps": "2",
    }
    assert json.loads(said["ss_tag_frequency"]) == {"3_dataset1": {"red hair": 3, "sks": 4}}
    assert json.loads(said["ss_dataset_dirs"]) == {"3_dataset1": {"n_repeats": 3, "img_count": 4}}
    assert {"modelspec.date", "latentmake.captions"}.isdisjoint(said)
    records = {each.folder.name: each.record for each in history.trainings("tiny")}
    record = records[said["latentmake.training"]]
    assert said["latentmake.roster"] == record.roster
    assert json.loads(said["latentmake.parts"]) == record.parts
    assert len(said["ss_new_sd_model_hash"]) == 64


def test_full_tells_captions_date_and_a_thumbnail_and_none_tells_nothing(trained: Path) -> None:
    full = header(trained / "full")
    assert json.loads(full["latentmake.captions"]) == {
        f"people/{stem}": [caption] for stem, caption in CAPTIONS.items()
    }
    assert "anna schmidt smiling" in json.loads(full["ss_tag_frequency"])["3_people"]
    assert full["modelspec.thumbnail"].startswith("data:image/webp;base64,")
    assert full["modelspec.date"] > "2020-01-01T00:00:00"
    assert float(full["ss_training_started_at"]) > 0
    none = header(trained / "none")
    assert not [key for key in none if key.startswith(("latentmake.", "modelspec."))]
    assert none["ss_network_dim"] == "2"


def test_the_tensors_and_the_reason_to_train_are_the_same_with_any_header(
    trained: Path, tmp_path: Path
) -> None:
    paths = [trained / mode / "kohya.safetensors" for mode in MODES]
    assert len({path.read_bytes()[len(read_head(path).data) :] for path in paths}) == 1
    orders = [make_order(tmp_path, title=title, trigger="sks") for title in ("One", "Two")]
    one, two = (order.wanted() for order in orders)
    assert one == two == make_order(tmp_path, metadata="none").wanted()
    assert orders[0].settings() == orders[1].settings()


def test_a_complete_unet_has_the_metadata_too(tmp_path: Path) -> None:
    people(tmp_path)
    order = make_order(tmp_path, steps=1, adapter="full", title="All")
    make_training(order).run()
    said = read_head(RunFiles(order).weights).metadata
    assert said["modelspec.architecture"] == "stable-diffusion-v1" and said["format"] == "pt"
    assert "ss_network_dim" not in said and load_file(RunFiles(order).weights)


def test_no_tag_is_a_complete_caption_or_has_too_few_items(tmp_path: Path) -> None:
    rows = [("a", ["Anna"]), ("b", ["Anna"]), ("c", ["anna, blue", "blue", "x, blue"])]
    rows += [("d", ["blue, sky"]), ("e", ["sky, blue, dog"]), ("f", ["sky"]), ("dog", ["dog, sky"])]
    items = [history.RosterItem(dataset="d", stem=stem, texts=texts) for stem, texts in rows]
    lines = "".join(f"{item.model_dump_json()}\n" for item in items).encode()
    record = history.begin("tiny", lines, Record(parts={}, seconds=0))
    said = metadata_of(make_order(tmp_path), record)
    # anna and sky are complete captions, dog has two items, blue is a text of an item.
    assert "ss_tag_frequency" not in said and "modelspec.tags" not in said


def test_the_base_is_named_by_the_hash_of_its_file() -> None:
    save_file({"x": torch.ones(3)}, "base.safetensors")
    assert base_of("base.safetensors")["ss_sd_model_name"] == "base.safetensors"
    assert base_of("nowhere") == base_of(None) == {}


def test_a_copy_of_another_programs_file_keeps_its_tensors(tmp_path: Path) -> None:
    own = {"ss_network_module": "networks.loha", "ss_datasets": '[{"image_dir": "anna"}]'}
    save_file({"b": torch.ones(3), "a": torch.zeros(2)}, "theirs.safetensors", own)
    theirs, copy = Path("theirs.safetensors"), Path("copy.safetensors")
    before = theirs.read_bytes()
    described = {"modelspec.title": "Ours", "ss_network_module": "networks.lora"}
    cachefile.describe_copy(theirs, copy, for_copy(own, described, full=False))
    assert theirs.read_bytes() == before
    assert before.endswith(copy.read_bytes()[len(read_head(copy).data) :])
    assert read_head(copy).metadata == {
        "modelspec.title": "Ours",
        "ss_network_module": "networks.loha",
    }
    assert "ss_datasets" in for_copy(own, described, full=True)


@pytest.mark.parametrize("mode", ["none", "standard"])
def test_no_metadata_of_a_launched_trainer_is_changed(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    order = make_run(Path.cwd(), tuner=stand_in(tmp_path / "tuner"), metadata=mode)
    receipt, log = Path(f"runs/{RUN}/trained.json"), Path("logs/train.log")
    Musubi().train(write_order(order, Path("order.json")), log=log, receipt=receipt, threads=1)
    theirs = Path(f"runs/{RUN}/{RUN}.safetensors")
    copy = theirs.with_suffix(".described.safetensors")
    assert theirs.read_bytes() == Path(f"runs/{RUN}/output/{RUN}.safetensors").read_bytes()
    assert "latentmake.run" not in read_head(theirs).metadata
    (training,) = history.trainings(RUN)
    assert copy.exists() == (mode == "standard") == (copy.name in training.record.files)
    if copy.exists():
        assert read_head(copy).metadata["latentmake.run"] == RUN


def test_the_copy_of_a_lora_of_wan_2_2_names_its_version(tmp_path: Path) -> None:
    order = make_run(tmp_path, model={"task": "t2v-A14B"})
    roster = history.roster_of(Path(order.manifest))
    record = history.begin(RUN, roster, Record(parts={}, seconds=0))
    own = {"modelspec.architecture": "wan2.1/lora", "ss_network_dim": "4"}
    save_file({"x": torch.ones(1)}, RunFiles(order).weights, own)
    (copy,) = Path(order.output).glob(describe_copy(order, record))
    assert read_head(copy).metadata["modelspec.architecture"] == "wan2.2/lora"
