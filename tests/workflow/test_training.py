"""Training follows the lock: what changed no data and no setting trains nothing again."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from latentmake.request import VARIABLE
from latentmake.runs.order import caption_in
from project import NOTHING, Counts, Project, kill_group, wait_until

WEIGHTS = "runs/tiny/pytorch_lora_weights.safetensors"


def _weights(project: Project) -> tuple[str, int]:
    path = project / WEIGHTS
    return hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns


def test_a_training_after_the_caches_encodes_nothing_again(
    template: Project, trained_template: Project
) -> None:
    assert trained_template.changed(template.snapshot()) == NOTHING
    receipt = json.loads((trained_template / "runs/tiny/trained.json").read_bytes())
    assert receipt["steps"] == 2
    assert (trained_template / receipt["weights"]).is_file()
    assert trained_template.lock() == template.lock()


def test_nothing_but_an_edit_or_a_setting_trains_again(
    trained_template: Project, tmp_path: Path
) -> None:
    left_out = shutil.ignore_patterns(".snakemake", ".latentmake")
    shutil.copytree(
        trained_template.folder,
        tmp_path / "project",
        copy_function=shutil.copyfile,
        ignore=left_out,
    )
    trained = Project(tmp_path / "project")
    before = _weights(trained)
    assert trained.run("train_tiny").idle
    # A rebuild that changes nothing.
    (name,) = trained.texts("ant")
    (trained / name).unlink()
    assert trained.run("train_tiny").encoded() == Counts(encoded=1)
    assert _weights(trained)[0] == before[0]  # Snakemake touches the outputs of a job
    # An edited caption; no bar is drawn in a file.
    (trained / "data/shapes/cat.txt").write_text("a green disc on grey")
    result = trained.run("train_tiny")
    assert result.encoded() == Counts(encoded=1) and "%|" not in result.output
    edited = _weights(trained)
    assert edited[0] != before[0]
    # A setting of the trainer.
    caches = trained.snapshot()
    trained.configure(lambda config: config["runs"]["tiny"]["trainer"].update(learning_rate=1e-2))
    assert trained.run("train_tiny").jobs == ["train", "train_tiny"]
    assert trained.changed(caches) == NOTHING
    assert _weights(trained)[0] != edited[0]
    trained.scramble_mtimes()
    assert trained.run("train_tiny").idle


def test_pictures_and_losses_follow_a_training(trained: Project) -> None:
    before, folder = _weights(trained), trained / "runs/tiny/generated"
    drawn: list[dict[str, int]] = []
    for prompts in (["a red circle", "a blue disc"], ["a red circle", "a green disc"]):
        generate = {"prompts": prompts, "num_inference_steps": 1, "guidance_scale": 1}
        trained.configure(lambda config, new=generate: config["runs"]["tiny"].update(generate=new))
        result = trained.run("generate_tiny")
        assert "train" not in result.jobs and result.jobs.count("generate") == 1
        drawn.append({path.name: path.stat().st_mtime_ns for path in folder.glob("*_seed-0_*.png")})
        assert "index.html: 4 pictures" in result.output
    kept = drawn[0].items() & drawn[1].items()
    assert {name.partition("_")[0][:12] for name, _ in kept} == {"a-red-circle"}
    assert len(kept) == 2 and len(drawn[1]) == 4 and _weights(trained) == before
    held = {"items": 1, "clips": 1}
    trained.configure(lambda config: config["runs"]["tiny"].update(validation=held))
    result = trained.run("train_tiny", "evaluate_tiny")
    assert "reports/evaluate_tiny.html: 3 pictures" in result.output
    metrics = json.loads((trained / "runs/tiny/evaluation/metrics.json").read_bytes())
    assert metrics["loss"]["base"] != metrics["loss"]["adapter"]
    assert trained.run("train_tiny", "evaluate_tiny").idle


def test_snakemake_tells_what_a_run_has_made(trained: Project) -> None:
    trained.run("--report", "out.html")
    page = (trained / "out.html").read_text()
    for file in ("samples.png", "curves.png", "training.json"):
        assert f'"runs/tiny/{file}": {{"name": "{file}"' in page
    for text in ("run tiny", "model micro, shapes", "shapes   micro  text", "learning_rate"):
        assert text in page
    assert "runs/" not in trained.run("--list-changes", "input").output
    assert (trained / "benchmarks/train/tiny.tsv").is_file()
    # All that is deleted is said, and is made again.
    result = trained.run("--delete-all-output", "train_tiny")
    assert f"Deleting {WEIGHTS}" in result.output and not (trained / WEIGHTS).exists()
    jobs = [job for job in trained.run(WEIGHTS).jobs if not job.startswith("encode_")]
    assert jobs == ["manifest", "train", "train_tiny"]


def test_a_prompt_added_trains_nothing(trained: Project) -> None:
    before = _weights(trained)
    samples = {"prompts": ["a red circle"], "num_inference_steps": 1, "guidance_scale": 1}
    trained.configure(lambda config: config["runs"]["tiny"]["trainer"].update(samples=samples))
    result = trained.run("train_tiny")
    assert result.idle and "to make" not in result.output and _weights(trained) == before
    assert "0 stale" in trained.ask("status", "tiny").output
    # The next training draws it.
    trained.configure(lambda config: config["runs"]["tiny"]["trainer"].update(seed=5))
    trained.run("train_tiny")
    index = json.loads((trained / "runs/tiny/samples/index.json").read_bytes())
    assert index["prompts"] == ["a red circle"] and all(index["files"][-1])
    assert _weights(trained) != before


def test_a_damaged_cache_file_is_encoded_anew_once_it_is_deleted(trained: Project) -> None:
    (name,) = trained.texts("ant")
    data = (trained / name).read_bytes()
    length = int.from_bytes(data[:8], "little")
    trained.write_keeping_mtime(name, data[: 8 + length] + b"\xff" * (len(data) - 8 - length))
    trained.configure(lambda config: config["runs"]["tiny"]["trainer"].update(learning_rate=1e-2))
    result = trained.run("train_tiny", check=False)
    assert result.returncode != 0
    line = result.one_line("error: run tiny: ", name, "checksum differs", "delete it")
    assert "Traceback" not in result.output, result.output
    assert "which encodes it anew" in line
    (trained / name).unlink()
    before = _weights(trained)
    assert trained.run("train_tiny").encoded() == Counts(encoded=1)
    assert _weights(trained)[0] != before[0]
    assert (trained / name).read_bytes() == data


def test_training_reads_no_image_no_caption_and_no_text_encoder(trained: Project) -> None:
    """Once it is planned, manifest, caches, UNet and (for the pictures) the VAE are enough."""
    before = _weights(trained)
    trained.configure(lambda config: config["runs"]["tiny"]["trainer"].update(learning_rate=1e-2))
    plan = trained.plan("train_tiny")
    for folder in ("data", "models/micro/text_encoder", "models/micro/tokenizer"):
        shutil.rmtree(trained / folder)
    job = ("--mode", "subprocess", "--nolock", "--target-jobs", "train:run=tiny")
    job = ("--rerun-triggers", "mtime", *job)  # as Snakemake hands them on
    trained.run(*job, **{VARIABLE: plan})
    assert _weights(trained)[0] != before[0]


def _result(project: Project, folder: str = "") -> dict[str, bytes]:
    """Return all files of the result in a run's folder, but for the receipt."""
    root = project / "runs/tiny" / folder
    names = ("training.json", "*.safetensors", "*.png", "samples/*", "logs/**/*")
    found = (path for name in names for path in root.glob(name) if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in found}


