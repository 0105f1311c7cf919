"""The request of a command line: the runs that it needs, and the targets of each run.

On a cluster, each job reads the Snakefile again, while other jobs end and other builds plan. So the
planning process writes a plan file. The others find its path in an environment variable.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel

from latentmake import backends
from latentmake.base import atomic
from latentmake.base.errors import ConfigError, nearest
from latentmake.base.machine import Need
from latentmake.base.state_file import read_order
from latentmake.config.root import Config
from latentmake.plan.facts import Facts
from latentmake.plan.orders import FOLDER, RUNS, EncodingJob, Order
from latentmake.plan.run_plan import Plan, RunPlan, write_order

VARIABLE = "LATENTMAKE_PLAN"
"""Environment variable with the path of the plan file."""

CACHES = frozenset({"latents", "text", "captions"})
_TRAINING = CACHES | {"training"}
_WORDS = {
    "train": _TRAINING,
    "generate": _TRAINING,
    "evaluate": _TRAINING,
    "caches": CACHES,
    "manifest": CACHES,
    "latents": {"latents"},
    "text": {"text", "captions"},
    "captions": {"captions"},
    "publish": CACHES,
    "export": CACHES,
    "clips": {"items"},
}
"""Word of a target `{word}_{run}` -> its needs: kinds of the run's caches, training, or items."""

_EXTRAS = {"generate", "evaluate", "publish", "export", "clips"}

_FILES = {"dataset.lock": "manifest", "manifest.jsonl": "manifest", "generated.json": "generate"}
_FILES |= {"generated": "generate", "evaluation": "evaluate"}
"""File or folder of a run -> word of the job that makes it; `train` makes all others."""

_MADE = frozenset(("captions", "latents", "text", "manifest", "train", "generate", "evaluate"))
_RULES = {"--forceall": _MADE, "--force": frozenset[str](), "all": {"train"}}
_RULES |= {name: {name} for name in _MADE}
"""Option of Snakemake, or rule of many runs or files -> words that it forces."""

_COMMAND = "(adopt|captions|check|compare|explain|import|prune|report|status|verify)(_.*)?"
"""Targets of earlier releases that are words of the command `latentmake` now."""

_PAGE = re.compile(r"^reports/(evaluate_.+)\.html$")
"""File of a report page; the first group is the target that makes it."""


