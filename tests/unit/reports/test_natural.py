"""Natural order of names, and of the faults in a plan's table."""

from __future__ import annotations

import re

from latentmake.plan.parts import Plan, RunPlan
from latentmake.reports.natural import natural_key
from latentmake.reports.plan_table import plan_table
from latentmake.sources.items import Fault


def test_numbers_in_names_count() -> None:
    names = ["step 10", "step 9", "step 100 b", "step 100 a", "start"]
    expected = ["start", "step 9", "step 10", "step 100 a", "step 100 b"]
    assert sorted(names, key=natural_key) == expected


def test_faults_of_a_list_stand_in_the_order_of_its_lines() -> None:
    lines = (10, 4, 5, 47)
    faults = [Fault(f"list.jsonl, line {line}", "a", "is not JSON", "correct it") for line in lines]
    table = plan_table(Plan({"r": RunPlan("r", {}, faults={"d": faults})}, []))
    assert re.findall(r"faulty: list\.jsonl, line (\d+): is not JSON; correct it", table) == [
        "4",
        "5",
        "10",
        "47",
    ]