def test_a_new_training_keeps_the_previous_result_and_an_undone_edit_brings_it_back(
    trained: Project,
) -> None:
    before, caption = _result(trained), trained / "data/shapes/cat.txt"
    old = caption.read_text()
    caption.write_text("a green disc on grey")
    result = trained.run("train_tiny")
    line = "next: compare tiny with its previous result: latentmake compare tiny"
    assert line in result.output
    edited = _result(trained)
    assert _result(trained, "previous") == before
    assert len({*before} & {*edited}) > 5 and edited[WEIGHTS[10:]] != before[WEIGHTS[10:]]
    assert "compare_tiny.html: " in trained.ask("compare", "tiny").output
    assert "tiny (previous) vs tiny" in (trained / "reports/compare_tiny.html").read_text()
    asked = trained.ask("explain", "runs/tiny/previous/samples.png").output
    assert "previous (the result before that of train_tiny" in asked
    # An undone edit: both change places, and nothing is trained.
    caption.write_text(old)
    result = trained.run("train_tiny")
    assert "takes back the previous result" in result.output and "loss at" not in result.output
    assert (_result(trained), _result(trained, "previous")) == (before, edited)
    assert trained.run("train_tiny").idle


def test_a_failed_training_loses_no_result(trained: Project) -> None:
    before = _result(trained)
    trained.configure(lambda config: config["runs"]["tiny"]["trainer"].update(learning_rate=1000))
    result = trained.run("train_tiny", check=False)
    assert result.returncode != 0
    result.one_line("error: run tiny: ", "at step 2")
    assert "Traceback" not in result.output
    assert _result(trained, "previous") == before
    assert WEIGHTS[10:] not in _result(trained)
    trained.configure(lambda config: config["runs"]["tiny"]["trainer"].pop("learning_rate"))
    trained.run("train_tiny")
    assert _result(trained) == before and not (trained / "runs/tiny/previous").exists()


