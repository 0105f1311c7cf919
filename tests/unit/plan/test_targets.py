"""What a command asks for decides what is planned; a wrong name gets the nearest right one."""

from __future__ import annotations

from pathlib import Path

import pytest
from latentmake.config.runs import Run
from latentmake.errors import ConfigError
from latentmake.plan.targets import (
    as_words,
    check_known,
    is_evaluation_asked,
    is_training_asked,
    kinds_built,
    needs_encoders,
    runs_asked_for,
)

RUNS = {name: Run(datasets=["cats"], model="sd15", resolutions=[64]) for name in ("cats", "a_b")}


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ([], ["cats", "a_b"]),
        (["all"], ["cats", "a_b"]),
        (["train_cats"], ["cats"]),
        (["check_a_b", "latents_a_b"], ["a_b"]),
        (["runs/cats/dataset.lock"], ["cats"]),
        (["cache/cats/sd15/64/x.latents.safetensors"], []),
        (["train_cats", "all"], ["cats", "a_b"]),
        (["somewhere/else.txt"], ["cats", "a_b"]),
        (["evaluate_a_b"], ["a_b"]),
        (["clean"], []),
    ],
)
def test_only_the_runs_asked_for_are_planned(targets: list[str], expected: list[str]) -> None:
    assert runs_asked_for(targets, RUNS) == expected


def test_a_run_that_there_is_not_is_answered_with_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"train_cat: there is no run `cat`; did you mean `train_cats`"
    ):
        runs_asked_for(["train_cat"], RUNS)


def test_an_evaluation_asks_for_the_training_of_its_run_alone() -> None:
    target = "evaluate_a_b"
    assert is_evaluation_asked("a_b", [target]) and is_training_asked("a_b", [target])
    assert not is_evaluation_asked("cats", [target]) and not is_training_asked("cats", [target])


def test_a_file_of_a_run_that_there_is_not_is_answered_with_the_nearest() -> None:
    hint = "there is no run `cat`; did you mean `runs/cats/dataset.lock`"
    with pytest.raises(ConfigError, match=f"^runs/cat/dataset.lock: {hint}"):
        runs_asked_for(["runs/cat/dataset.lock"], RUNS)


def test_a_page_asked_for_by_its_file_is_asked_for_by_its_word() -> None:
    asked = as_words(["reports/evaluate_a_b.html", "train_cats", "reports/report_a_b.html"])
    assert asked == ["evaluate_a_b", "train_cats", "report_a_b"]
    assert runs_asked_for(as_words(["reports/evaluate_a_b.html"]), RUNS) == ["a_b"]
    with pytest.raises(ConfigError, match="there is no run `cat`; did you mean `evaluate_cats`"):
        runs_asked_for(as_words(["reports/evaluate_cat.html"]), RUNS)


def test_other_files_stand_for_themselves() -> None:
    files = ["reports/x_cats.html", "runs/cats/dataset.lock", "cache/a/b/64/c.npz"]
    assert as_words(files) == files
    assert as_words(["reports/captions_cats.jsonl"]) == ["captions_cats"]
    assert as_words(["reports/report_cats.jsonl"]) == ["reports/report_cats.jsonl"]  # no such file


@pytest.mark.parametrize("word", ["check", "train", "latents", "caches"])
def test_a_run_takes_no_word_of_a_run_whose_name_ends_like_its_own(word: str) -> None:
    alone = kinds_built("cats", ["clips_cats"])
    assert kinds_built("cats", ["clips_cats", f"{word}_big_cats"]) == alone == set()
    assert kinds_built("big_cats", [f"{word}_big_cats"]) == kinds_built("cats", [f"{word}_cats"])


RULES = ["all", "train_cats", "caches_cats", "export_cats", "train_a_b", "encode_latents_x_123"]


def made(target: str) -> bool:
    return target in ("runs/cats/dataset.lock", "reports/x.html")


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("trian_cats", "did you mean `train_cats`?"),
        ("train", "did you mean `train_"),
        ("foo_cats", "of the run cats there are caches_cats, export_cats, train_cats"),
        ("clean", "removed by a build, others by `latentmake prune`; targets: all, train_{run}, "),
        (
            "zzz",
            "targets: all, train_{run}, caches_{run}, export_{run}, cache/...; runs: cats, a_b",
        ),
        ("runs/cats/lock", "targets: all"),
    ],
)
def test_a_target_that_no_rule_makes_is_answered_with_the_nearest_or_all(
    target: str, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_known(["all", target], RUNS, rules=RULES, is_made=made)
    assert str(caught.value).startswith(f"{target}: there is no such target")
    assert expected in str(caught.value) and "encode_" not in str(caught.value)


def test_a_run_is_offered_no_target_of_a_run_whose_name_ends_like_its_own() -> None:
    rules = ["train_cats", "train_big_cats", "export_big_cats"]
    for run, expected in {
        "cats": "train_cats",
        "big_cats": "export_big_cats, train_big_cats",
    }.items():
        with pytest.raises(ConfigError, match=f"; of the run {run} there are {expected}$"):
            check_known([f"foo_{run}"], ["cats", "big_cats"], rules=rules, is_made=made)


def test_targets_that_rules_make_are_taken() -> None:
    targets = ["train_cats", "runs/cats/dataset.lock", "reports/x.html", "cache/a/b/64/c.npz"]
    check_known(targets, RUNS, rules=RULES, is_made=made)


@pytest.mark.parametrize("spelled", ["./{}", "reports/../{}", "{}/", "/{}"])
def test_no_file_is_taken_for_fresh_that_rules_spell_otherwise(
    spelled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "reports/captions_cats.html"
    Path("reports").mkdir()
    Path(name).touch()
    target = f"{tmp_path}/{name}" if spelled == "/{}" else spelled.format(name)
    with pytest.raises(ConfigError, match=f"; write `{name}`$"):
        check_known([target], RUNS, rules=RULES, is_made=made)


def test_the_encoders_may_lie_elsewhere_for_what_only_looks() -> None:
    looking = ["publish_cats", "publish_a_b"]
    assert not needs_encoders(looking, RUNS, caches=False)
    assert not needs_encoders(["clips_cats"], RUNS, caches=True)
    for targets in ([], ["all"], ["caches_cats"], ["train_cats"], ["fetch_cats"], ["adopt_cats"]):
        assert needs_encoders([*targets, *(looking if targets else [])], RUNS, caches=False)
    for target in (*looking, "publish_cats", "captions_dogs"):
        assert needs_encoders([target], RUNS, caches=True)
