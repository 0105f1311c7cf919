"""Edits since the last training of a run: its items beside those that the training saw."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from latentmake.data.item import Item
from latentmake.errors import TrainingError
from latentmake.files.workspace import is_remote
from latentmake.plan.facts import Facts
from latentmake.plan.manifest import read_lock, result_folder, run_folder
from latentmake.reports.captions import Card
from latentmake.training.order import Origin
from latentmake.training.seen import SeenItem, read_seen, seen_items


class Edits:
    """What was edited since the last training of a run.

    Pictures are compared by digests, which are computed only where a picture is not known yet.
    Pictures at a URL are not compared.

    Attributes:
        known: whether it is known what the last training saw.
        gone: stems of items that it saw and that are not there any more.
    """

    def __init__(self, facts: Facts, run: str, cards: Sequence[Card]) -> None:
        self._seen = _read_seen(run)
        self.known = bool(self._seen)
        self.gone = sorted(
            stem for _, stem in self._seen.keys() - {(x.dataset, x.item.stem) for x in cards}
        )
        model = facts.config.runs[run].model
        layout = facts.layout(model)
        inputs: dict[str, dict[str, Item]] = {}
        for card in cards if self.known else ():
            own = inputs.setdefault(card.dataset, {})
            own[card.item.stem] = card.item.inputs("latents", layout)
        self._inputs = inputs
        self._contents = {
            dataset: facts.judge(dataset, model, [], own.values(), []).contents
            for dataset, own in inputs.items()
        }

    def of(self, card: Card) -> dict[str, list[str] | bool]:
        """Return what was edited of an item.

        Returns:
            Nothing where nothing was edited or the last training is unknown; else `new`, or
            `before` (the texts that the training saw), `repainted` or both.
        """
        if not self.known:
            return {}
        was = self._seen.get((card.dataset, card.item.stem))
        if was is None:
            return {"new": True}
        found = dict[str, list[str] | bool]()
        if not card.fault and was.texts != [text.text for text in card.texts]:
            found["before"] = was.texts
        if was.source and self._digest(card) not in (None, was.source):
            found["repainted"] = True
        return found

    def _digest(self, card: Card) -> str | None:
        if is_remote(card.item.image):
            return None
        return self._contents[card.dataset].of(self._inputs[card.dataset][card.item.stem])


def _read_seen(run: str) -> dict[tuple[str, str], SeenItem]:
    """Return dataset and stem -> item of a run's last finished training; empty where unknown.

    A result of an earlier release has no such file. Its items are known as long as the lock is the
    one that it was trained on.
    """
    folder = result_folder(run)
    found = read_seen(folder)
    if found is None:
        record = Origin.read(folder / "training.json")
        if record is None or record.wanted.data != read_lock(run).data:
            return {}
        with suppress(TrainingError):
            found = [*seen_items(run_folder(run) / "manifest.jsonl")]
    return {(item.dataset, item.stem): item for item in found or ()}