class Request:
    """Request of a command line.

    Attributes:
        targets: targets of the command line; an empty list stands for everything.
        files: cache files that the command line names.
        runs: runs to plan; all runs if a target does not name its run.
        words: run -> words of its requested targets and files.
        kinds: run -> kinds of caches that a build makes for it.
        trained: runs whose training is requested, also by a target that needs the training.
        extras: whether a target other than caches and trainings is requested.
        encodes: whether the request may need the runs' encoders on this machine.
        forced: targets that are made again although they are fresh, see `Facts.forced`.

    Args:
        targets: targets of the command line; an empty list stands for everything.
        config: configuration with the runs.
        force: `--forceall`, `--force`, and the rules and targets of `--forcerun`.

    Raises:
        ConfigError: a target names an unknown run.
    """

    def __init__(self, targets: Sequence[str], config: Config, force: Iterable[str] = ()) -> None:
        again = [*force]
        if "--force" in force:
            again += targets or ["all"]
        if named := [name for name in force if name == "all" or name not in _RULES]:
            targets = [*(targets or ["all"]), *named]
        self.targets = [_PAGE.sub(r"\1", target) for target in targets]
        self.files = {target for target in self.targets if target.startswith("cache/")}
        self.words = {name: set[str]() for name in config.runs}
        is_everything = needs_all_runs = not targets or "all" in targets
        for target in {*self.targets} - self.files:
            word, name = _parts(target, config.runs)
            if name:
                self.words[name].add(word)
            elif "/" in target or target.startswith("encode_"):
                needs_all_runs = True
        kinds_of = _WORDS if config.publish.caches else _WORDS | {"publish": set()}
        needs = {
            name: frozenset[str]().union(*(kinds_of[word] for word in words))
            for name, words in self.words.items()
        }
        if is_everything:
            needs = dict.fromkeys(config.runs, _TRAINING)
        self.kinds = {name: CACHES & kinds for name, kinds in needs.items()}
        self.runs = [name for name, kinds in needs.items() if kinds or needs_all_runs]
        self.encodes = bool(self.files or any(self.kinds.values())) or needs_all_runs
        self.trained = [name for name in self.runs if "training" in needs[name]]
        self.extras = any(_EXTRAS & words for words in self.words.values())
        self.forced = {name for target in again for name in self._forced(target, config)}

    def _forced(self, target: str, config: Config) -> Iterator[str]:
        if target in _RULES:
            yield from _RULES[target] & CACHES
            for name in self.runs:
                made = {*self.kinds[name], *self.words[name], "manifest"}
                made |= {"train"} if name in self.trained else set()
                yield from (f"{word}_{name}" for word in made & _RULES[target])
        elif target in self.files:
            yield target
        else:
            word, name = _parts(_PAGE.sub(r"\1", target), config.runs)
            words = CACHES if word == "caches" else (word,)
            yield from (f"{made}_{name}" for made in words)

    def orders(self, plan: Plan) -> list[Order]:
        """Return the orders of a plan that a build carries out, without duplicates."""
        of_runs = ((name, order) for name, run in plan.runs.items() for order in run.orders)
        needed = {id(order) for name, order in of_runs if order.kind in self.kinds[name]}
        named = set[str]().union(*plan.named.values()).intersection
        return [order for order in plan.orders if id(order) in needed or named(order.paths)]

    def check(self, rules: Collection[str], is_made: Callable[[str], bool]) -> None:
        """Raise ConfigError for the first target that is no rule or file, and `is_made` by no rule.

        Another spelling of a rule's file (`./runs/...`) is refused: it would count as existing.
        """
        for target in self.targets:
            spelled = os.path.relpath(target)
            if spelled != target and spelled.startswith(("cache/", "reports/", "runs/")):
                what = "is a spelling that no rule has"
                raise ConfigError(what, where=target, hint=f"write `{spelled}`")
            exists = target in rules or target in self.files or Path(target).exists()
            if not exists and not is_made(target):
                raise _unknown(target, rules, self.words)


def word_and_run(target: str) -> tuple[str, str]:
    """Return word and run of a target, even if no such run exists; "" for other targets."""
    word, _, name = _PAGE.sub(r"\1", target).partition("_")
    if target.startswith("runs/"):
        name, file = [*target.split("/", 3), ""][1:3]
        word = _FILES.get(file, "train")
    return (word, name) if word in _WORDS and name and "/" not in name else ("", "")


def _parts(target: str, runs: Collection[str]) -> tuple[str, str]:
    """Return word and run of a target; both are "" if it is no target of a run."""
    word, name = word_and_run(target)
    if name and name not in runs:
        guess = nearest(name, runs)
        meant = target.replace(name, guess or "", 1)
        hint = f"did you mean `{meant}`?" if guess else f"known: {', '.join(runs)}"
        raise ConfigError(f"there is no run `{name}`", where=target, hint=hint)
    return word, name


def _unknown(target: str, rules: Iterable[str], runs: Iterable[str]) -> ConfigError:
    """Return the error for an unknown target; it names the nearest target or all targets."""
    if command := re.fullmatch(_COMMAND, target):
        hint = f"type `latentmake {command[1]}`; see `latentmake {command[1]} --help`"
        return ConfigError("is no longer a target of Snakemake", where=target, hint=hint)
    if (run := target.removeprefix("publish_")) != target and run in runs:
        hint = "its trainer trains here; only runs of musubi and sdscripts train elsewhere"
        return ConfigError(f"the run {run} is not published", where=target, hint=hint)
    names = [name for name in rules if "/" not in name and not name.startswith("encode_")]
    words = [word for word in _WORDS if any(name.startswith(f"{word}_") for name in names)]
    listed = f"targets: all, {', '.join(f'{word}_{{run}}' for word in words)}, cache/..."
    guess = difflib.get_close_matches(target, names, n=1)
    hint = f"did you mean `{guess[0]}`?" if guess else f"{listed}; runs: {', '.join(runs)}"
    return ConfigError("there is no such target", where=target, hint=hint)


