"""Snapshots of listings in the memo."""

from __future__ import annotations

from latentmake.index.listing import Folder
from latentmake.index.memo import Memo
from latentmake.plan.snapshots import Asked, keep, latest
from latentmake.plan.state import PartState
from latentmake.sources.item import Scan


def test_lines_of_a_replaced_snapshot_are_not_those_of_another() -> None:
    """A plan beside another one must not mistake missing lines for missing targets."""
    asked = Asked("cats", "tiny", ("text",), "", Scan("data", [], ""), Folder("cache"))
    state = Evaluation({"text": PartState(1, lines=lambda: {"a": "a\tkey"})})
    with Memo(None) as memo:
        keep(memo, asked, {"a": "a.png"}, state)
        memo.save()
        read, unread = latest(memo, asked), latest(memo, asked)
        assert read is not None
        assert unread is not None
        assert read.lines("text") == {"a": "a\tkey"}
        keep(memo, asked, {"a": "a.png"}, state)
        memo.save()
        assert unread.lines("text") is None
        assert read.lines("text") == {"a": "a\tkey"}