def test_what_is_forced_is_made_anew_and_nothing_else(trained: Project) -> None:
    before, caches = _result(trained), trained.snapshot()
    result = trained.run("train_tiny", "-R", "train")
    assert result.jobs == ["train", "train_tiny"] and "loss at the start" in result.output
    result.one_line("training of tiny: forced; the last one took ")
    assert _result(trained, "previous") == before and trained.changed(caches) == NOTHING
    assert _weights(trained)[0] == hashlib.sha256(before[WEIGHTS[10:]]).hexdigest()
    # All that is needed for it: encoded, though its files are fresh and their content is at hand.
    before = _result(trained)
    planned = trained.run("-n", "-F", "train_tiny")
    result = trained.run("-F", "train_tiny")
    assert result.table() == planned.table()
    assert {row["forced"] for row in result.table().values()} == {6}
    result.one_line("text of micro: about ", " kB")
    assert result.encoded() == Counts(encoded=17, linked=1) and "train" in result.jobs
    assert trained.changed(caches) == NOTHING._replace(rewritten={*caches})
    assert _result(trained, "previous") == before
    # Caches whose keys stay train nothing.
    caches, (file,) = trained.snapshot(), trained.texts("ant")
    result = trained.run("train_tiny", "-R", "latents_tiny", file)
    assert result.encoded() == Counts(encoded=13) and "train" not in result.jobs
    rewritten = {name for name in caches if name == file or "/text/" not in name}
    assert trained.changed(caches) == NOTHING._replace(rewritten=rewritten)
    assert trained.run("-f", file).encoded() == Counts(encoded=1)
    assert trained.run("train_tiny").idle


def test_a_forced_training_that_was_killed_goes_on(trained: Project) -> None:
    steps = {"steps": 60, "checkpointing_steps": 20}
    trained.configure(lambda config: config["runs"]["tiny"]["trainer"].update(steps))
    trained.run("train_tiny")
    before, checkpoints = _result(trained), trained / "runs/tiny/checkpoints"
    running = trained.start("train_tiny", "-R", "train")
    wait_until((trained / "runs/tiny/forced.json").is_file, running)
    wait_until((checkpoints / "step-000020").is_dir, running)
    kill_group(running)
    assert "resumed" not in (trained / "started.txt").read_text()
    assert _result(trained, "previous") == before
    trained.run("-n", "train_tiny").one_line("training of tiny: goes on from step ")
    assert "resumed from step " in trained.run("train_tiny").output
    after = _result(trained)
    assert after[WEIGHTS[10:]] == before[WEIGHTS[10:]] and after != before
    assert _result(trained, "previous") == before
    assert trained.run("train_tiny").idle


def test_a_run_that_skips_its_first_items_trains_without_them_and_just_once(
    trained: Project,
) -> None:
    def skip_and_draw(config: dict[str, Any]) -> None:
        config["datasets"]["shapes"].update(on_error="skip")
        config["runs"]["tiny"]["trainer"]["samples"] = {"num_inference_steps": 2}

    trained.configure(skip_and_draw)
    (trained / "data/shapes/ant.txt").write_bytes(b"\xff\xfe not UTF-8 \xff")
    (trained / "data/shapes/bee.png").write_bytes(b"no image")
    result = trained.run("train_tiny")
    assert "skipped: data/shapes/ant.txt" in result.output
    assert "skipped: data/shapes/bee.png" in result.output
    aside = {row["stem"] for row in trained.manifest() if "aside" in row}
    assert aside == {"ant", "bee"}
    index = json.loads((trained / "runs/tiny/samples/index.json").read_bytes())
    kept = [row for row in trained.manifest() if "aside" not in row]
    assert index["prompts"] == [caption_in(str(trained / row["text"])) for row in kept][:4]
    assert (trained / "runs/tiny/samples.png").is_file()
    again = trained.run("train_tiny")
    assert again.idle, again.output
