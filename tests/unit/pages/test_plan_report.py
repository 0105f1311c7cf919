"""A plan counts pictures that do not fit, and names faults in the order of their lines."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from latentmake.config.root import parse
from latentmake.data import probe
from latentmake.data.item import Fault, Item
from latentmake.data.memo import Memo
from latentmake.pages.plan_report import fitting_lines, plan_table
from latentmake.plan.facts import Facts
from latentmake.plan.judge import PartState
from latentmake.plan.orders import Part, Target, Work
from latentmake.plan.planner import make_plan
from latentmake.plan.run_plan import Plan, RunPlan
from PIL import Image

SDXL = {"architecture": "sdxl", "layout": "sdscripts", "vae": "vae", "text": ["a", "b"]}


def lines(
    sizes: dict[str, tuple[int, int]], model: dict[str, Any] = SDXL, **changes: Any
) -> list[str]:
    """Return the lines for a folder of pictures of some sizes."""
    for name, size in sizes.items():
        Path("data").mkdir(exist_ok=True)
        Image.new("RGB", size).save(f"data/{name}.png")
        Path(f"data/{name}.txt").write_text(name)
    values = {
        "datasets": {"cats": {"path": "data", **changes}},
        "models": {"big": model},
        "runs": {"first": {"datasets": "cats", "model": "big", "resolutions": [256, 512]}},
    }
    facts = Facts(parse(values), Memo(None), encoders=False)
    return [*fitting_lines(facts, make_plan(facts, ["first"]))]


pytestmark = pytest.mark.usefixtures("working")


def test_enlarged_and_cut_pictures_are_counted_for_each_resolution() -> None:
    sizes = {"small": (128, 200), "wide": (1400, 512), "tall": (512, 1400), "right": (512, 512)}
    assert lines(sizes) == [
        "cats at 256: of 4 pictures, 1 is enlarged (up to 2 times), 2 are cut by more than half",
        "cats at 512: of 4 pictures, 1 is enlarged (up to 4 times), 2 are cut by more than half",
    ]


def test_buckets_cut_little_and_rounding_enlarges_nothing() -> None:
    assert lines({"wide": (1400, 700), "near": (511, 511)}, fit="bucket") == []
    assert lines({"small": (100, 100)}, fit="bucket", bucket_no_upscale=True) == []


PLAIN = {"vae": "vae", "text": "a"}


def test_images_of_our_own_trainers_are_counted_by_their_headers() -> None:
    assert lines({"small": (128, 200), "wide": (1400, 512)}, PLAIN) == [
        "cats at 256: of 2 pictures, 1 is enlarged (up to 2 times), 1 is cut by more than half",
        "cats at 512: of 2 pictures, 1 is enlarged (up to 4 times), 1 is cut by more than half",
    ]


def test_an_unreadable_image_is_left_out() -> None:
    Path("data").mkdir()
    Path("data/broken.png").write_bytes(b"no image")
    Path("data/broken.txt").write_text("broken")
    assert lines({"small": (256, 256)}, PLAIN) == [
        "cats at 512: of 1 picture, 1 is enlarged (up to 2 times)"
    ]


def test_of_a_large_dataset_some_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "LOOKED_AT", 3)
    (line,) = lines({f"{number}": (400, 400) for number in range(8)}, PLAIN)
    assert line == "cats at 512: of 3 pictures, 3 are enlarged (up to 1.28 times)"


def test_faults_of_a_list_stand_in_the_order_of_its_lines() -> None:
    numbers = (10, 4, 5, 47)
    faults = [Fault(f"list.jsonl, line {x}", "a", "is not JSON", "correct it") for x in numbers]
    table = plan_table(Plan({"r": RunPlan("r", {}, faults={"d": faults})}), [])
    found = re.findall(r"faulty: list\.jsonl, line (\d+): is not JSON; correct it", table)
    assert found == ["4", "5", "10", "47"]


def state(**counts: int) -> PartState:
    """Return a part with so many targets that are fresh, or stale for a reason."""
    fresh, gone = counts.pop("fresh", 0), counts.pop("orphaned", 0)
    reasons = (x.replace("_", " ") for x, n in counts.items() for _ in range(n))
    targets = tuple(Target("64", "cache/a", reason=reason) for reason in reasons)
    return PartState(fresh=fresh, stale=[Work(Item("a"), targets)], orphans=["cache/b"] * gone)


def shown(**parts: PartState) -> list[str]:
    """Return the lines of the table of a run of the sample."""
    own = {Part("michael_gove", "tiny-sd", name): state for name, state in parts.items()}
    return plan_table(Plan({"michael_gove": RunPlan("michael_gove", own)}), []).splitlines()


def test_a_table_has_no_column_and_no_row_in_which_nothing_is_counted() -> None:
    lines = shown(**{"64": state(fresh=24), "text": state(fresh=23, edited=1), "32": state()})
    assert lines == [
        "dataset       model    kind        fresh  edited",
        "------------  -------  ----------  -----  ------",
        "michael_gove  tiny-sd  latents 64     24       .",
        "michael_gove  tiny-sd  text           23       1",
    ]


def test_a_table_of_the_sample_fits_a_terminal_without_the_model_if_need_be() -> None:
    counts = {"reusable": 10, "new": 200, "edited": 30, "changed_recipe": 4}
    lines = shown(**{"64": state(fresh=24, orphaned=7, **counts)})
    assert max(map(len, lines)) <= 80 and "tiny-sd" not in lines[2]
    assert lines[2].split()[3:] == ["24", "10", "200", "30", "4", "7"]
