"""The request of a command line: which runs it needs, what of each, and what is made beside them.

On a cluster each job reads the Snakefile again, while other jobs finish and other builds plan. The
planning process writes the plan file; the others find its path in an environment variable.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from latentmake import backends
from latentmake.config.root import Config
from latentmake.errors import ConfigError, nearest
from latentmake.files import atomic
from latentmake.files.state_file import read_order
from latentmake.files.workspace import Need
from latentmake.plan.facts import Facts
from latentmake.plan.orders import FOLDER, RUNS, Order, job_of
from latentmake.plan.run_plan import Plan, RunPlan, write_items, write_order

VARIABLE = "LATENTMAKE_PLAN"
"""Environment variable with the path of the plan file."""

CACHES = frozenset({"latents", "text"})
_TRAINING = CACHES | {"training"}
_WORDS = {
    "train": _TRAINING,
    "generate": _TRAINING,
    "evaluate": _TRAINING,
    "caches": CACHES,
    "manifest": CACHES,
    "latents": {"latents"},
    "text": {"text"},
    "publish": CACHES,
    "export": CACHES,
    "clips": {"items"},
}
"""Word of a target `{word}_{run}` -> its needs: the run's caches of a kind, training, or items."""

_EXTRAS = {"generate", "evaluate", "publish", "export", "clips"}

_FILES = {"dataset.lock": "manifest", "manifest.jsonl": "manifest", "generated.json": "generate"}
_FILES |= {"generated": "generate", "evaluation": "evaluate"}
"""File or folder of a run -> the word of what makes it; `train` makes the others."""

_MADE = frozenset(("latents", "text", "manifest", "train", "generate", "evaluate"))
_RULES = {"--forceall": _MADE, "--force": frozenset[str](), "all": {"train"}}
_RULES |= {name: {name} for name in _MADE}
"""Option of Snakemake, or rule of many runs or files -> what is forced by it."""

_COMMAND = "(adopt|captions|check|compare|explain|import|prune|report|status|verify)(_.*)?"
"""Targets of former releases that are words of the command `latentmake` now."""

_PAGE = re.compile(r"^reports/(evaluate_.+)\.html$")
"""A page, which is asked for by the word of its target."""


