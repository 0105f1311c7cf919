"""`is_reg` trains again and encodes nothing; plans, pages and trainings tell such images apart."""

from __future__ import annotations

import json

import world
from project import Project


def add_regular(project: Project) -> None:
    """Give the run five images of another dataset, one of them equal to one of its own."""
    for number in range(4):
        world.draw(project / f"data/man/r{number}.png", 50 + number)
    (project / "data/man/same.png").write_bytes((project / "data/shapes/ant.png").read_bytes())
    man = {"path": "data/man", "class_tokens": "a man"}
    project.configure(lambda config: config["datasets"].update(man=man))
    project.configure(lambda config: config["runs"]["tiny"].update(datasets=["man", "shapes"]))


def mark(project: Project, *, is_reg: bool) -> None:
    project.configure(lambda config: config["datasets"]["man"].update(is_reg=is_reg))


def reasons(project: Project) -> list[str]:
    (found,) = json.loads(project.ask("explain", "train_tiny", "--json").output)
    return [f"{each['name']} {each['old']} -> {each['new']}" for each in found["differences"]]


def test_marking_a_dataset_trains_again_with_that_reason_and_encodes_nothing(
    trained: Project,
) -> None:
    add_regular(trained)
    trained.run("train_tiny")
    before = trained.cache_files()
    lock, repeats = trained.lock(), [row["repeats"] for row in trained.manifest()]
    assert repeats == [1] * 11 and "is_reg" not in lock
    mark(trained, is_reg=True)
    assert reasons(trained) == ["datasets with is_reg none -> man"]
    trained.ask("status").one_line("tiny: regularisation images: man")
    trained.ask("explain", "data/man/r0.png").one_line("used as     regularisation image")
    result = trained.run("train_tiny")
    assert result.jobs == ["manifest", "train", "train_tiny"]
    assert trained.cache_files() == before and result.encoded().encoded == 0
    rows = trained.manifest()
    assert [row["repeats"] for row in rows if row.get("is_reg")] == [2, 1, 1, 1, 1]
    index = json.loads((trained / "runs/tiny/samples/index.json").read_bytes())
    assert index["prompts"] == [*world.CAPTIONS.values()][:4]
    assert reasons(trained) == [] and trained.run("train_tiny").idle
    trained.configure(lambda config: config["runs"]["tiny"]["trainer"].update(prior_loss_weight=0))
    assert reasons(trained) == ["prior_loss_weight 1.0 -> 0.0"]
    trained.ask("report", "tiny")
    page = (trained / "reports/report_tiny.html").read_text(encoding="utf-8")
    assert "man (regularisation)" in page
    trained.configure(lambda config: config["runs"]["tiny"]["trainer"].pop("prior_loss_weight"))
    mark(trained, is_reg=False)
    assert reasons(trained) == ["datasets with is_reg man -> none"]
    trained.run("caches_tiny")
    assert trained.lock() == lock
