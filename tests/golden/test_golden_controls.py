"""Datasets of Wan keep their keys and manifests, with one control image and with none."""

from __future__ import annotations

import json

import pytest
from golden_controls import GOLDEN, planned


@pytest.mark.parametrize("dataset", ["cats", "dogs"])
def test_a_plan_says_of_a_wan_dataset_what_it_always_said(dataset: str) -> None:
    assert planned()[dataset] == json.loads(GOLDEN.read_text())[dataset]