class Request:
    """What a command line asks for.

    Attributes:
        targets: of the command line; empty stands for everything.
        files: cache files that it asks for by their names.
        runs: the runs to plan: all of them where a target does not tell.
        words: run -> the words of its targets, or of the files that these make.
        kinds: run -> the kinds of caches that a build makes for it.
        trained: the runs whose training is asked for: their own targets, what follows it, or all.
        extras: whether anything is asked for besides caches and trainings.
        encodes: whether it may need the encoders of its runs on this machine.
        forced: what is made anew although it is fresh, see `Facts.forced`.

    Args:
        targets: of the command line; empty stands for everything.
        config: has the runs.
        force: `--forceall`, `--force`, and the rules and targets of `--forcerun`.

    Raises:
        ConfigError: a target names an unknown run.
    """

    def __init__(self, targets: Sequence[str], config: Config, force: Iterable[str] = ()) -> None:
        anew = [*force, *((targets or ["all"]) if "--force" in force else ())]
        if named := [each for each in force if each == "all" or each not in _RULES]:
            targets = [*(targets or ["all"]), *named]
        self.targets = targets = [_PAGE.sub(r"\1", target) for target in targets]
        self.files = {target for target in targets if target.startswith("cache/")}
        everything = not targets or "all" in targets
        self.words = {name: set[str]() for name in config.runs}
        asked = {name: set(_TRAINING if everything else ()) for name in config.runs}
        self.runs = [*config.runs] if everything else []
        for target in {*targets} - self.files:
            word, name = _parts(target, config.runs)
            if name:
                self.words[name].add(word)
                if word != "publish" or config.publish.caches:
                    asked[name] |= _WORDS[word]
            elif "/" in target or target.startswith("encode_"):
                self.runs = [*config.runs]
        self.kinds = {name: CACHES & needs for name, needs in asked.items()}
        self.encodes = bool(self.files or self.runs or any(self.kinds.values()))
        self.runs = self.runs or [name for name, needs in asked.items() if needs]
        self.trained = [name for name in self.runs if "training" in asked[name]]
        self.extras = any(_EXTRAS & words for words in self.words.values())
        self.forced = {each for target in anew for each in self._forced(target, config)}

    def _forced(self, target: str, config: Config) -> Iterator[str]:
        if target in _RULES:
            yield from _RULES[target] & CACHES
            for name in self.runs:
                yield from (f"{word}_{name}" for word in self._made(name) & _RULES[target])
        elif target in self.files:
            yield target
        else:
            word, name = _parts(_PAGE.sub(r"\1", target), config.runs)
            yield from (f"{each}_{name}" for each in (CACHES if word == "caches" else (word,)))

    def _made(self, run: str) -> set[str]:
        """Return the words of what a build makes of a run."""
        training = {"train"} if run in self.trained else set[str]()
        return {*self.kinds[run], *self.words[run], "manifest", *training}

    def orders(self, plan: Plan) -> list[Order]:
        """Return the orders of a plan that a build carries out, none twice."""
        every = ((name, order) for name, run in plan.runs.items() for order in run.orders)
        asked = {order.name for name, order in every if order.kind in self.kinds[name]}
        return [x for x in plan.orders if x.name in asked or self.files.intersection(x.paths)]

    def check(self, rules: Collection[str], is_made: Callable[[str], bool]) -> None:
        """Refuse the first target that is no rule, no file, and `is_made` by no rule.

        A file of ours that is spelled otherwise than rules spell it would count as one that is
        there.
        """
        for target in self.targets:
            spelled = os.path.relpath(target)
            if spelled != target and spelled.startswith(("cache/", "reports/", "runs/")):
                what = "is a spelling that no rule has"
                raise ConfigError(what, where=target, hint=f"write `{spelled}`")
            known = target in rules or target in self.files or Path(target).exists()
            if not known and not is_made(target):
                raise _unknown(target, rules, self.words)


def word_and_run(target: str) -> tuple[str, str]:
    """Return word and run of a target, whether or not there is such a run; empty without one."""
    word, _, name = _PAGE.sub(r"\1", target).partition("_")
    if target.startswith("runs/"):
        _, name, file, *_ = (*target.split("/", 3), "", "")
        word = _FILES.get(file, "train")
    return (word, name) if word in _WORDS and name and "/" not in name else ("", "")


def _parts(target: str, runs: Collection[str]) -> tuple[str, str]:
    """Return word and run of a target; empty where it is none of a run."""
    word, name = word_and_run(target)
    if name and name not in runs:
        guess = nearest(name, runs)
        meant = target.replace(name, guess or "", 1)
        hint = f"did you mean `{meant}`?" if guess else f"known: {', '.join(runs)}"
        raise ConfigError(f"there is no run `{name}`", where=target, hint=hint)
    return word, name


def _unknown(target: str, rules: Iterable[str], runs: Iterable[str]) -> ConfigError:
    """Return the error for an unknown target, with the nearest one or all of them."""
    if command := re.fullmatch(_COMMAND, target):
        hint = f"type `latentmake {command[1]}`; see `latentmake {command[1]} --help`"
        return ConfigError("is no longer a target of Snakemake", where=target, hint=hint)
    if (run := target.removeprefix("publish_")) != target and run in runs:
        hint = "its trainer trains here; only runs of musubi and sdscripts train elsewhere"
        return ConfigError(f"the run {run} is not published", where=target, hint=hint)
    names = [name for name in rules if "/" not in name and not name.startswith("encode_")]
    words = [word for word in _WORDS if any(name.startswith(f"{word}_") for name in names)]
    every = f"targets: all, {', '.join(f'{word}_{{run}}' for word in words)}, cache/..."
    guess = difflib.get_close_matches(target, names, n=1)
    hint = f"did you mean `{guess[0]}`?" if guess else f"{every}; runs: {', '.join(runs)}"
    return ConfigError("there is no such target", where=target, hint=hint)


