"""The cost of a run that is not built yet, and a trial that measures its time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import world
from latentmake.base.errors import ConfigError
from latentmake.commands.changes import with_changes
from latentmake.commands.cost import cost
from latentmake.commands.forecast import Times
from latentmake.config.root import parse
from latentmake.data.memo import Memo
from latentmake.encode import gpu
from latentmake.plan import store
from latentmake.plan.estimates import Past, learn_job
from latentmake.plan.facts import Facts
from latentmake.plan.planner import make_plan
from order_world import carry_out

pytestmark = pytest.mark.usefixtures("own_folder")


def make_facts() -> Facts:
    """Return facts of six pictures of two sizes, and of a model whose name has a dot."""
    if not Path("models").exists():
        world.make_model(Path("models"))
        for number, (stem, caption) in enumerate(world.CAPTIONS.items()):
            world.draw(Path(f"data/{stem}.png"), number, (40, 40 + 40 * (number % 2)))
            Path(f"data/{stem}.txt").write_text(caption)
    values = {
        "datasets": {"cats": {"path": "data", "fit": "bucket", "bucket_reso_steps": 8}},
        "models": {"sd-1.5": {"vae": "models/vae", "text": "models/text_encoder"}},
        "runs": {"cats": {"datasets": ["cats"], "model": "sd-1.5", "resolutions": [32]}},
    }
    facts = Facts(parse(values), Memo(None), read_only=True)
    facts.values = values
    return facts


def bill(
    facts: Facts, capsys: pytest.CaptureFixture[str], *changes: str, **options: Any
) -> dict[str, Any]:
    """Return the JSON of the command."""
    values: dict[str, Any] = {"trial": None, "price": None, **options}
    cost(facts, ["cats"], changes, values["trial"], values["price"], as_json=True)
    (result,) = json.loads(capsys.readouterr().out)
    assert isinstance(result, dict)
    return result


def row(bill: dict[str, Any], kind: str) -> list[Any]:
    """Return items, files and bytes now, files and bytes then of a kind."""
    names = ("items", "files", "bytes", "then files", "then bytes")
    (found,) = (row for row in bill["rows"] if row["kind"] == kind)
    return [found[name] for name in names]


def test_files_and_bytes_are_compared_with_those_of_settings_that_are_not_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    facts = make_facts()
    before = bill(facts, capsys)
    items, files, size, later, foretold = row(before, "latents 32")
    assert (items, files, size, later) == (6, 0, 0, 6)
    for order in make_plan(facts, ["cats"]).orders:
        carry_out(order)
    facts = make_facts()
    now = bill(facts, capsys)
    assert now["stale"] == {} and now["sentence"] == (
        "cats: 0 files to encode, no more caches, about 1 s"
    )
    assert row(now, "latents 32")[1:3] == row(now, "latents 32")[3:]
    assert row(now, "latents 32")[2] == pytest.approx(foretold, rel=0.02)
    assert row(now, "text")[1] == 6  # of which two are one file
    other = bill(facts, capsys, "runs.cats.resolutions=[32, 64]")
    assert row(other, "latents 32") == row(now, "latents 32")
    assert row(other, "latents 64")[:4] == [6, 0, 0, 6]
    gone = bill(facts, capsys, "runs.cats.resolutions=[64]")
    assert row(gone, "latents 32") == [0, *row(now, "latents 32")[1:3], 0, 0]
    half = bill(facts, capsys, "models.sd-1.5.dtype=float16")
    assert half["stale"] == {"changed recipe": 12}
    assert row(half, "text")[4] < 0.7 * row(now, "text")[4]


def test_times_follow_from_jobs_on_the_same_device_in_the_same_dtype(
    capsys: pytest.CaptureFixture[str],
) -> None:
    facts = make_facts()
    assert bill(facts, capsys, price="3/h")["sentence"].endswith(
        "time unknown, price unknown at 3/h"
    )
    texts = Past(12, 3600.0, device=f"{gpu.device()} float32")
    for work, past in {
        "text sd-1.5": texts,
        "latents sd-1.5": texts._replace(pixels=12 * 32 * 32),
    }.items():
        learn_job(facts.memo, work, past)
        learn_job(facts.memo, work, past)
    result = bill(facts, capsys, price="3/h")
    assert result["encoding"]["text sd-1.5"]["basis"] == f"2 jobs on {gpu.device()} float32"
    assert result["encoding"]["text sd-1.5"]["seconds"] == 1800.0
    assert result["price"] == 3.0
    other = bill(facts, capsys, "models.sd-1.5.text_dtype=float16")
    assert other["encoding"]["text sd-1.5"] is None
    assert other["encoding"]["latents sd-1.5"] == result["encoding"]["latents sd-1.5"]


def test_the_files_of_a_trial_are_linked_by_the_next_build(
    capsys: pytest.CaptureFixture[str],
) -> None:
    facts = make_facts()
    result = bill(facts, capsys, "models.sd-1.5.dtype=float16", trial=2)
    assert len(store.keys()) == 8  # two of each of two sizes, and their texts
    assert result["linked"] == 9  # a text of another item is the same
    assert sum(result["stale"].values()) == 3
    times = result["encoding"]["latents sd-1.5"]
    assert times["basis"] == "a trial of 4 files"
    assert times["low"] <= times["seconds"] <= times["high"]
    assert not Path("cache").exists()
    changed = with_changes(facts, ["models.sd-1.5.dtype=float16"])
    orders = make_plan(changed, ["cats"]).orders
    counts = [carry_out(order).counts for order in orders if order.reuses]
    assert sum(each["spooled"] + each["linked"] for each in counts) == 9
    assert not [*Path(".latentmake").glob("trial-*")]


def test_the_range_of_a_trial_is_two_standard_errors_of_its_mean_wide() -> None:
    mean = Times.mean([1.0, 2.0, 3.0, 2.0], [1.0] * 4, "", starting=10.0)
    error = 2 * (2 / 3) ** 0.5 / 4**0.5
    assert mean == Times(2.0, 2.0 - error, 2.0 + error, "", 10.0)
    assert mean.of(5) == Times(20.0, 20.0 - 5 * error, 20.0 + 5 * error, "")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("steps", "--set steps: names no key and value"),
        ("=3", "--set =3: names no key and value"),
        (
            "runs.cat.resolutions=[64]",
            "--set runs.cat.resolutions=[64]: there is no run `cat`; did you mean",
        ),
        ("runs.cats.model.x=1", "--set runs.cats.model.x=1: `runs.cats.model` is a value"),
        ("runs.cats.resolutions=[", "--set runs.cats.resolutions=[: the value is not YAML"),
        ("runs.cats.resolutoins=[64]", "--set: runs.cats.resolutoins"),
    ],
)
def test_a_change_that_cannot_be_made_is_one_line(change: str, line: str) -> None:
    facts = make_facts()
    with pytest.raises(ConfigError) as error:
        with_changes(facts, [change])
    assert str(error.value).startswith(line)
    assert "\n" not in str(error.value) and "; " in str(error.value)


@pytest.mark.parametrize("price", ["cheap", "-1/h", "nan", "inf/h"])
def test_a_price_is_a_number_an_hour(price: str) -> None:
    with pytest.raises(ConfigError, match=f"--price {price}: is no price of an hour"):
        cost(make_facts(), ["cats"], None, None, price, as_json=True)
