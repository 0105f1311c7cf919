"""A trainer more is a folder, the section of its settings, and its line in each of two tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from project import Project

SETTINGS = '''"""Settings of the trainer `dummy`."""

from typing import ClassVar, Literal

from latentmake.config.trainers import Trainer


class DummyTrainer(Trainer):
    kind: Literal["dummy"]
    steps: int
    layout: ClassVar[str] = "plain"
    network: ClassVar[str] = "unet"
'''
BACKEND = '''"""A trainer that counts what it would train on."""

import json
import time
from pathlib import Path

from latentmake.plan.product import Difference
from latentmake.plan.orders import run_order
from latentmake.training.backend import Backend


class Dummy(Backend):
    def plan(self, facts, plan, *, train):
        folder, steps = f"runs/{plan.name}", facts.config.runs[plan.name].trainer.steps
        order = {"kind": "dummy", "run": plan.name, "folder": folder, "steps": steps}
        plan.trainer_order = run_order(plan.name, "train", time.time_ns())
        plan.trainer_order.write_text(json.dumps(order))
        receipt = Path(folder, "trained.json")
        trained = json.loads(receipt.read_bytes()) if receipt.is_file() else {}
        if trained != {"lock": plan.lock, "items": trained.get("items"), "steps": steps}:
            plan.reasons = [Difference("it is not trained on these items")]

    def train(self, order, *, log, receipt, processes=1, threads=2):
        asked = json.loads(order.read_bytes())
        items = Path(asked["folder"], "manifest.jsonl").read_text().splitlines()
        lock = json.loads(Path(asked["folder"], "dataset.lock").read_bytes())["digest"]
        result = {"lock": lock, "items": len(items), "steps": asked["steps"]}
        receipt.write_text(json.dumps(result))
'''


def _add_line(path: Path, before: str, line: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(before) == 1
    path.write_text(text.replace(before, line + before), encoding="utf-8")


def test_a_new_trainer_is_planned_run_and_its_receipt_read(fresh: Callable[[], Project]) -> None:
    project = fresh()
    package = project / "scripts/latentmake"
    (package / "training/dummy").mkdir()
    (package / "training/dummy/__init__.py").touch()
    (package / "training/dummy/backend.py").write_text(BACKEND, encoding="utf-8")
    (package / "config/dummy.py").write_text(SETTINGS, encoding="utf-8")
    _add_line(
        package / "backends.py",
        '    "sd": "latentmake.training.sd',
        '    "dummy": "latentmake.training.dummy.backend:Dummy",\n',
    )
    runs = package / "config/root.py"
    _add_line(runs, "SdTrainer | MusubiTrainer", "DummyTrainer | ")
    imported = "from latentmake.config.dummy import DummyTrainer\n\n"
    _add_line(runs, "\nclass Validation(", imported)

    trainer = {"kind": "dummy", "steps": 3}
    project.configure(lambda values: values["runs"]["tiny"].update(trainer=trainer))
    project.run("train_tiny")
    receipt = project / "runs/tiny/trained.json"
    first = json.loads(receipt.read_bytes())
    assert first == {"lock": project.lock()["digest"], "items": 6, "steps": 3}
    assert project.run("train_tiny").idle
    (project / "data/shapes/ant.txt").write_text("a purple circle")
    assert "train" in project.run("train_tiny").jobs
    assert json.loads(receipt.read_bytes())["lock"] == project.lock()["digest"] != first["lock"]
    project.configure(lambda values: values["runs"]["tiny"]["trainer"].update(steps=4))
    assert project.run("train_tiny").jobs == ["train", "train_tiny"]
    assert json.loads(receipt.read_bytes())["steps"] == 4
    assert project.run("train_tiny").idle
