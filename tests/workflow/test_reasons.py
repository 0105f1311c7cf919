"""`explain` says why a training, a page or a clip is made again; so does the plan of a training."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import world
from project import NOTHING, Project
from test_explain import DIGEST, change_weights


def set_trainer(project: Project, **values: Any) -> None:
    project.configure(lambda config: config["runs"]["tiny"]["trainer"].update(values))


def differences(project: Project, asked: str = "train_tiny") -> list[str]:
    """Return what `explain` names, after a look at its state; nothing is written."""
    before = project.snapshot()
    (found,) = json.loads(project.ask("explain", asked, "--json").output)
    assert project.changed(before) == NOTHING
    assert found["state"] == ("stale" if found["differences"] else "fresh")
    return [
        f"{each['name']} {each['old']} -> {each['new']}".removesuffix("  -> ")
        for each in found["differences"]
    ]


def test_a_trained_run_differs_in_nothing_by_any_of_its_names(trained: Project) -> None:
    for asked in ("tiny", "train_tiny", "runs/tiny/samples.png", "./runs/tiny/training.json"):
        trained.ask("explain", asked).one_line("fresh (trained; nothing differs)")
    for asked in ("caches_tiny", "runs/tiny/dataset.lock"):
        assert differences(trained, asked) == []
    assert "training of tiny" not in trained.run("-n", "train_tiny").output


def test_settings_and_weights_are_named_with_old_and_new(trained: Project) -> None:
    set_trainer(trained, rank=4, learning_rate=2e-4)
    change_weights(trained / "models/micro/unet")
    place = r"\(models/micro/unet, models/micro/scheduler\)"
    *settings, network = differences(trained)
    assert settings == ["rank 2 -> 4", "learning_rate 0.0001 -> 0.0002"]
    assert re.fullmatch(rf"network {DIGEST} {place} -> {DIGEST} {place}", network)
    said = trained.run("-n", "train_tiny").output
    assert f"training of tiny: rank 2 -> 4, learning_rate 0.0001 -> 0.0002, {network}\n" in said
    trained.ask("status").one_line("training of tiny: rank 2 -> 4")


def test_a_caption_and_an_image_are_counted_and_then_named_by_their_part(trained: Project) -> None:
    (trained / "data/shapes/cat.txt").write_text("a green disc on grey")
    world.draw(trained / "data/shapes/dog.png", 77)
    edited = ["2 of 12 latents of shapes: edited", "1 of 6 texts of shapes: edited"]
    assert differences(trained, "caches_tiny") == edited
    counted = ["items of shapes: 2 edited"]
    assert differences(trained) == counted
    set_trainer(trained, rank=4)
    assert differences(trained) == [*counted, "rank 2 -> 4"]
    set_trainer(trained, rank=2)
    trained.run("caches_tiny")
    assert differences(trained, "caches_tiny") == []
    assert differences(trained) == counted


def test_items_that_came_and_went_have_one_reason_before_and_after_they_are_encoded(
    trained: Project,
) -> None:
    for name in ("new", "newer"):
        world.draw(trained / f"data/shapes/{name}.png", 5)
        (trained / f"data/shapes/{name}.txt").write_text(f"a {name} one")
    for ending in ("png", "txt"):
        (trained / f"data/shapes/ant.{ending}").unlink()
    (trained / "data/shapes/bee.txt").write_text("a bee, edited")
    counted = "items of shapes: 2 added, 1 removed, 1 edited"
    for _ in range(2):
        assert differences(trained) == [counted]
        trained.ask("status", "tiny").one_line(f"training of tiny: {counted}")
        assert f"training of tiny: {counted}\n" in trained.run("-n", "train_tiny").output
        trained.run("caches_tiny")


def test_a_faulty_picture_that_is_skipped_writes_the_manifest_and_trains_nothing(
    trained: Project,
) -> None:
    trained.configure(lambda config: config["datasets"]["shapes"].update(on_error="skip"))
    picture = trained / "data/shapes/mute.png"
    for write, words in ((lambda: world.draw(picture, 5), "none -> mute"), (picture.unlink, "")):
        write()
        assert differences(trained) == []
        said = trained.run("-n", "train_tiny").output
        assert (f"manifest of tiny: skipped shapes {words}\n" in said) == bool(words)
        assert "training of tiny" not in said


def test_another_recipe_and_a_training_of_unknown_items_are_told_by_their_caches(
    trained: Project,
) -> None:
    (trained / "data/shapes/cat.txt").write_text("a green disc on grey")
    trained.run("caches_tiny")
    shutil.rmtree(trained / "runs/tiny/history")
    (line,) = differences(trained)
    assert re.fullmatch(rf"caches of shapes/text {DIGEST} -> {DIGEST}", line)


def test_neither_settings_of_pictures_nor_lost_ones_are_a_reason_to_train(trained: Project) -> None:
    set_trainer(trained, samples={"num_inference_steps": 2, "guidance_scale": 1})
    assert differences(trained) == []
    set_trainer(trained, samples={"num_inference_steps": 1, "guidance_scale": 1, "prompts": ["a"]})
    assert differences(trained) == []
    set_trainer(trained, **world.training())
    (trained / "runs/tiny/samples.png").unlink()
    assert differences(trained) == []


def test_a_training_of_release_0_2_stays_trained_and_is_explained_as_far_as_it_goes(
    trained: Project,
) -> None:
    """Its record has digests under other names; the values behind them are in a second file."""
    as_before(trained / "runs/tiny")
    assert differences(trained) == []
    set_trainer(trained, rank=4)
    assert differences(trained) == ["rank 2 -> 4"]
    (trained / "runs/tiny/trained_on.json").unlink()
    (settings,) = differences(trained)
    assert re.fullmatch(rf"settings {DIGEST} -> {DIGEST}", settings)


def as_before(folder: Path) -> None:
    """Write the records of a training as release 0.2 wrote them."""
    names = {"data": "dataset", "settings": "settings", "weights": "network"}
    for path in folder.rglob("*.json"):
        record = json.loads(path.read_bytes())
        if parts := record.pop("parts", None):
            wanted = {key: parts[name] for key, name in names.items()}
            wanted |= {"resumed": "", "version": parts["version of the trainer"]}
            values, places = record.pop("values", None), record.pop("places", None)
            if path.name == "training.json":
                basis = {
                    "wanted": wanted,
                    "settings": values["settings"],
                    "data": values["dataset"],
                }
                basis["network"] = places["network"]
                (folder / "trained_on.json").write_text(json.dumps(basis))
            path.write_text(json.dumps({"wanted": wanted} | record))


def test_a_run_that_was_never_trained_has_no_line_in_the_plan(built: Project) -> None:
    built.configure(lambda config: config["runs"]["tiny"].update(trainer=world.training()))
    assert differences(built) == ["it has not been trained yet"]
    assert "training of tiny" not in built.run("-n", "train_tiny").output


def test_a_plan_says_why_pictures_are_drawn_or_a_run_is_evaluated_as_explain_does(
    trained: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    def configure(**values: Any) -> None:
        trained.configure(lambda config: config["runs"]["tiny"].update(values))

    for settings, reason in (
        ({"guidance_scale": 1}, "no picture has been drawn yet"),
        ({"prompts": ["a boat"]}, "prompts are to be encoded"),
    ):
        configure(generate=settings)
        trained.ask("explain", "generate_tiny").one_line(reason)
        trained.plan("generate_tiny")
        assert f"generate_tiny: {reason}\n" in capsys.readouterr().err
    configure(validation={"items": 1})
    trained.plan("evaluate_tiny")
    assert "evaluate_tiny: the run is trained first, " in capsys.readouterr().err
    trained.plan("train_tiny")
    assert "evaluate_tiny" not in capsys.readouterr().err


def test_a_run_without_a_trainer_is_one_line(template: Project) -> None:
    result = template.ask("explain", "train_tiny", check=False)
    assert result.returncode == 2
    result.one_line("error: train_tiny: the run has no trainer")
    template.ask("explain", "tiny").one_line("caches_tiny: fresh")