class PlanFile(BaseModel, extra="forbid", frozen=True):
    """Content of the plan file.

    `jobs` is rule -> names of orders. `runs` is run -> kind (`manifest`, `train`, ...) -> path.
    """

    jobs: dict[str, list[str]] = {}
    runs: dict[str, dict[str, str]] = {}

    def write(self, planned: int) -> None:
        """Write the file of a plan made at `planned` (ns), and set the environment variable."""
        path = RUNS / f"plan.{planned}.json"
        atomic.write(path, self.model_dump_json().encode())
        os.environ[VARIABLE] = str(path)

    @classmethod
    def read(cls) -> PlanFile:
        """Read the file that the environment variable names; an empty plan if it is not set."""
        path = os.environ.get(VARIABLE)
        return read_order(Path(path), cls.model_validate_json) if path else cls()

    def plan(self, allowed: Collection[str] = ()) -> Plan:
        """Return a plan of only the encoding jobs; with `allowed`, only of these rules."""
        rules = [rule for rule in self.jobs if not allowed or rule in allowed]
        paths = ([FOLDER / f"{name}.json" for name in self.jobs[rule]] for rule in rules)
        return Plan({}, [EncodingJob(tuple(map(Order.read, of_rule))) for of_rule in paths])


FOLLOWING = {"generate": "runs/{run}/generated.json", "evaluate": "reports/evaluate_{run}.html"}
"""Word of a job that follows a training -> the file that shows it is done."""


def followed(facts: Facts, request: Request) -> Iterator[str]:
    """Yield the runs whose targets follow a training; raises ConfigError if one is impossible."""
    for name in request.runs:
        if words := [word for word in FOLLOWING if word in request.words[name]]:
            from latentmake.pages.following import refuse_following

            for word in words:
                refuse_following(facts.config, name, word)
            yield name


def plan_extras(
    facts: Facts, plan: Plan, request: Request, orders: dict[str, dict[str, str]]
) -> Iterator[Need]:
    """Write the orders of targets other than caches and trainings; yield the space they need.

    A read-only command writes no orders. A publication without caches needs no planned run.

    Args:
        facts: facts about the runs.
        plan: plan of the runs.
        request: request of the command line.
        orders: run -> kind of an order -> its path; new orders are added.
    """
    for name in (name for name, words in request.words.items() if "publish" in words):
        backend = backends.of_run(facts.config, name)
        if backend is not None and backend.publishes:
            backend.check_publication(facts, name)
            if not facts.config.publish.caches:
                published = backend.plan_publication(facts, name)
                orders.setdefault(name, {})["publish"] = str(published)
    for name, run in plan.runs.items():
        words = request.words[name]
        if "export" in words:
            exported = backends.target_module("export").plan_for(facts, name)
            orders[name]["export"] = write_order(facts, name, "export", exported)
        if "clips" in words:
            clips = backends.target_module("clips").plan_for(facts, name)
            orders[name]["clips"] = write_order(facts, name, "clips", clips)
            yield clips.need
        for word in FOLLOWING:
            if word in words and (order := _following(facts, run, word)):
                orders[name][word] = order


def _following(facts: Facts, run: RunPlan, word: str) -> str:
    """Return the order of a job that follows a training; "" if there is nothing to do."""
    from latentmake.pages.following import reason_line

    backend = backends.of_run(facts.config, run.name)
    assert backend is not None  # it has a trainer that does this: see `followed`
    order, reasons = backend.plan_following(facts, run, word)
    line = reason_line(run.name, word, reasons, forced=f"{word}_{run.name}" in facts.forced)
    run.note = f"{run.note}\n{line}".strip()
    return str(order) if line else ""
