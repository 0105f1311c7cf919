"""Control images and layers are those that musubi-tuner's own datasets read, in their sizes."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from conftest import answer_of, sources
from controlled_world import configured, draw
from latentmake.config.root import Config
from latentmake.data.item import Item
from latentmake.data.memo import Memo
from latentmake.geometry.buckets import Size
from latentmake.plan.facts import Facts

pytestmark = [pytest.mark.real_trainer, pytest.mark.usefixtures("own_folder")]

STEMS = ("a", "a_1", "a_b", "a.b", "ab", "a_1_2", "b")
ARCHITECTURES = {  # their short names, which musubi-tuner's datasets take
    "qwen_image_edit": "qie",
    "flux_2_dev": "f2d",
    "flux_kontext": "fk",
    "hidream_o1": "ho1",
    "framepack": "fp",
    "qwen_image_layered": "qil",
}
RESOLUTION = Size(96, 64)


class Case:
    """A drawn dataset: its section for us, and its arguments for musubi-tuner.

    Attributes:
        colours: name of each file -> red of its pixels.
    """

    def __init__(self, number: int) -> None:
        self.draw = random.Random(number)
        self.architecture = self.draw.choice([*ARCHITECTURES])
        self.folder = f"case{number}"
        self.colours: dict[str, int] = {}
        self.settings: dict[str, Any] = {"bucket_no_upscale": self.draw.random() < 0.3}
        for stem in self.draw.sample(STEMS, self.draw.randint(1, 4)):
            self._put("data", f"{stem}.png")
            Path(f"{self.folder}/data/{stem}.txt").write_text(stem)
        if self.architecture == "qwen_image_layered":
            self.settings["multiple_target"] = True
            self._put_beside("data")
        else:
            Path(self.folder, "control").mkdir()
            self.settings["control_directory"] = f"{self.folder}/control"
            self._put_beside("control")
        if self.architecture == "framepack":
            indices = [*range(self.draw.randint(1, 3))]
            self.settings |= {"fp_1f_clean_indices": indices, "fp_1f_target_index": 9}
        elif self.architecture != "qwen_image_layered":
            if self.draw.random() < 0.5:
                self.settings["no_resize_control"] = True
            if self.draw.random() < 0.5:
                self.settings["control_resolution"] = self.draw.choice([[64, 96], [160, 160]])
        self.path = f"{self.folder}/data"
        if self.draw.random() < 0.3:
            self._list()

    def _put(self, folder: str, name: str) -> None:
        size = self.draw.randint(40, 200), self.draw.randint(40, 200)
        self.colours[f"{folder}/{name}"] = colour = 3 * len(self.colours) + 1
        draw(f"{self.folder}/{folder}/{name}", colour, size)

    def _put_beside(self, folder: str) -> None:
        """Draw pictures whose names continue those of the items."""
        stems = [Path(name).stem for name in self.colours]
        ends = ["_0", "_1", "_2", "_10", "_x"] + [""] * (folder == "control")
        most = 1 if self.architecture == "flux_kontext" and self.draw.random() < 0.7 else 2
        for stem in stems:
            count = 2 if folder == "data" else self.draw.choice([1, most, most, 2])
            weights = [5, 5, 5, 3, 0.1, 3][: len(ends)]
            for end in {*self.draw.choices(ends, weights, k=count)}:
                if f"{folder}/{stem}{end}.png" not in self.colours:
                    self._put(folder, f"{stem}{end}.png")

    def _list(self) -> None:
        """Write a list whose rows name any of the pictures as controls or layers."""
        self.path = f"{self.folder}/list.jsonl"
        layered = self.settings.pop("control_directory", None) is None
        beside, rows = [name for name in self.colours if name[:4] != "data" or layered], []
        for stem in [
            name for name in self.colours if Path(self.folder, name).with_suffix(".txt").exists()
        ]:
            names = self.draw.choices(beside, k=2 if layered else self.draw.randint(0, 3))
            numbers = [1, 2] if layered else self.draw.sample(range(12), len(names))
            columns = dict(zip(numbers, (f"{self.folder}/{name}" for name in names), strict=True))
            kind = "image_path" if layered else "control_path"
            row = {f"{kind}_{number}": os.path.abspath(path) for number, path in columns.items()}
            if len(names) == 1 and self.draw.random() < 0.5:
                row = {kind: next(iter(row.values()))}
            first = "image_path_0" if layered else "image_path"
            rows.append({first: os.path.abspath(f"{self.folder}/{stem}"), "caption": "x", **row})
        Path(self.path).write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    @property
    def config(self) -> Config:
        return configured(self.architecture, path=self.path, **self.settings)

    def arguments(self, path: Path) -> dict[str, Any]:
        """Return the arguments of musubi-tuner's dataset."""
        given = {"enable_bucket": True, "caption_extension": ".txt", "resolution": RESOLUTION}
        given |= {"architecture": ARCHITECTURES[self.architecture], **self.settings}
        key = "image_directory" if self.path.endswith("data") else "image_jsonl_file"
        given[key] = str(path / self.path)
        if "control_directory" in given:
            given["control_directory"] = str(path / self.settings["control_directory"])
        return given

    def named(self, paths: list[str]) -> list[int]:
        """Return the colours of some files."""
        return [self.colours[path.removeprefix(f"{self.folder}/")] for path in paths]


def variants(facts: Facts, item: Item) -> tuple[str, str]:
    """Return the variants of an item's latents, and of a text that reads its controls."""
    assert item.media is not None
    layout, settings = facts.layout("model"), facts.config.datasets["pictures"]
    image, sizes = Size(item.media.width, item.media.height), item.control_sizes
    return (
        layout.view(image, RESOLUTION, settings, controls=sizes)[0],
        layout.view(image, RESOLUTION, settings, is_text=True, controls=sizes)[0],
    )


def name(picture: list[int]) -> str:
    return f"{picture[0]}x{picture[1]}"


def test_items_have_the_controls_layers_and_sizes_that_musubi_tuner_gives_them(
    tmp_path: Path, forked_venv: Path
) -> None:
    cases = [Case(number) for number in range(120)]
    Path("cases.json").write_text(json.dumps([case.arguments(tmp_path) for case in cases]))
    script = Path(__file__).with_name("read_datasets.py")
    source = sources("musubi-tuner") / "src"
    answers = answer_of(forked_venv / "bin/python", script, tmp_path / "cases.json", paths=[source])
    compared, refused = 0, 0
    for case, answer in zip(cases, answers, strict=True):
        facts = Facts(case.config, Memo(None))
        items, faults = facts.items("pictures", "model")
        if "error" in answer:
            assert faults, (case.folder, answer)
            refused += 1
        if faults:  # we refuse more: what it would leave out in silence
            continue
        assert {Path(item.stem).name for item in items} == answer.keys(), case.folder
        for item in items:
            read = answer[Path(item.stem).name]
            shown = (case.folder, case.architecture, case.settings, item)
            assert case.named([*item.controls]) == [each[2] for each in read["controls"]], shown
            layers = case.named([item.image, *item.layers])
            assert layers == [each[2] for each in read["pictures"]], shown
            bucket, sizes = name(read["pictures"][0]), [*map(name, read["controls"])]
            latents, text = variants(facts, item)
            beside = "+".join(sizes[:1] if len({*sizes}) == 1 else sizes)
            assert latents == (bucket if {*sizes} <= {bucket} else f"{bucket}+{'+'.join(sizes)}")
            assert not sizes or text == f"controls:{beside}", shown
            compared += 1
    assert compared > 120 and refused > 20, (compared, refused)
