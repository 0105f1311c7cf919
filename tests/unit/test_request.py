"""A command decides what is planned; a job on a cluster carries out what its own plan said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from latentmake.base.errors import ConfigError, LatentmakeError
from latentmake.config.machines import Publish
from latentmake.config.root import Config, Run
from latentmake.plan.orders import EncodingJob, Order
from latentmake.request import VARIABLE, PlanFile, Request
from order_world import order

RUNS = {
    name: Run(datasets=["cats"], model="sd15", resolutions=[64])
    for name in ("cats", "big_cats", "a_b")
}


def request(*targets: str, caches: bool = True, force: Sequence[str] = ()) -> Request:
    config: Any = Config.model_construct(runs=RUNS, publish=Publish.model_construct(caches=caches))
    return Request(targets, config, force)


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ([], [*RUNS]),
        (["all"], [*RUNS]),
        (["train_cats"], ["cats"]),
        (["check_a_b", "latents_a_b"], ["a_b"]),
        (["runs/cats/dataset.lock"], ["cats"]),
        (["cache/cats/sd15/64/x.latents.safetensors"], []),
        (["train_cats", "all"], [*RUNS]),
        (["somewhere/else.txt"], [*RUNS]),
        (["evaluate_a_b"], ["a_b"]),
        (["clean"], []),
    ],
)
def test_only_the_runs_asked_for_are_planned(targets: list[str], expected: list[str]) -> None:
    assert request(*targets).runs == expected


@pytest.mark.parametrize(
    ("target", "meant"),
    [
        ("train_cat", "train_cats"),
        ("runs/cat/dataset.lock", "runs/cats/dataset.lock"),
        ("reports/evaluate_cat.html", "evaluate_cats"),
    ],
)
def test_a_run_that_there_is_not_is_answered_with_the_nearest(target: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"there is no run `cat`; did you mean `{meant}`"):
        request(target)


FILE = "cache/cats/sd15/64/x.latents.safetensors"
CACHES = {"captions_a_b", "latents_a_b", "text_a_b"}
ALL = {*CACHES, "manifest_a_b", "captions", "latents", "text"}


@pytest.mark.parametrize(
    ("target", "force", "forced"),
    [
        ("train_a_b", ["train"], {"train_a_b"}),
        ("train_a_b", ["--forceall"], {*ALL, "train_a_b"}),
        ("generate_a_b", ["--forceall"], {*ALL, "train_a_b", "generate_a_b"}),
        ("latents_a_b", ["--forceall"], ALL - {"captions_a_b", "text_a_b"}),
        ("train_a_b", ["--force"], {"train_a_b"}),
        ("runs/a_b/trained.json", ["--force"], {"train_a_b"}),
        ("runs/a_b/x.safetensors", ["--force"], {"train_a_b"}),
        ("caches_a_b", ["--force"], CACHES),
        ("runs/a_b/dataset.lock", ["--force"], {"manifest_a_b"}),
        ("text_a_b", ["--force"], {"text_a_b"}),
        ("reports/evaluate_a_b.html", ["--force"], {"evaluate_a_b"}),
        (FILE, ["--force"], {FILE}),
        ("train_a_b", [FILE], {FILE}),
        ("train_a_b", ["text"], {"text", "text_a_b"}),
        ("train_a_b", ["caches_cats"], {"captions_cats", "latents_cats", "text_cats"}),
        ("train_a_b", ["manifest"], {"manifest_a_b"}),
        ("train_a_b", ["generate"], set()),
        ("all", ["--force"], {f"train_{run}" for run in RUNS}),
        ("train_a_b", [], set()),
    ],
)
def test_what_snakemake_forces_is_what_the_targets_need_of_it_and_no_more(
    target: str, force: list[str], forced: set[str]
) -> None:
    assert request(target, force=force).forced == forced


def test_what_is_forced_by_its_name_is_asked_for_beside_the_targets() -> None:
    beside = request("train_a_b", force=["caches_cats", FILE, "train"])
    assert beside.runs == ["cats", "a_b"] and beside.files == {FILE}
    assert request(force=["train_cats"]).runs == [*RUNS]
    with pytest.raises(ConfigError, match="there is no run `cat`"):
        request(force=["train_cat"])


@pytest.mark.parametrize("target", ["evaluate_a_b", "generate_a_b", "runs/a_b/generated.json"])
def test_the_training_of_a_run_is_asked_for_by_all_that_follows_it(target: str) -> None:
    asked = request(target)
    assert "a_b" in asked.trained and "cats" not in asked.trained
    assert asked.kinds["a_b"] == {"captions", "latents", "text"} and not asked.kinds["cats"]


def test_a_file_of_a_run_is_asked_for_by_what_makes_it() -> None:
    files = ("lora.safetensors", "samples/step-000001_00.png", "generated/a.png", "dataset.lock")
    words = [request(f"runs/a_b/{file}").words["a_b"] for file in files]
    assert words == [{"train"}, {"train"}, {"generate"}, {"manifest"}]


def test_a_page_is_asked_for_by_its_word() -> None:
    both = request("reports/evaluate_a_b.html", "reports/x_cats.html", "runs/cats/dataset.lock")
    assert both.words["a_b"] == {"evaluate"}
    assert "a_b" in both.trained and "cats" not in both.trained


@pytest.mark.parametrize("word", ["check", "train", "latents", "caches"])
def test_a_run_takes_no_word_of_a_run_whose_name_ends_like_its_own(word: str) -> None:
    both = request("clips_cats", f"{word}_big_cats")
    assert not both.kinds["cats"]
    assert both.kinds["big_cats"] == request(f"{word}_cats").kinds["cats"]


def test_the_encoders_may_lie_elsewhere_for_what_needs_no_caches() -> None:
    looking = ["publish_cats", "publish_a_b"]
    assert not request(*looking, caches=False).encodes
    assert not request("clips_cats").encodes and request("clips_cats").runs == ["cats"]
    for targets in ([], ["all"], ["caches_cats"], ["train_cats"], ["cache/a/b/64/c.npz"]):
        assert request(*targets, *(looking if targets else []), caches=False).encodes
    assert request(*looking).encodes and request(*looking).runs == ["cats", "a_b"]


RULES = ["all", "train_cats", "caches_cats", "export_cats", "train_a_b", "encode_latents_x_123"]


def made(target: str) -> bool:
    return target in ("runs/cats/dataset.lock", "reports/x.html")


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("trian_cats", "there is no such target; did you mean `train_cats`?"),
        ("zzz", "targets: all, train_{run}, caches_{run}, export_{run}, cache/...; runs: cats, "),
        ("runs/cats/lock", "there is no such target; targets: all"),
        ("status_cats", "is no longer a target of Snakemake; type `latentmake status`"),
        ("publish_cats", "the run cats is not published; its trainer trains here; only runs of"),
        ("./reports/x.html", "is a spelling that no rule has; write `reports/x.html`"),
        ("runs/cats/../cats/x", "is a spelling that no rule has; write `runs/cats/x`"),
    ],
)
def test_a_target_that_no_rule_makes_is_answered_with_the_nearest_or_all(
    target: str, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        request("all", target).check(RULES, made)
    assert str(caught.value).startswith(f"{target}: ")
    assert expected in str(caught.value) and "encode_" not in str(caught.value)
    request("train_cats", "reports/x.html", "cache/a/b/64/c.npz").check(RULES, made)  # are taken


def test_a_plan_is_handed_on_through_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, "")
    assert PlanFile.read() == PlanFile()
    one, other = written("a", "b")
    jobs = {"encode_a": [one.name], "encode_b": [other.name, one.name]}
    before = PlanFile(jobs=jobs, runs={"first": {"train": "5.json"}})
    before.write(5)
    given = PlanFile.read()
    assert given == before
    both = EncodingJob((other, one))
    assert given.plan().jobs == [EncodingJob((one,)), both]
    assert given.plan(["encode_b", "manifest"]).jobs == [both]
    monkeypatch.setenv(VARIABLE, "plan.5.json")
    with pytest.raises(LatentmakeError, match="cannot be read"):
        PlanFile.read()


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text("{")])
def test_an_order_that_is_gone_or_damaged_is_named(
    damage: Callable[[Path], object], working: Path
) -> None:
    (one,) = written("a")
    damage(one.path)
    with pytest.raises(LatentmakeError, match=f"{one.name}.json: cannot be read"):
        PlanFile(jobs={"encode_a": [one.name]}).plan()


def written(*stems: str) -> list[Order]:
    orders = [order("text", {stem: f"caption of {stem}"}) for stem in stems]
    for each in orders:
        each.write()
    return orders
