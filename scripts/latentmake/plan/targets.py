"""Targets of a command line: the runs they need, and hints for unknown ones."""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from latentmake.config.mistakes import nearest
from latentmake.config.runs import Run
from latentmake.errors import ConfigError
from latentmake.plan.orders import Order
from latentmake.plan.run_plan import Plan

_ENCODING_NOTHING = ("clips",)
_PER_RUN = (
    "train",
    "generate",
    "evaluate",
    "caches",
    "latents",
    "text",
    "publish",
    "export",
    "clips",
)
_PAGE = re.compile(
    r"reports/((?:captions|compare|evaluate|report)_.+)\.html|reports/(captions_.+)\.jsonl"
)
MOVED = {
    "adopt": "latentmake adopt {run}",
    "captions": "latentmake captions {run}",
    "check": "latentmake check {run}",
    "compare": "latentmake compare {run}",
    "explain": "latentmake explain PATH",
    "fetch": "rclone copy REMOTE:cache cache",
    "import": "latentmake import FILE --name {run}",
    "prune": "latentmake prune {run}",
    "report": "latentmake report {run}",
    "status": "latentmake status {run}",
    "store": "rclone copy cache REMOTE:cache",
    "verify": "latentmake verify {run}",
}
"""Word of a former target -> the command that does the same."""
_CLEANING = ("clean", "distclean", "clobber")


def as_words(targets: Sequence[str]) -> list[str]:
    """Return targets with `report_{run}` in place of the file that it writes, and so on."""
    pages = map(_PAGE.fullmatch, targets)
    return [page[1] or page[2] if page else each for each, page in zip(targets, pages, strict=True)]


def is_training_asked(run: str, targets: Sequence[str]) -> bool:
    """Whether some targets stand for the training of a run: its own, what follows it, or all."""
    return (
        is_generation_asked(run, targets)
        or is_evaluation_asked(run, targets)
        or not targets
        or any(each in ("all", f"train_{run}", f"runs/{run}/trained.json") for each in targets)
    )


def is_generation_asked(run: str, targets: Sequence[str]) -> bool:
    """Whether some targets stand for the clips that a run generates."""
    return any(each in (f"generate_{run}", f"runs/{run}/generated.json") for each in targets)


def kinds_built(run: str, targets: Sequence[str]) -> set[str]:
    """Return the kinds of caches that a build of some targets makes for a run."""
    kinds = {"latents", "text"}
    words = {word for word in _PER_RUN if f"{word}_{run}" in targets}
    if not targets or "all" in targets or any(x.startswith(f"runs/{run}/") for x in targets):
        return kinds
    return kinds if words - kinds - {*_ENCODING_NOTHING} else kinds & words


def built_orders(plan: Plan, targets: Sequence[str]) -> list[Order]:
    """Return the orders of a plan that a build of some targets carries out, none twice."""
    named = {target for target in targets if target.startswith("cache/")}
    found = {
        order.name: order
        for name, run in plan.runs.items()
        for order in run.orders
        if order.kind in kinds_built(name, targets) or not named.isdisjoint(order.paths)
    }
    return [*found.values()]


def needs_encoders(targets: Sequence[str], runs: Collection[str], *, caches: bool) -> bool:
    """Whether some targets need the encoders of their runs on this machine.

    `caches` is `publish.caches`: without it the trainer's machine has the encoders.
    """
    words = ("clips",) if caches else ("clips", "publish")
    known = {f"{word}_{run}" for word in words for run in runs}
    return not targets or not known.issuperset(targets)


def is_evaluation_asked(run: str, targets: Sequence[str]) -> bool:
    """Whether some targets stand for the evaluation of a run."""
    return f"evaluate_{run}" in targets


def runs_asked_for(targets: Sequence[str], runs: Mapping[str, Run]) -> list[str]:
    """Return the runs that some targets need: all of them where a target does not tell.

    Raises:
        ConfigError: a target names an unknown run.
    """
    found: dict[str, None] = {}
    for target in targets:
        if target.startswith("cache/"):
            continue
        word, _, name = target.partition("_")
        if target.startswith("runs/"):
            word, name = "runs", target.split("/")[1]
        if word in ("runs", *_PER_RUN) and name and "/" not in name and name not in runs:
            guess = nearest(name, runs)
            meant = target.replace(name, guess or "", 1)
            hint = f"did you mean `{meant}`?" if guess else f"known: {', '.join(runs)}"
            raise ConfigError(f"there is no run `{name}`", where=target, hint=hint)
        if name not in runs or word not in ("runs", *_PER_RUN):
            if target != "all" and "/" not in target and not target.startswith("encode_"):
                continue  # another rule, or a target that there is not: see `check_known`
            return list(runs)
        found[name] = None
    return list(found) if targets else list(runs)


def check_known(
    targets: Iterable[str],
    runs: Collection[str],
    *,
    rules: Collection[str],
    is_made: Callable[[str], bool],
) -> None:
    """Refuse the first target that is no rule, no file, and `is_made` by no rule.

    A file of ours that is spelled otherwise than rules spell it would count as one that is there.
    """
    for target in targets:
        spelled = os.path.relpath(target)
        if spelled != target and spelled.startswith(("cache/", "reports/", "runs/")):
            what = "is a spelling that no rule has"
            raise ConfigError(what, where=target, hint=f"write `{spelled}`")
        if target in rules or Path(target).exists():
            continue
        if not target.startswith((".latentmake/", "cache/")) and not is_made(target):
            raise _unknown(target, rules, runs)


def refuse_moved(targets: Sequence[str], configfiles: Iterable[Path]) -> None:
    """Refuse a former target of Snakemake that is a word of the command `latentmake` now.

    Raises:
        ConfigError: for the first such target; the hint is the command to type.
    """
    for target in as_words(targets):
        word, _, run = target.partition("_")
        if command := MOVED.get(word):
            names = run.replace("_vs_", " ") if word == "compare" else run
            command = command.format(run=names or "RUN")
            if command.startswith("latentmake") and word != "import":  # which reads none
                command += "".join(f" -c {shlex.quote(os.path.relpath(x))}" for x in configfiles)
            hint = f"type `{command}`"
            raise ConfigError("is no longer a target of Snakemake", where=target, hint=hint)


def _unknown(target: str, names: Iterable[str], runs: Iterable[str]) -> ConfigError:
    """Return the error for an unknown target, with the nearest one or all of them."""
    what = "there is no such target"
    named = [name for name in names if "/" not in name and not name.startswith("encode_")]
    run = max((each for each in runs if target.endswith(f"_{each}")), key=len, default=None)
    own = sorted({f"{word}_{run}" for word in _PER_RUN} & {*named})
    words = [name.removesuffix(f"_{run}") for name in own]
    word = target.removesuffix(f"_{run}")
    if guess := difflib.get_close_matches(word if own else target, words or named, n=1, cutoff=0.6):
        return ConfigError(
            what,
            where=target,
            hint=f"did you mean `{guess[0]}_{run}`?" if own else f"did you mean `{guess[0]}`?",
        )
    if own:
        return ConfigError(what, where=target, hint=f"of the run {run} there are {', '.join(own)}")
    if target in _CLEANING:
        what += ": caches without an item are removed by a build, others by `latentmake prune`"
    shown = [f"{word}_{{run}}" for word in _PER_RUN if any(n.startswith(f"{word}_") for n in named)]
    hint = f"targets: all, {', '.join(shown)}, cache/...; runs: {', '.join(runs)}"
    return ConfigError(what, where=target, hint=hint)
