"""From caption and tags to texts: the steps of sd-scripts, drawn from seed and name alone."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from latentmake.base.errors import SourceError
from latentmake.config.datasets import Captions
from latentmake.data.contents import decode_text, newlines
from latentmake.data.texts import clean, doubts, variants

# What no step divides at: no separators, no braces, no line ends, no space around.
WORD = st.text(st.characters(exclude_characters=",{}|\r\n", exclude_categories=["Cs"]), min_size=1)
PLAIN = WORD.map(str.strip).filter(bool)
ANY = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
NAME = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


def one(caption: str, tags: str = "", stem: str = "a", **settings: Any) -> str:
    return variants(stem, clean(caption), clean(tags), Captions(**settings))[0]


SPACE = st.text(" \t\r\n\x0b\x1c\x85\u2003")


@given(st.booleans(), SPACE, ANY, SPACE)
def test_a_caption_is_what_stands_between_mark_and_spaces_whatever_its_lines(
    mark: bool, before: str, text: str, after: str
) -> None:
    text = text.lstrip("\ufeff")
    data = f"{before}{text}{after}".encode("utf-8-sig" if mark else "utf-8")
    assert decode_text(data, "a.txt").strip() == newlines(text).strip()
    assert clean(decode_text(data, "a.txt")) == clean(f"{before}{text}{after}")


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        ("a cat".encode("utf-16-le"), "holds NUL characters (is it UTF-16?)"),
        ("a cat".encode("utf-16-be"), "holds NUL characters (is it UTF-16?)"),
        (b"a cat\0", "holds NUL characters"),
        ("a cat".encode("utf-16"), "is not UTF-8 (byte 1)"),
        (b"a" * 1_000_001, "is longer than 1000000 bytes"),
        ("\u00fc".encode() * 500_001, "is longer than 1000000 bytes"),
    ],
)
def test_bytes_that_are_no_caption_are_named_in_one_line(data: bytes, fault: str) -> None:
    with pytest.raises(SourceError, match=rf"^a\.txt: {re.escape(fault)}.*; .* UTF-8$"):
        decode_text(data, "a.txt")


def test_a_caption_may_be_as_long_as_its_limit() -> None:
    assert decode_text(b"\xef\xbb\xbf" + b"a" * 1_000_000, "a.txt") == "a" * 1_000_000


def test_a_wildcard_becomes_one_of_its_alternatives_and_doubled_braces_become_single_ones() -> None:
    caption = "a {red|blue} cat, {{x}} {on|in|by} { b }"
    found = {one(caption, stem=str(number), enable_wildcard=True) for number in range(90)}
    colors, places = ("red", "blue"), ("on", "in", "by")
    assert found == {f"a {color} cat, {{x}} {place}  b" for color in colors for place in places}


@given(ANY, ANY)
def test_without_settings_all_lines_count_or_for_sdscripts_the_first(
    caption: str, other: str
) -> None:
    text = clean(f"{caption}\n{other}")
    assert one(text) == text
    assert variants("a", text, "", Captions(), like_sdscripts=True) == [text.split("\n")[0]]


def test_a_shuffle_divides_at_separators_and_loses_no_line() -> None:
    found = one("a, b\nc, d", shuffle_caption=True)
    assert sorted(found.split(", ")) == ["a", "b\nc", "d"]


def test_tags_prefix_and_suffix_stand_around_all_lines() -> None:
    settings = {"caption_prefix": "<", "caption_suffix": ">"}
    assert one("a cat\nit sits", "x\ny", **settings) == "< a cat\nit sits,x,y >"


@given(st.lists(PLAIN, min_size=1, max_size=5), NAME)
def test_of_several_lines_one_is_taken(lines: list[str], stem: str) -> None:
    assert one("\n".join(lines), stem=stem, enable_wildcard=True) in lines


@pytest.mark.parametrize(
    "caption",
    [
        *("a {red|blue cat", "a red} cat", "a {red {dark|light}|blue} cat", "a {} cat"),
        *("a { | } cat", "sound\nnot {sound"),
    ],
)
def test_braces_that_do_not_fit_are_refused(caption: str) -> None:
    with pytest.raises(SourceError, match=r"has a .*write \{\{ and \}\}"):
        one(caption, enable_wildcard=True)
    assert one(caption) == caption  # where braces mean nothing


def test_each_line_has_prefix_and_suffix_where_one_is_taken_but_in_sdscripts_order() -> None:
    settings = Captions(
        variants=12, enable_wildcard=True, caption_prefix="{sks|sks},", caption_suffix="."
    )
    found = {*variants("a", "cat\ndog\nbird", "", settings)}
    assert found == {"sks, cat .", "sks, dog .", "sks, bird ."}
    found = {*variants("a", "cat\ndog\nbird", "", settings, like_sdscripts=True)}
    assert found == {"sks, cat", "dog", "bird ."}


@given(st.lists(PLAIN, min_size=1, max_size=8), st.integers(0, 9), NAME, st.integers(0, 99))
def test_a_shuffle_loses_no_tag_and_leaves_those_that_are_kept(
    tags: list[str], keep: int, stem: str, seed: int
) -> None:
    found = one(",".join(tags), stem=stem, seed=seed, shuffle_caption=True, keep_tokens=keep).split(
        ", "
    )
    assert found[:keep] == tags[:keep]
    assert sorted(found) == sorted(tags)


def test_tags_before_and_behind_the_keep_tokens_separator_stay() -> None:
    settings = {"shuffle_caption": True, "keep_tokens_separator": ";;;", "keep_tokens": 1}
    for number in range(20):
        found = one("a, b;;;c, d, e;;;f", stem=str(number), **settings).split(", ")
        assert [*found[:2], *sorted(found[2:5]), found[5]] == [*"abcdef"]


@pytest.mark.parametrize(
    ("separator", "joint"),
    [(",", ", "), (", ", ", "), (";", "; "), (" | ", " | "), (" ", " "), ("、", "、 ")],
)
def test_tags_are_joined_by_the_separator_that_split_them(separator: str, joint: str) -> None:
    tags = ["a", "b.c", "d"]
    settings = Captions(shuffle_caption=True, keep_tokens=1, caption_separator=separator)
    (found,) = variants("a", separator.join(tags), "", settings)
    assert found in {joint.join(tags), joint.join(["a", "d", "b.c"])}
    (found,) = variants("a", separator.join(tags), "", settings, like_sdscripts=True)
    assert found in {"a, b.c, d", "a, d, b.c"}


@pytest.mark.parametrize("changes", [{}, {"shuffle_caption": True}, {"enable_wildcard": True}])
def test_no_mark_of_kept_tags_stays_in_a_text(changes: dict[str, Any]) -> None:
    settings = {"keep_tokens_separator": "|||", "caption_separator": ";", **changes}
    assert one("sks cat ||| red; wall", **settings) in {"sks cat; red; wall", "sks cat; wall; red"}
    assert one("a|||b|||c|||d", **settings) == "a; b; c; d"
    assert one("sks", caption_suffix="||| old", **settings) == "sks; old"
    asked = Captions(keep_tokens_separator="|||")
    assert variants("a", "b ||| c", "", asked, like_sdscripts=True) == ["b ||| c"]


@pytest.mark.parametrize(
    ("settings", "ours", "theirs"),
    [
        ({"shuffle_caption": True, "caption_separator": ";"}, [], ["joins tags by `, `"]),
        ({"shuffle_caption": True, "caption_separator": ", "}, [], []),
        ({"keep_tokens_separator": "|||"}, [], ["leaves `|||` in texts"]),
        ({"enable_wildcard": True, "caption_prefix": "sks"}, [], ["only before the first line"]),
        ({"enable_wildcard": True, "caption_suffix": "sks"}, [], ["only behind the last line"]),
        ({"caption_prefix": "sks", "shuffle_caption": True}, ["is shuffled"], ["is shuffled"]),
        ({"caption_prefix": "sks", "shuffle_caption": True, "keep_tokens": 1}, [], []),
    ],
)
def test_settings_by_which_a_text_loses_what_it_was_meant_to_have_are_told(
    settings: dict[str, Any], ours: list[str], theirs: list[str]
) -> None:
    for like_sdscripts, expected in ((False, ours), (True, theirs)):
        lines = [*doubts(Captions(**settings), like_sdscripts)]
        assert len(lines) == len(expected)
        assert all(part in line for part, line in zip(expected, lines, strict=True))


@given(st.lists(PLAIN, min_size=1, max_size=8, unique=True), NAME)
def test_tag_dropout_leaves_tags_out_and_changes_none(tags: list[str], stem: str) -> None:
    found = one(",".join(tags), stem=stem, variants=2, keep_tokens=1, caption_tag_dropout_rate=0.5)
    left = found.split(", ")
    assert left[0] == tags[0]
    assert left == [tag for tag in tags if tag in left]


def test_a_secondary_separator_holds_tags_together() -> None:
    caption = "a;;;b, c, d;;;e;;;f"
    settings = {"secondary_separator": ";;;", "shuffle_caption": True}
    for number in range(20):
        found = one(caption, stem=str(number), **settings)
        assert "a,b" in found
        assert "d,e,f" in found


def test_the_steps_come_in_the_order_of_sd_scripts() -> None:
    found = one(
        "{x|x} sitting, b;;;c, old",
        caption_prefix="photo of",
        caption_suffix="indoors",
        enable_wildcard=True,
        shuffle_caption=True,
        keep_tokens=3,
        secondary_separator=";;;",
        replacements={"old": "new", "photo": "picture"},
    )
    assert found == "picture of x sitting, b,c, new indoors"


def test_a_replacement_of_everything_takes_one_of_its_texts() -> None:
    several = {"": ["one", "two"], "two": "three"}
    found = {one("caption", stem=str(number), replacements=several) for number in range(20)}
    assert found == {"one", "three"}


@pytest.mark.parametrize(
    ("how", "possible"),
    [
        ("join", {"a cat,x, y", "it sits,x, y"}),
        ("tags_first", {"x, y,a cat", "x, y,it sits"}),
        ("pick", {"a cat", "it sits", "x, y"}),
    ],
)
def test_caption_and_tags_come_together_as_asked(how: str, possible: set[str]) -> None:
    found = {
        one("a cat\nit sits", "x, y", stem=str(number), enable_wildcard=True, caption_and_tags=how)
        for number in range(60)
    }
    assert found == possible


def test_tags_alone_and_captions_alone_stay_as_they_are() -> None:
    for how in ("join", "tags_first", "pick"):
        assert one("a cat", "", caption_and_tags=how) == "a cat"
        assert one("", "x, y", caption_and_tags=how) == "x, y"


SETTINGS = st.builds(
    Captions,
    variants=st.integers(2, 5),
    seed=st.integers(0, 9),
    shuffle_caption=st.just(True),
    enable_wildcard=st.booleans(),
    caption_dropout_rate=st.sampled_from([0.0, 0.3]),
    caption_tag_dropout_rate=st.sampled_from([0.0, 0.3]),
)


@given(SETTINGS, st.lists(PLAIN, min_size=1, max_size=6), NAME)
def test_more_variants_leave_the_first_ones_as_they_are(
    settings: Captions, tags: list[str], stem: str
) -> None:
    caption = ", ".join(tags)
    more = settings.model_copy(update={"variants": settings.variants + 3})
    found = variants(stem, caption, "", settings)
    assert len(found) == settings.variants
    assert variants(stem, caption, "", more)[: settings.variants] == found


@given(st.lists(PLAIN, min_size=4, max_size=6, unique=True), NAME)
def test_variants_differ_while_there_are_different_ones(tags: list[str], stem: str) -> None:
    settings = Captions(variants=4, shuffle_caption=True)
    assert len(set(variants(stem, ", ".join(tags), "", settings))) == 4


def test_dropped_captions_are_as_many_as_the_rate_says() -> None:
    settings = Captions(variants=10, caption_dropout_rate=0.2, shuffle_caption=True)
    found = [text for n in range(300) for text in variants(str(n), "a, b, c, d, e", "", settings)]
    assert 0.17 < found.count("") / len(found) < 0.23  # 3000 draws: 0.2 with a deviation of 0.007


def test_the_same_seed_gives_these_very_texts_on_any_machine() -> None:
    settings = Captions(
        variants=3,
        seed=7,
        shuffle_caption=True,
        keep_tokens=1,
        enable_wildcard=True,
        caption_tag_dropout_rate=0.2,
    )
    caption = "an ant, {red|blue}, on grass, in the sun, {{x}}"
    assert variants("animals/ant", caption, "", settings) == PINNED


PINNED = [
    "an ant, blue, on grass, in the sun",
    "an ant, in the sun, on grass",
    "an ant, on grass, in the sun, {x}, blue",
]
