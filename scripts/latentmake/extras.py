"""Extras: what is made on request of a run's caches, or after its training.

Clips that a trained network draws, evaluations, exports, datasets cut into clips, publications.
"""

from __future__ import annotations

from collections.abc import Iterator

from latentmake import backends
from latentmake.files.disk import Need
from latentmake.plan.facts import Facts
from latentmake.plan.orders import write_order
from latentmake.plan.run_plan import Plan, RunPlan
from latentmake.request import Request

_FOLLOWING = ("generate", "evaluate")  # words of what follows a training


def followed(facts: Facts, request: Request) -> Iterator[str]:
    """Yield the runs of which something is asked that follows their training.

    Raises:
        ConfigError: it cannot be done.
    """
    for name in request.runs:
        if words := [word for word in _FOLLOWING if word in request.words[name]]:
            from latentmake.reports.following import refuse_following

            for word in words:
                refuse_following(facts.config, name, word)
            yield name


def plan_extras(
    facts: Facts, plan: Plan, request: Request, orders: dict[str, dict[str, str]], *, force: bool
) -> Iterator[Need]:
    """Write the orders of what is asked of runs; yield the room that it needs.

    A publication without caches needs no planned run.

    Args:
        facts: of the runs.
        plan: theirs.
        request: of the command line.
        orders: run -> kind of an order -> its path; gets the new ones.
        force: whether also what is there already has an order.
    """
    for name in (name for name, words in request.words.items() if "publish" in words):
        backend = backends.of_run(facts.config, name)
        if backend is None or not backend.publishes:
            continue
        backend.check_publication(facts, name)
        if not facts.config.publish.caches:
            from latentmake.training.external.publication import write_items

            published = backend.order_publication(facts, name, write_items(facts, name))
            orders.setdefault(name, {})["publish"] = str(published)
    for name, run in plan.runs.items():
        words = request.words[name]
        if "export" in words:
            orders[name]["export"] = _export(facts, run)
        if "clips" in words:
            orders[name]["clips"], need = _clips(facts, run)
            yield need
        for word in _FOLLOWING:
            if word in words and (order := _following(facts, run, word, force=force)):
                orders[name][word] = order


def _export(facts: Facts, run: RunPlan) -> str:
    from latentmake.exchange.ai_training.plan import plan_export

    return write_order(run.name, "export", plan_export(facts, run, facts.config.runs[run.name]))


def _clips(facts: Facts, run: RunPlan) -> tuple[str, Need]:
    from latentmake.exchange.clip_files.order import plan_clips

    clips = plan_clips(facts, run, facts.config.runs[run.name])
    return write_order(run.name, "clips", clips), clips.need


def _following(facts: Facts, run: RunPlan, word: str, *, force: bool) -> str:
    """Return the order of what follows a training; "" where there is nothing to do."""
    from latentmake.reports.following import plan_following

    backend = backends.of_run(facts.config, run.name)
    assert backend is not None  # it has a trainer that does this: see `followed`
    order, reasons = plan_following(facts, run, backend, word)
    return str(order) if reasons or force else ""
