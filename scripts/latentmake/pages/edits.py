"""Edits since the last training of a run: differences from the items that the training saw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from latentmake.data.contents import Contents
from latentmake.data.item import Item
from latentmake.pages.captions import Card
from latentmake.plan.facts import Facts
from latentmake.plan.manifest import result_folder
from latentmake.runs.history import RosterItem, items_of


def edits(
    facts: Facts, run: str, seen: Mapping[tuple[str, str], RosterItem], cards: Sequence[Card]
) -> list[dict[str, list[str] | bool]]:
    """Return the edits of each card's item since the last training of a run.

    Pictures are compared by their digests. A digest is computed only if the memo does not have it.
    Pictures at a URL are not compared.

    Args:
        facts: facts about the configuration.
        run: name of the run.
        seen: items that the training saw, as `items_seen` returns them.
        cards: cards of the run's items.

    Returns:
        An empty dict if nothing was edited or no training is recorded. Otherwise `new`, or `before`
        (the texts that the training saw), `repainted` or both.
    """
    model = facts.config.runs[run].model
    inputs: dict[str, dict[str, Item]] = {}
    for card in cards if seen else ():
        own = card.item.inputs("latents", facts.layout(model))
        inputs.setdefault(card.dataset, {})[card.item.stem] = own
    contents = {
        dataset: Contents(
            (file for item in own.values() for file in item.files),
            facts.memo,
            facts.config.datasets[dataset],
        )
        for dataset, own in inputs.items()
    }

    def of(card: Card) -> dict[str, list[str] | bool]:
        if (was := seen.get((card.dataset, card.item.stem))) is None:
            return {"new": True}
        edited = dict[str, list[str] | bool]()
        if not card.fault and was.texts != card.texts:
            edited["before"] = was.texts
        if was.source and not card.item.is_remote:
            source = contents[card.dataset].of(inputs[card.dataset][card.item.stem])
            if source not in (None, was.source):
                edited["repainted"] = True
        return edited

    return [of(card) if seen else {} for card in cards]


def items_seen(run: str) -> dict[tuple[str, str], RosterItem]:
    """Return dataset and stem -> item of a run's last finished training; empty if unknown."""
    items = items_of(result_folder(run))
    return {(item.dataset, item.stem): item for item in items or ()}
