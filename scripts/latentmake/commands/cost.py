"""`latentmake cost`: the cost of a run, as it is or with settings that are not written yet.

Bytes are computed from the encoders' files and the items. The time follows from earlier jobs and
trainings of the same model, precision and device, or from a trial; else it is unknown.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import typer

from latentmake.base.errors import ConfigError
from latentmake.base.machine import counted, duration, human
from latentmake.commands.changes import with_changes
from latentmake.commands.forecast import Times, encoding_times, training_time
from latentmake.commands.project import present_plan, print_json, run_names, table
from latentmake.pages.overview import CostRows, cost_rows
from latentmake.plan.build_locks import alone
from latentmake.plan.facts import Facts
from latentmake.plan.orders import PROMPTS
from latentmake.plan.run_plan import RunPlan

_NUMBERS = ["items", "files", "bytes", "then files", "then bytes", "difference"]
_HEADERS = ["dataset", "model", "kind", *_NUMBERS]


def cost(
    facts: Facts,
    runs: Sequence[str],
    changes: Sequence[str] | None,
    trial: int | None,
    price: str | None,
    as_json: bool,
) -> None:
    """Show files, bytes and time of runs, now and after the next build."""
    names, hourly = run_names(facts.config, runs), _price(price)
    then = with_changes(facts, changes) if changes else facts
    before = present_plan(facts, names)
    with alone() if trial else contextlib.nullcontext():
        plan = present_plan(then, names, batched=trial is not None)
        times: Mapping[str, Times] = {}
        if trial is not None:
            from latentmake.commands.trial import tried

            times = tried(then, plan, trial)
            plan = present_plan(then, names)
        bills = [
            _bill(then, plan.runs[name], cost_rows(facts, before.runs[name]), times, hourly)
            for name in names
        ]
    if as_json:
        print_json(bills)
        return
    for bill in bills:
        _show(bill)


def _price(text: str | None) -> float | None:
    """Return the price of an hour, from `1.2/h` or `1.2`."""
    if text is None:
        return None
    with contextlib.suppress(ValueError):
        if 0 <= (value := float(text.removesuffix("/h"))) < math.inf:
            return value
    what, hint = "is no price of an hour", "write a number, such as 1.2/h"
    raise ConfigError(what, where=f"--price {text}", hint=hint)


def _bill(
    facts: Facts,
    plan: RunPlan,
    before: CostRows,
    times: Mapping[str, Times],
    hourly: float | None,
) -> dict[str, Any]:
    """Return the values of a run: rows of the table, stale and linked files, time and price."""
    then = cost_rows(facts, plan)
    empty = {"items": 0, "files": 0, "bytes": 0, "then files": 0, "then bytes": 0}
    rows = []
    for key in sorted({**before, **then}, key=lambda key: (key[0] == PROMPTS, key)):
        now = {name: before.get(key, empty)[name] for name in ("files", "bytes")}
        names = dict(zip(("dataset", "model", "kind"), key, strict=True))
        rows.append(names | then.get(key, empty) | now)
    targets = [target for state in plan.parts.values() for target in state.to_make]
    stale = Counter(target.reason for target in targets if not target.at_hand)
    encoding = encoding_times(facts, plan, times)
    training = training_time(facts, plan, times)
    bill: dict[str, Any] = {
        "run": plan.name,
        "rows": rows,
        "stale": dict(stale),
        "linked": sum(bool(target.at_hand) for target in targets),
        "encoding": {work: time and time._asdict() for work, time in encoding.items()},
        "trains": plan.training_order is not None,
        "training": training and training._asdict(),
        "price": None,
    }
    several = [*encoding.values(), *([training] if bill["trains"] else [])]
    total = [time.seconds for time in several if time is not None]
    bill["seconds"] = sum(total) if len(total) == len(several) else None
    if hourly is not None and bill["seconds"] is not None:
        bill["price"] = round(hourly * bill["seconds"] / 3600, 2)
    bill["sentence"] = _sentence(bill, hourly)
    return bill


# -- shown ----------------------------------------------------------------------------------------


def _show(bill: Mapping[str, Any]) -> None:
    """Print a table, the times and a sentence."""
    table(_HEADERS, map(_cells, bill["rows"]), numbers=_NUMBERS)
    stale = ", ".join(f"{number} {reason}" for reason, number in bill["stale"].items())
    linked = bill["linked"]
    typer.echo(f"to encode: {stale or 'nothing'}" + (f"; to link: {linked}" if linked else ""))
    for line in _times(bill):
        typer.echo(line)
    typer.echo(bill["sentence"])


def _cells(row: Mapping[str, Any]) -> list[str]:
    before, then = row["bytes"], row["then bytes"]
    cells = {name: str(value or ".") for name, value in row.items()}
    cells["bytes"] = human(before) if before else "."
    cells["then bytes"] = cells["difference"] = "unknown"
    if then is not None:
        cells["then bytes"] = human(then) if then else "."
        cells["difference"] = _signed(then - before)
    return [cells[header] for header in _HEADERS]


def _signed(size: float) -> str:
    if not size:
        return "."
    return f"{'+' if size > 0 else '-'}{human(abs(size))}"


def _times(bill: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line on the time of each encoder, and one on the training."""
    for work, time in bill["encoding"].items():
        yield f"{work.replace(' ', ' of ')}: {_time(time)}"
    if bill["trains"]:
        yield f"training of {bill['run']}: {_time(bill['training'])}"


def _time(time: Mapping[str, Any] | None) -> str:
    if time is None:
        return "time unknown; --trial 4 measures it"
    mean, low, high = (duration(time[name] / 60) for name in ("seconds", "low", "high"))
    between = "" if low == high else f" ({low} to {high})"
    return f"about {mean}{between}, from {time['basis']}"


def _sentence(bill: Mapping[str, Any], hourly: float | None) -> str:
    """Return what the run costs, in a sentence."""
    all_known = all(row["then bytes"] is not None for row in bill["rows"])
    size = sum((row["then bytes"] or 0) - row["bytes"] for row in bill["rows"])
    disk = f"{_signed(size)} of caches" if size else "no more caches"
    number = sum(bill["stale"].values())
    words = f"{bill['run']}: {counted(number, 'file')} to encode"
    words += f", {disk if all_known else 'bytes unknown'}"
    seconds = bill["seconds"]
    words += f", {'time unknown' if seconds is None else f'about {duration(seconds / 60)}'}"
    if hourly is not None:
        words += f", {'price unknown' if bill['price'] is None else bill['price']} at {hourly:g}/h"
    return words
