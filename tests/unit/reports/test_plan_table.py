"""Order of the faults in a plan's table."""

from __future__ import annotations

import re

from latentmake.data.item import Fault
from latentmake.plan.run_plan import Plan, RunPlan
from latentmake.reports.plan_report import plan_table


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
