"""Answers of captioners: which are no captions, and what settings make of the others."""

from __future__ import annotations

from typing import Any

import pytest
from latentmake.config.captioners import Captioner
from latentmake.data.captions_made import answer_fault, processed


def caption(text: str, **settings: Any) -> str:
    return processed(text, Captioner.model_validate({"model": "m", **settings}))


@pytest.mark.parametrize(
    ("answer", "settings", "expected"),
    [
        (" A cat\n  on a mat. ", {}, "A cat on a mat."),
        ("", {"trigger": "sks"}, "sks"),
        ("a cat", {"trigger": "sks", "prefix": "a photo of"}, "sks, a photo of a cat"),
        ("sks, a cat", {"trigger": "sks"}, "sks, a cat"),
        ("skscat", {"trigger": "sks"}, "sks, skscat"),
        ("A man and a woman", {"replace": {"A man": "Bob", "man": "sks man"}}, "Bob and a woman"),
        ("a man\nsits", {"replace": {"man  sits": r"\1 sits"}}, r"a \1 sits"),
        ("a C++ book", {"replace": {"C++": "Rust"}}, "a Rust book"),
        ("The image shows a cat.", {"drop": ["the image shows"]}, "a cat."),
        ("In this picture: a cat", {"drop": ["in this picture"]}, "a cat"),
        ("1girl, solo, long hair", {"drop": ["1girl"]}, "solo, long hair"),
        ("solo, 1girl, long hair", {"drop": ["1girl"]}, "solo, long hair"),
        ("solo, 1girl", {"drop": ["1girl"]}, "solo"),
        ("1girls, solo", {"drop": ["1girl"]}, "1girls, solo"),
        ("a b, c d", {"max_words": 2}, "a b"),
        ("a b, c d", {"max_words": 4}, "a b, c d"),
        ("a b c", {"max_words": 1, "trigger": "sks", "prefix": "my"}, "sks, my a"),
    ],
)
def test_settings_change_a_caption(answer: str, settings: dict[str, Any], expected: str) -> None:
    assert caption(answer, **settings) == expected


@pytest.mark.parametrize(
    "answer",
    [
        "a red circle on a white background",
        "a very, very, very old man",
        "no, no, no, no",
        "1girl, solo, long hair, long sleeves, long skirt, long hair ribbon, white hair ribbon",
        "a red circle, a red square, a red triangle and a red star",
        "The man wears a hat. The woman wears a hat. The child wears a coat. The dog wears a hat.",
        "a circle and a circle and a circle",
        "一只猫坐在垫子上,一只狗坐在地板上",
        "A sign says 100000000000.",
        "a b c d e f, a b c d e f",
    ],
)
def test_a_caption_has_no_fault(answer: str) -> None:
    assert answer_fault(answer) is None


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        ("", "empty"),
        (" \n.,! ", "empty"),
        ("the the the the the the the the", "repeats the same phrase: the"),
        ("a man, and a dog, and a dog, and a dog, and a dog", "a dog"),
        ("It is on a big table. " * 3, "big table"),
        ("A cat. " + "It sits on a mat. It looks at a dog. " * 9, "repeats"),
        ("猫" * 30, "猫"),
        ("hahaha" * 20, "ha"),
    ],
)
def test_an_empty_or_looping_answer_is_a_fault(answer: str, fault: str) -> None:
    found = answer_fault(answer)
    assert found is not None and fault in found
    assert len(found) < 120


def test_a_long_loop_is_cut_in_its_message() -> None:
    phrase = " ".join(f"word{number}" for number in range(90))
    assert answer_fault(f"{phrase} {phrase}") is None
    found = answer_fault(f"{phrase} {phrase} {phrase}")
    assert found is not None and len(found) < 120
