"""Edits since the last training of a run: differences from the items that the training saw."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from latentmake.base.errors import TrainingError
from latentmake.data.item import Item
from latentmake.pages.captions import Card
from latentmake.plan.facts import Facts
from latentmake.plan.manifest import read_lock, result_folder, run_folder
from latentmake.training.order import parts_in
from latentmake.training.seen import SeenItem, read_seen, seen_items


class Edits:
    """Items that were edited since the last training of a run.

    Pictures are compared by their digests. A digest is computed only if the memo does not have it.
    Pictures at a URL are not compared.

    Attributes:
        has_record: whether a record says which items the last training saw.
        gone: stems of items that the training saw and that no longer exist.
    """

    def __init__(self, facts: Facts, run: str, cards: Sequence[Card]) -> None:
        self._seen = _read_seen(run)
        self.has_record = bool(self._seen)
        present = {(card.dataset, card.item.stem) for card in cards}
        self.gone = sorted(stem for _, stem in self._seen.keys() - present)
        model = facts.config.runs[run].model
        layout = facts.layout(model)
        inputs: dict[str, dict[str, Item]] = {}
        for card in cards if self.has_record else ():
            own = inputs.setdefault(card.dataset, {})
            own[card.item.stem] = card.item.inputs("latents", layout)
        self._inputs = inputs
        self._contents = {
            dataset: facts.judge(dataset, model, [], own.values(), []).contents
            for dataset, own in inputs.items()
        }

    def of(self, card: Card) -> dict[str, list[str] | bool]:
        """Return the edits of an item.

        Returns:
            An empty dict if nothing was edited or no training is recorded. Otherwise `new`, or
            `before` (the texts that the training saw), `repainted` or both.
        """
        if not self.has_record:
            return {}
        was = self._seen.get((card.dataset, card.item.stem))
        if was is None:
            return {"new": True}
        edits = dict[str, list[str] | bool]()
        if not card.fault and was.texts != card.texts:
            edits["before"] = was.texts
        if was.source and self._digest(card) not in (None, was.source):
            edits["repainted"] = True
        return edits

    def _digest(self, card: Card) -> str | None:
        if card.item.is_remote:
            return None
        return self._contents[card.dataset].of(self._inputs[card.dataset][card.item.stem])


def _read_seen(run: str) -> dict[tuple[str, str], SeenItem]:
    """Return dataset and stem -> item of a run's last finished training; empty if unknown.

    Results of earlier releases have no file of the items. Their items are read from the manifest,
    as long as the lock is the one of that training.
    """
    folder = result_folder(run)
    items = read_seen(folder)
    if items is None:
        parts = parts_in(folder / "training.json")
        if parts is None or parts.get("dataset") != read_lock(run).data:
            return {}
        with suppress(TrainingError):
            items = [*seen_items(run_folder(run) / "manifest.jsonl")]
    return {(item.dataset, item.stem): item for item in items or ()}