class PlanFile(BaseModel):
    """Names of the orders of each encoding rule.

    `runs` has paths: run -> kind of an order (`manifest`, `train`, ...) -> path.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    jobs: dict[str, list[str]] = {}
    runs: dict[str, dict[str, str]] = {}

    def write(self, planned: int) -> None:
        """Write it for a plan of some time (ns), and set the environment variable."""
        path = RUNS / f"plan.{planned}.json"
        atomic.write(path, self.model_dump_json().encode())
        os.environ[VARIABLE] = str(path)

    @classmethod
    def read(cls) -> PlanFile:
        """Read the file that the environment variable names; an empty plan where it is not set."""
        path = os.environ.get(VARIABLE)
        if not path:
            return cls()
        return read_order(Path(path), cls.model_validate_json)

    def plan(self, allowed: Collection[str] = ()) -> Plan:
        """Return a plan of the encoding jobs alone, of the rules in `allowed` if there are any."""
        rules = [rule for rule in self.jobs if not allowed or rule in allowed]
        return Plan({}, [job_of([*map(_read, self.jobs[rule])]) for rule in rules])


def _read(name: str) -> Order:
    return Order.read(FOLDER / f"{name}.json")


FOLLOWING = {"generate": "runs/{run}/generated.json", "evaluate": "reports/evaluate_{run}.html"}
"""Word of what follows a training -> the file that stands for it."""


def followed(facts: Facts, request: Request) -> Iterator[str]:
    """Yield the runs of which something is asked that follows their training.

    Raises:
        ConfigError: it cannot be done.
    """
    for name in request.runs:
        if words := [word for word in FOLLOWING if word in request.words[name]]:
            from latentmake.reports.following import refuse_following

            for word in words:
                refuse_following(facts.config, name, word)
            yield name


def plan_extras(
    facts: Facts, plan: Plan, request: Request, orders: dict[str, dict[str, str]]
) -> Iterator[Need]:
    """Write the orders of what is asked of runs, unless only asked; yield the room that it needs.

    A publication without caches needs no planned run.

    Args:
        facts: of the runs.
        plan: theirs.
        request: of the command line.
        orders: run -> kind of an order -> its path; gets the new ones.
    """
    for name in (name for name, words in request.words.items() if "publish" in words):
        backend = backends.of_run(facts.config, name)
        if backend is not None and backend.publishes:
            backend.check_publication(facts, name)
            if not facts.config.publish.caches:
                published = backend.order_publication(facts, name, write_items(facts, name))
                orders.setdefault(name, {})["publish"] = str(published)
    for name, run in plan.runs.items():
        words = request.words[name]
        if "export" in words:
            from latentmake.exchange.export import plan_export

            exported = plan_export(facts, name)
            orders[name]["export"] = write_order(facts, name, "export", exported)
        if "clips" in words:
            from latentmake.exchange.clip_files import plan_clips

            clips = plan_clips(facts, name)
            orders[name]["clips"] = write_order(facts, name, "clips", clips)
            yield clips.need
        for word in FOLLOWING:
            if word in words and (order := _following(facts, run, word)):
                orders[name][word] = order


def _following(facts: Facts, run: RunPlan, word: str) -> str:
    """Return the order of what follows a training; "" where there is nothing to do."""
    from latentmake.reports.following import outdated

    backend = backends.of_run(facts.config, run.name)
    assert backend is not None  # it has a trainer that does this: see `followed`
    order, reasons = backend.plan_following(facts, run, word)
    forced = f"{word}_{run.name}" in facts.forced
    return str(order) if forced or reasons or outdated(run.name, word) else ""
