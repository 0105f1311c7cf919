"""Targets on request, `{word}_{run}`: their orders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from latentmake import backends
from latentmake.config import Config, Run
from latentmake.exchange.adoption_kinds import plan_adoption
from latentmake.exchange.ai_training.plan import plan_export
from latentmake.exchange.clip_files.order import ClipsOrder, plan_clips
from latentmake.files.disk import Need
from latentmake.plan.facts import Facts
from latentmake.plan.orders import write_order
from latentmake.plan.parts import RunPlan
from latentmake.plan.targets import is_evaluation_asked, is_generation_asked, refuse_company
from latentmake.reports.evaluation import plan_evaluated, refuse_evaluation
from latentmake.reports.generated import plan_generated, refuse_clips
from latentmake.training.external.publication import is_uncached, write_items

__all__ = ["Asked", "plan_following", "plan_requests", "runs_followed"]

Asked = dict[str, dict[str, str]]
"""Run -> kind of an order -> its path."""

_REQUESTS: dict[str, Callable[[Facts, RunPlan, Run], object]] = {
    "adopt": plan_adoption,
    "export": plan_export,
    "clips": plan_clips,
}
"""Word of a target `{word}_{run}` that is done on request alone -> makes its order, for JSON."""
_FOLLOWING = {
    "generate": (is_generation_asked, refuse_clips, plan_generated),
    "evaluate": (is_evaluation_asked, refuse_evaluation, plan_evaluated),
}
"""Word of a target after a training -> whether it is asked for, what refuses it, its plan."""


def plan_requests(
    facts: Facts, runs: Mapping[str, RunPlan], targets: Sequence[str]
) -> tuple[Asked, list[Need]]:
    """Write the orders of what is done on request alone; return them, and the room they need."""
    config = facts.config
    refuse_company(targets, config.runs)
    asked: Asked = {}
    needs: list[Need] = []
    for name, plan in runs.items():
        asked[name] = {}
        for kind, make in _REQUESTS.items():
            if f"{kind}_{name}" in targets:
                made = make(facts, plan, config.runs[name])
                asked[name][kind] = write_order(name, kind, made)
                needs += [made.need] if isinstance(made, ClipsOrder) else []
    for name in config.runs:
        target = f"publish_{name}"
        backend = backends.of_run(config, name) if target in targets else None
        if backend is None or not backend.publishes:
            continue
        backend.check_publication(facts, name)
        if is_uncached(target, config):
            order = backend.order_publication(facts, name, write_items(facts, name))
            asked.setdefault(name, {})["publish"] = str(order)
    return asked, needs


def runs_followed(config: Config, names: Sequence[str], targets: Sequence[str]) -> Iterator[str]:
    """Yield the runs of which more than a training is asked for; refuse what cannot be done."""
    for name in names:
        for is_asked, refuse, _ in _FOLLOWING.values():
            if is_asked(name, targets):
                refuse(config, name)
                yield name


def plan_following(
    facts: Facts,
    runs: Mapping[str, RunPlan],
    targets: Sequence[str],
    asked: Asked,
    *,
    force: bool,
) -> None:
    """Write the orders of clips and evaluations asked for, where there is anything to do."""
    for name, plan in runs.items():
        backend = backends.of_run(facts.config, name)
        for word, (is_asked, _, make) in _FOLLOWING.items():
            if backend is not None and is_asked(name, targets):
                order = make(facts, plan, backend, force=force)
                asked[name] |= {} if order is None else {word: str(order)}
