"""A product is made again where a part differs from its record, or a file is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from latentmake.base.state_file import is_damaged
from latentmake.plan.product import Made, Product, judge

A, B = "a" * 64, "b" * 64
OLD = Product(
    "it has not been made yet",
    {"dataset": A, "network": A, "version": 1},
    {"dataset": {"caches of cats": A, "num_repeats of cats": "1"}},
    {"network": "models/old"},
)


def reasons(product: Product, made: Made | None) -> list[str]:
    return [*map(str, judge(product, made))]


def test_a_product_is_up_to_date_if_its_parts_are_those_of_its_record(tmp_path: Path) -> None:
    assert reasons(OLD, None) == ["it has not been made yet"]
    file = tmp_path / "made"
    product = OLD._replace(files=[file])
    assert reasons(product, Made.of(OLD)) == [f"{file} is missing"]
    file.touch()
    assert reasons(product, Made.of(OLD)) == []
    assert reasons(product._replace(values={}, places={}), Made.of(OLD)) == []


def test_a_difference_is_told_by_the_values_behind_a_digest_or_by_the_part() -> None:
    values = {"dataset": {"caches of cats": A, "num_repeats of cats": "3"}}
    new = Product("", {"dataset": B, "network": B, "version": 2}, values, {"network": "models/new"})
    assert reasons(new, Made.of(OLD)) == [
        "num_repeats of cats 1 -> 3",
        "network aaaaaaaa.. (models/old) -> bbbbbbbb.. (models/new)",
        "version 1 -> 2",
    ]
    unnamed = Made(parts=OLD.parts)  # a record without the values
    assert reasons(new, unnamed)[0] == "dataset aaaaaaaa.. -> bbbbbbbb.."
    assert reasons(OLD._replace(parts={"dataset": A}, places={}), unnamed) == [
        "network aaaaaaaa.. -> none",
        "version 1 -> none",
    ]


def test_a_record_is_read_as_it_was_written_without_keys_at_their_defaults(tmp_path: Path) -> None:
    path, made = tmp_path / "record.json", Made(parts=OLD.parts)
    made.write(path)
    assert json.loads(path.read_bytes()) == {"parts": OLD.parts}
    made.values["dataset"] = {"caches of cats": A}
    made.write(path)
    assert Made.read(path) == made


@pytest.mark.parametrize("content", ['{"parts": []}', '{"wanted": {"data": "d"}}', "[]", "{"])
def test_a_damaged_record_is_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "record.json"
    path.write_text(content)
    assert Made.read(path) is None and is_damaged(path)


def test_a_record_of_release_0_2_has_the_same_parts(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text('{"wanted": {"data": "d", "settings": "s", "weights": "w", "resumed": "r"}}')
    made = Made.read(path)
    parts = {"dataset": "d", "settings": "s", "network": "w", "version of the trainer": 1}
    assert made is not None and made.parts == parts
