"""A built project, one key of its configuration changed, and what the same command then makes.

For each world (a layout with its trainer) a table says of every key how to change it. A plan must
find stale what the key declares to shape (`latentmake.config.fields`) and what follows from that.
Of one world, builds then show, of many keys at once, that just this is made and nothing is left.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from config_keys import keys_of
from latentmake import backends
from latentmake.base import digest
from latentmake.config.root import Config
from latentmake.layouts.layout import kind_of
from latentmake.plan.manifest import read_lock
from latentmake.plan.orders import PROMPTS
from latentmake.plan.run_plan import RunPlan
from latentmake.runs.order import RunFiles, read_order
from latentmake.session import Session
from latentmake.trainers.launched.backend import Launched
from latentmake.trainers.loop.checkpoint import as_begun
from latentmake.trainers.sd.unet import SdOrder
from project import Project, Result

Made = frozenset[str]
State = dict[str, dict[str, tuple[str, int]]]
Key = tuple[str, ...]

RUN = "tiny"
NAMED = {"datasets": "shapes", "runs": RUN, "captioners": "florence"}
SAMPLES = {
    "SdTrainer": "Samples",
    "MusubiTrainer": "MusubiSamples",
    "SdScriptsTrainer": "LaunchedSamples",
}
# Folders below a run's whose files are not the weights of its last training.
_OTHERS = {"caches", "checkpoints", "previous", "samples", "saved", "sdscripts", "work"}
TRAIN, PUBLISH = f"train_{RUN}", f"publish_{RUN}"


@dataclass(frozen=True)
class Change:
    """How a key is changed.

    Attributes:
        value: its new value; a function is given the section that has the key, and changes it.
        refused: words of the one line that refuses it; "" where it is not refused.
        makes: the results that are made in this world; None stands for what the key declares.
        why: the reason, where that is something else.
        before: keys of the same section that are changed first, and built.
        files: told of the project before the change.
    """

    value: Any = None
    refused: str = ""
    makes: frozenset[str] | None = None
    why: str = ""
    before: Mapping[str, Any] = field(default_factory=dict)
    files: Callable[[Project], object] | None = None


Changes = Sequence[tuple[Key, Change]]


def nothing(value: Any, why: str, **others: Any) -> Change:
    """A change without any effect in this world, for a reason."""
    return Change(value, makes=frozenset(), why=why, **others)


def refused(value: Any, *words: str, **others: Any) -> Change:
    """A change that is refused in one line with some words."""
    return Change(value, refused=" ".join(words), **others)


def keys(trainer: str) -> Iterator[Key]:
    """Yield every key of the configuration, of trainers those of one alone."""
    for path, section, _ in keys_of(Config):
        name = section.__name__
        if path[:2] == ("runs", "trainer") and name not in (trainer, SAMPLES[trainer]):
            continue
        yield path


def declared(key: Key) -> frozenset[str]:
    """Return what a key declares to shape."""
    return frozenset(
        kind for path, _, shapes in keys_of(Config) if path == key for kind in shapes.kinds
    )


def closure(kinds: frozenset[str], trainer: str) -> Made:
    """Return what is made where some results are not what they were: these, and what follows."""
    made = set(kinds - {"machine"})
    if "captions" in made:
        made.add("text")
    if made & {"latents", "text"}:
        made.add("manifest")
    if "manifest" in made:
        made.add("weights")
    made.discard("pictures")  # drawn with the weights, never for themselves
    if "weights" in made and trainer == "SdTrainer":
        made.add("pictures")
    return frozenset(made)


def section(values: dict[str, Any], key: Key, model: str) -> Any:
    """Return the section of a configuration that has a key; it is made where it is missing."""
    found: Any = values
    for part, name in enumerate(key[:-1]):
        if isinstance(found, list):
            found = found[0]
        if isinstance(found.get(name), str):
            found[name] = {"path": found[name]}  # a path stands for its section
        found = found.setdefault(name, [{}] if name == "path_maps" else {})
        if part == 0 and name in {**NAMED, "models": model}:
            found = found.setdefault({**NAMED, "models": model}[name], {})
    return found[0] if isinstance(found, list) else found


def state(project: Project) -> State:
    """Return all results of a project: kind -> file -> digest and mtime."""
    cached = [name for name in project.cache_files() if "/_prompts/" not in name]
    captions = {name for name in cached if "/captions/" in name}
    text = {name for name in cached if ".text." in name or "_te" in Path(name).stem}
    runs = f"runs/{RUN}"
    lock = json.loads((project / f"{runs}/dataset.lock").read_bytes())["digest"]
    weights = [
        path for path in (project / runs).rglob("*.safetensors") if not _OTHERS & set(path.parts)
    ]
    return {
        "captions": _files(project, captions),
        "latents": _files(project, (name for name in cached if name not in text | captions)),
        "text": _files(project, text),
        "manifest": {lock: ("", 0)},
        "weights": _files(project, (str(path.relative_to(project.folder)) for path in weights)),
        "pictures": _files(project, (f"{runs}/samples.png", f"{runs}/samples/index.json")),
        "publication": _files(
            project,
            (
                str(path.relative_to(project.folder))
                for folder in ("published", "elsewhere")
                for path in (project / folder).rglob("*")
                if path.is_file()
            ),
        ),
    }


def _files(project: Project, names: Any) -> dict[str, tuple[str, int]]:
    return {
        name: (
            hashlib.sha256((project / name).read_bytes()).hexdigest(),
            (project / name).stat().st_mtime_ns,
        )
        for name in names
        if (project / name).is_file()
    }


def made(before: State, after: State) -> Made:
    """Return the kinds of results that are not as they were."""
    return frozenset(kind for kind in before if before[kind] != after[kind])


class Refused(Exception):
    """The line that refuses a configuration, its plan or its training."""


class Planned(NamedTuple):
    """What a plan says of a built project.

    Attributes:
        made: the kinds of results that a training would make.
        trains: whether it would train anew even of the same caches.
    """

    made: Made
    trains: bool


def planned(project: Project, values: dict[str, Any]) -> Planned:
    """Plan the training of a built project with another configuration, in this process.

    Raises:
        Refused: the configuration, or what it asks for.
    """
    try:
        with contextlib.chdir(project.folder):
            session = Session(values, targets=[TRAIN], main=True, home=project.folder)
            plan = session.plan.runs[RUN]
            trains = _outdated(session.config, plan)
    except SystemExit as error:
        raise Refused(str(error)) from None
    found = {
        kind_of(part.name)
        for part, each in plan.parts.items()
        if part.dataset != PROMPTS and (each.stale or each.orphans)
    }
    if plan.manifest_order:
        found.add("manifest")
    assert plan.training_order or not trains
    if plan.training_order:
        found.add("weights")
    if "weights" in found and not isinstance(backends.of_run(session.config, RUN), Launched):
        found.add("pictures")
    return Planned(frozenset(found), trains)


def _outdated(config: Config, plan: RunPlan) -> bool:
    """Return whether weights differ from what a run asks for, of the same caches."""
    trainer, lock = backends.of_run(config, RUN), read_lock(RUN).data
    assert trainer is not None and plan.trainer_order is not None
    if isinstance(trainer, Launched):
        run = read_order(plan.trainer_order, trainer.order_type)
        return bool(run.with_weights(digest.of_file).reasons(lock))
    order = read_order(plan.trainer_order, SdOrder)
    order = as_begun(order, lock)
    return RunFiles(order).trained(order.wanted(lock)) is None


def check(project: Project, key: Key, change: Change, *, model: str, trainer: str) -> None:
    """Change a key of a built project, and let a plan say what the same command would make.

    Raises:
        AssertionError: that is something else than the key shapes, and what follows from it.
    """
    kinds = _kinds(key, change)
    found = planned(project, changed(project.config, [(key, change)], model))
    assert found.made == closure(kinds, trainer), (key, {*found.made} ^ closure(kinds, trainer))
    assert found.trains == ("weights" in kinds), (key, "the training alone")


def prepared(values: dict[str, Any], changes: Changes, model: str) -> dict[str, Any]:
    """Return a configuration with all that some changes need before; {} where they disagree."""
    values = copy.deepcopy(values)
    told: dict[Key, Any] = {}
    for key, change in changes:
        for name, value in change.before.items():
            if told.setdefault((*key[:-1], name), value) != value:
                return {}
        section(values, key, model).update(change.before)
    return values


def changed(values: dict[str, Any], changes: Changes, model: str) -> dict[str, Any]:
    """Return a configuration in which some keys are changed."""
    values = copy.deepcopy(values)
    for key, change in changes:
        set_key(section(values, key, model), key[-1], change.value)
    return values


def _told(before: State, after: State, result: Result | None = None) -> str:
    """Return which files are not as they were, and what the command said."""
    files = {
        kind: sorted(
            name
            for name in before[kind].keys() | after[kind].keys()
            if before[kind].get(name) != after[kind].get(name)
        )
        for kind in before
    }
    return f"{files}\n{result.output if result else ''}"


def set_key(holder: dict[str, Any], key: str, value: Any) -> None:
    if callable(value):
        value(holder)
    else:
        holder[key] = value


# -- the tests of a world -------------------------------------------------------------------------


def completeness(
    trainer: str, changes: Mapping[Key, Change], elsewhere: Mapping[str, str]
) -> Callable[[], None]:
    """Return the test that no key of the configuration is forgotten."""

    def test() -> None:
        known = {*keys(trainer)}
        assert changes.keys() <= known
        left = {key for key in known - changes.keys() if key[-1] not in elsewhere}
        assert not left, left

    return test


def _kinds(key: Key, change: Change) -> frozenset[str]:
    """Return the results that a key shapes in this world."""
    return declared(key) if change.makes is None else change.makes


def _is_quiet(key: Key, change: Change) -> bool:
    """Whether a change makes nothing, so that it can be made together with others."""
    plain = not (change.refused or change.before or change.files)
    return plain and _kinds(key, change) <= {"machine"}


def _is_published(key: Key, change: Change) -> bool:
    """Whether a change makes a publication anew, so that one project is published for all."""
    return not change.refused and _kinds(key, change) == {"publication"}


def one_by_one(
    changes: Mapping[Key, Change], model: str, trainer: str
) -> Callable[[Key, Project], None]:
    """Return the test of each key that makes something or is refused, asked of a plan."""
    alone = [
        key
        for key, change in changes.items()
        if not (_is_quiet(key, change) or _is_published(key, change))
        and (change.refused or not change.before)
    ]

    @pytest.mark.parametrize("key", alone, ids=".".join)
    def test(key: Key, key_template: Project) -> None:
        project, change = _asked(key_template), changes[key]
        if not change.refused:
            check(project, key, change, model=model, trainer=trainer)
            return
        before = prepared(project.config, [(key, change)], model)
        with pytest.raises(Refused) as error:
            planned(project, changed(before, [(key, change)], model))
        line = str(error.value)
        assert all(words in line for words in change.refused.split(" | ")), line
        assert "\n" not in line

    return test


def _asked(template: Project) -> Project:
    """Return a copy of a built project of which plans are asked; nobody changes it."""
    place = template.folder.with_name("asked")
    return Project(place) if place.exists() else template.copy(place)


def after_others(
    changes: Mapping[Key, Change], model: str, trainer: str
) -> Callable[[Project, Path], None]:
    """Return the test of keys that need others before, asked of projects built with these."""

    def test(key_template: Project, tmp_path: Path) -> None:
        waiting = [each for each in changes.items() if each[1].before and not each[1].refused]
        while waiting:
            pack = _compatible(_asked(key_template), waiting, model)
            waiting = [each for each in waiting if each not in pack]
            project = key_template.copy(tmp_path / str(len(waiting)))
            project.config = prepared(project.config, pack, model)
            project.run(TRAIN)
            for key, change in pack:
                check(project, key, change, model=model, trainer=trainer)

    return test


def built(
    changes: Mapping[Key, Change], model: str, trainer: str
) -> Callable[[Project, Path], None]:
    """Return the test that jobs make what plans say: a build for each set of results.

    All keys that shape the same results are changed together, as far as the configuration allows
    it. For a job it makes no difference which key has changed.
    """
    alike: dict[Made, list[tuple[Key, Change]]] = {}
    for key, change in changes.items():
        alone = change.refused or change.before or _is_published(key, change)
        if not alone and not _is_quiet(key, change):
            alike.setdefault(closure(_kinds(key, change), trainer), []).append((key, change))

    def test(key_template: Project, tmp_path: Path) -> None:
        for number, (results, shaping) in enumerate(alike.items()):
            pack = _compatible(_asked(key_template), shaping, model)
            project = key_template.copy(tmp_path / str(number))
            before = state(project)
            project.config = changed(project.config, pack, model)
            result = project.run(TRAIN)
            after = state(project)
            told = _told(before, after, result)
            assert made(before, after) == results, (pack, told)
            result = project.run(TRAIN)
            assert result.idle, (pack, result.output)
            assert state(project) == after, (pack, result.output)
        project = key_template.copy(tmp_path / "quiet")
        before = state(project)
        quiet = [each for each in changes.items() if _is_quiet(*each)]
        project.config = changed(project.config, quiet, model)
        result = project.run(TRAIN)
        assert state(project) == before, _told(before, state(project), result)

    return test


def _compatible(project: Project, changes: Changes, model: str) -> Changes:
    """Return the first of some changes and those that can be made together with it."""
    found: list[tuple[Key, Change]] = []
    for each in changes:
        before = prepared(project.config, [*found, each], model)
        values = changed(before, [*found, each], model) if before else {}
        undone = [key for key, change in found if not _is_set(values, key, change, model)]
        if undone or not before:
            continue
        with contextlib.suppress(Refused):
            planned(project, values)
            found.append(each)
    assert found, changes
    return found


def _is_set(values: dict[str, Any], key: Key, change: Change, model: str) -> bool:
    """Whether a changed key still has its value after others were changed."""
    holder = section(values, key, model)
    again = copy.deepcopy(holder)
    set_key(again, key[-1], change.value)
    return bool(again == holder)


def published(changes: Mapping[Key, Change], model: str) -> Callable[[Project, Path], None]:
    """Return the test of the keys of a publication, changed one after another."""
    keys = [key for key, change in changes.items() if _is_published(key, change)]
    keys.sort(key=lambda key: key[-1] == "caches")  # without which others shape nothing

    def publish(project: Project) -> None:
        with contextlib.chdir(project.folder):
            session = Session(project.config, targets=[PUBLISH], main=True, home=project.folder)
            order = Path(str(session.graph.inputs("publish", RUN)[0]["order"]))
            backends.of_order(order).publish(order, print)

    def test(key_template: Project, tmp_path: Path) -> None:
        project = key_template.copy(tmp_path / "project")
        for prepare in {changes[key].files for key in keys} - {None}:
            assert prepare is not None
            prepare(project)
        project.run(PUBLISH)
        for key in keys:
            before = state(project)
            project.config = changed(project.config, [(key, changes[key])], model)
            publish(project)
            after = state(project)
            assert made(before, after) == {"publication"}, (key, _told(before, after))
            publish(project)
            assert state(project) == after, key
        project.run(PUBLISH)
        assert state(project) == after

    return test


def together(changes: Mapping[Key, Change], model: str) -> Callable[[Project], None]:
    """Return the test that all other keys, changed in one go, make nothing."""

    def test(key_template: Project) -> None:
        project = _asked(key_template)
        for machine in (True, False):
            quiet = [each for each in changes.items() if _is_quiet(*each)]
            quiet = [each for each in quiet if (each[1].makes is None) == machine]
            found = planned(project, changed(project.config, quiet, model))
            # Another path of the same files makes the manifest anew, with the digest that it had.
            assert not found.trains and not found.made & {"latents", "text"}
            assert not (machine and found.made)

    return test


# -- keys that are changed alike in several worlds ------------------------------------------------

ONE = "one place of this machine for another"
ABOUT_WAN = "is only for"

CAPTIONER = "models/florence"
CAPTIONERS: dict[Key, Change] = {
    ("captioners", *key): nothing(value, "no dataset has a captioner")
    for key, value in {
        ("model", "path"): CAPTIONER,
        ("thresholds", "general"): 0.5,
        ("thresholds", "character"): 0.5,
        ("thresholds", "rating"): 0.5,
        **{
            (name,): lambda section, new={name: value}: section.update({"model": CAPTIONER} | new)
            for name, value in {
                "prompt": "Describe the picture.",
                "dtype": "float16",
                "quantization": "8bit",
                "max_new_tokens": 8,
                "temperature": 0.5,
                "seed": 1,
                "image_size": 64,
                "frames": 2,
                "exclude": ["solo"],
                "underscores": True,
                "trigger": "sks",
                "prefix": "a photo of",
                "replace": {"a man": "Bob"},
                "drop": ["the image shows"],
                "max_words": 9,
            }.items()
        },
    }.items()
}
DATASETS: dict[Key, Change] = {
    **CAPTIONERS,
    ("datasets", "captioner"): refused("nobody", "there is no captioner"),
    ("datasets", "caption_extension"): Change(".caption"),
    ("datasets", "tags_extension"): Change(None),
    ("datasets", "metadata_file"): Change(
        lambda section: section.update(metadata_file="data/meta.json", metadata_captions="override")
    ),
    ("datasets", "metadata_captions"): Change(
        "join", before={"metadata_file": "data/meta.json", "metadata_captions": "override"}
    ),
    ("datasets", "fit"): Change("crop"),
    ("datasets", "bucket_no_upscale"): Change(True),
    ("datasets", "max_image_pixels"): Change(10_000_000),
    ("datasets", "num_repeats"): Change(2),
    ("datasets", "is_reg"): refused(True, "regularisation images"),
    ("datasets", "missing_caption"): nothing("empty", "no caption is missing"),
    ("datasets", "class_tokens"): nothing("a cat", "no caption is missing"),
    ("datasets", "empty_caption"): nothing("allow", "no caption is empty"),
    ("datasets", "on_error"): nothing("skip", "no item is bad"),
    ("datasets", "path"): nothing("data/same", ONE),
    ("datasets", "flat"): nothing(True, "there are no sub-folders"),
    ("datasets", "adopt_from"): nothing("data/same", "latentmake adopt alone reads it"),
}
CAPTIONS: dict[Key, Change] = {
    ("datasets", "captions", "variants"): Change(3),
    ("datasets", "captions", "seed"): Change(7),
    ("datasets", "captions", "caption_and_tags"): Change("tags_first"),
    ("datasets", "captions", "caption_separator"): Change("/"),
    ("datasets", "captions", "caption_prefix"): Change("drawn"),
    ("datasets", "captions", "caption_suffix"): Change("on paper"),
    ("datasets", "captions", "caption_dropout_rate"): Change(0.9),
    ("datasets", "captions", "enable_wildcard"): Change(True),
    ("datasets", "captions", "shuffle_caption"): Change(False),
    ("datasets", "captions", "keep_tokens"): Change(2),
    ("datasets", "captions", "keep_tokens_separator"): Change("|||"),
    ("datasets", "captions", "caption_tag_dropout_rate"): Change(0.6),
    ("datasets", "captions", "secondary_separator"): Change(";;;"),
    ("datasets", "captions", "replacements"): Change({"red": "crimson"}),
}
VIDEOS: dict[Key, Change] = {
    ("datasets", "frame_extraction"): refused("chunk", "frame_extraction"),
    ("datasets", "frame_stride"): refused(2, "frame_stride"),
    ("datasets", "frame_sample"): refused(2, "frame_sample"),
    ("datasets", "max_frames"): refused(5, "max_frames"),
    ("datasets", "source_fps"): refused(24.0, "source_fps"),
    ("datasets", "sample_stride"): refused(2, "sample_stride"),
    ("datasets", "display_rotation"): refused(True, "display_rotation"),
    ("datasets", "short_videos"): refused("error", "short_videos"),
}
CONTROLS: dict[Key, Change] = {
    ("datasets", "no_resize_control"): refused(True, "no_resize_control"),
    ("datasets", "control_resolution"): refused(64, "control_resolution"),
    ("datasets", "multiple_target"): refused(True, "multiple_target"),
    ("datasets", "fp_latent_window_size"): refused(8, "fp_latent_window_size"),
    ("datasets", "fp_1f_clean_indices"): refused([0], "fp_1f_clean_indices"),
    ("datasets", "fp_1f_target_index"): refused(9, "fp_1f_target_index"),
    ("datasets", "fp_1f_no_post"): refused(True, "fp_1f_no_post"),
}
WAN: dict[Key, Change] = {
    ("models", "dit", "path"): refused("models/x.safetensors", ABOUT_WAN),
    ("models", "dit_high_noise", "path"): refused("models/x.safetensors", ABOUT_WAN),
    ("models", "clip", "path"): refused("models/x.safetensors", ABOUT_WAN),
    ("models", "fp8_t5"): refused(True, ABOUT_WAN),
    ("models", "vae_cache_cpu"): refused(True, ABOUT_WAN),
    ("models", "encoder"): refused("musubi", "is not for"),
    ("models", "image_encoder", "path"): refused("models/x.safetensors", ABOUT_WAN),
    ("models", "latents_arguments"): refused(["--vae_tiling"], "is for other programs"),
    ("models", "text_arguments"): refused(["--fp8_vl"], "is for other programs"),
}
MACHINES: dict[Key, Change] = {
    ("batch", "items"): Change(2),
    ("graph",): Change("batches"),
    ("batch", "minutes"): Change(1),
    ("cluster", "partition"): Change("gpu"),
    ("cluster", "account"): Change("lab"),
    ("cluster", "constraint"): Change("a100"),
    ("cluster", "qos"): Change("night"),
    ("musubi_tuner", "path"): Change("nowhere"),
    ("musubi_tuner", "batch_size"): Change(2),
    ("musubi_tuner", "num_workers"): Change(2),
    ("sd_scripts", "path"): Change("nowhere"),
    ("store", "keep"): Change("1 GB"),
    ("history", "keep"): Change(5),
    **{
        ("runs", "trainer", name): Change("some words")
        for name in ("title", "trigger", "author", "license")
    },
    ("runs", "trainer", "metadata"): Change("full"),
    **{
        ("cluster", job, name): Change(value)
        for job in ("encode", "train")
        for name, value in {
            "partition": "gpu",
            "constraint": "a100",
            "qos": "night",
            "gpus": 2,
            "cpus": 3,
            "mem_mb": 900,
            "runtime": 9,
        }.items()
    },
}
ELSEWHERE = {
    "hub": "reaches a network",
    "revision": "reaches a network",
    "subfolder": "reaches a network",
    "file": "of a hub: tests/unit/models/test_places.py",
    "venv": "the place of an environment",
    "config": "of a single file: tests/unit/models/test_weight_files.py, encode/test_wan_vae.py",
    "projection": "of a text encoder: tests/workflow/test_examples.py",
    "trust_remote_code": "of a projection: tests/unit/encode/test_projection.py",
}
"""Keys that no world changes, and why."""

PUBLICATION: dict[Key, Any] = {
    ("publish", "path"): "elsewhere",
    **{
        ("publish", "path_maps", name): lambda section, new={name: place}: section.update(
            {"linux": "/a", "windows": "A:/", "wsl": tempfile.gettempdir()} | new
        )
        for name, place in {"linux": "/b", "windows": "B:/", "wsl": "/"}.items()
    },
    ("publish", "tomls"): "elsewhere/tomls",
    ("publish", "scripts"): "elsewhere/scripts",
    ("publish", "batch_scripts"): "elsewhere/batch",
    ("publish", "folders"): "{dataset}/{resolution}",
    ("publish", "output"): "elsewhere/output",
    ("publish", "logs"): "elsewhere/logs",
    ("publish", "each_resolution"): True,
    ("publish", "caches"): False,
    ("publish", "attention"): "xformers",
    ("publish", "num_processes"): 2,
    ("publish", "batch_size"): 2,
    ("publish", "num_workers"): 3,
}


def publications(files: Callable[[Project], object] | None = None) -> dict[Key, Change]:
    """Return the changes of a publication that has caches, of a run of one resolution.

    Args:
        files: is told of the project before.
    """
    found = {path: Change(value, files=files) for path, value in PUBLICATION.items()}
    for name in ("batch_size", "num_workers"):
        found["publish", name] = nothing(
            PUBLICATION["publish", name],
            "of caching, which published scripts do with `caches: false` alone",
        )
    found["publish", "each_resolution"] = nothing(True, "the run has one resolution")
    return found


PICTURES: dict[Key, Change] = {
    ("runs", "trainer", "samples", name): Change(value)
    for name, value in {
        "prompts": ["a cat"],
        "negative_prompt": "grey",
        "every": 2,
        "num_inference_steps": 3,
        "guidance_scale": 2.0,
        "resolution": 64,
        "seed": 4,
    }.items()
}
PROMPT: dict[Key, Change] = {("prompt",): nothing("a cat", "of generate_{run} alone")}
# Of `generate`: keys of clips and pictures, and of one of them.
DRAWN: dict[str, Any] = {
    "prompts": ["a cat"],
    "negative_prompt": "blurred",
    "resolution": 32,
    "num_inference_steps": 2,
    "guidance_scale": 2.0,
    "seed": 1,
    "base": False,
    "lora": "runs/other",
    "lora_strength": 0.5,
}
FILMED: dict[str, Any] = {
    "videos": 2,
    "frames": 5,
    "flow_shift": 2.0,
    "scheduler": "euler",
    "fps": 8,
}
GENERATION: dict[Key, Change] = {
    ("runs", "generate", name): refused(value, "runs.tiny.generate: its trainer generates nothing")
    for name, value in {**DRAWN, **FILMED, "images": 2, "image": "first.png"}.items()
}
LAYOUT_OF_MUSUBI: dict[Key, Change] = {
    ("datasets", "captions", "variants"): Change(2),
    ("datasets", "captions", "caption_dropout_rate"): refused(0.5, "variants"),
    ("datasets", "captions", "caption_tag_dropout_rate"): refused(0.5, "variants"),
    ("datasets", "bucket_reso_steps"): refused(32, "musubi-tuner's buckets"),
    ("datasets", "min_bucket_reso"): refused(32, "min_bucket_reso"),
    ("datasets", "max_bucket_reso"): refused(64, "max_bucket_reso"),
    ("datasets", "flip_aug"): refused(True, "flip_aug"),
    ("datasets", "alpha_mask"): refused(True, "alpha_mask"),
    ("datasets", "exif_rotation"): refused(False, "exif_rotation"),
    ("datasets", "background"): refused("black", "background"),
    ("models", "text_projection"): refused("new", "text_projection"),
    ("models", "layout"): refused("plain", "layout: musubi"),
    ("models", "clip_skip"): refused(1, "clip_skip"),
    ("models", "max_token_length"): refused(150, "max_token_length"),
    ("models", "apply_lg_attn_mask"): refused(True, "apply_lg_attn_mask"),
    ("models", "apply_t5_attn_mask"): refused(True, "apply_t5_attn_mask"),
    ("models", "checkpoint", "path"): refused("models/x.safetensors", "layout: sdscripts"),
    ("models", "text_dtype"): refused("float32", "text_dtype"),
    ("models", "posterior"): refused("sample", "posterior"),
    ("models", "posterior_seed"): nothing(3, "nothing is drawn"),
    ("models", "vae_tiling"): refused(True, "vae_tiling"),
    ("models", "scaling_factor"): refused(0.5, "only for `layout: plain`"),
    ("models", "shift_factor"): refused(0.1, "only for `layout: plain`"),
    ("models", "ai_training", "latents"): refused(".img_sdvae", "ai_training"),
    ("models", "ai_training", "text"): refused([".a"], "ai_training"),
}
EXPORT: dict[Key, Change] = {
    ("export", "folder"): nothing("elsewhere", "of export_{run} alone"),
    ("export", "resolution"): nothing(32, "of export_{run} alone"),
    ("export", "overwrite"): nothing(True, "of export_{run} alone"),
}
