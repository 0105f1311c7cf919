"""A built project, one key of its configuration changed, and what the same command then makes.

For each world (a layout with its trainer) a table says of every key how to change it. What is made
must be what the key declares to shape (`latentmake.config.shapes`) and what follows from that, and
then nothing is left to do.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from config_keys import keys_of
from latentmake.config import Config, parse
from latentmake.errors import UserError
from project import Project, Result

Made = frozenset[str]
State = dict[str, dict[str, tuple[str, int]]]
Key = tuple[str, ...]

RUN = "tiny"
NAMED = {"datasets": "shapes", "runs": RUN}
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
        if path[:2] == ("runs", "trainer") and name not in (trainer, "Samples"):
            continue
        if name == "Samples" and trainer != "SdTrainer":
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
    if made & {"latents", "text"}:
        made.add("manifest")
    if "manifest" in made:
        made.add("weights")
    if "weights" in made and trainer == "SdTrainer":
        made.add("pictures")
    return frozenset(made - ({"pictures"} if trainer != "SdTrainer" else set()))


def section(values: dict[str, Any], key: Key, model: str) -> Any:
    """Return the section of a configuration that has a key; it is made where it is missing."""
    found: Any = values
    for part, name in enumerate(key[:-1]):
        if isinstance(found, list):
            found = found[0]
        found = found.setdefault(name, [{}] if name == "path_maps" else {})
        if part == 0 and name in {**NAMED, "models": model}:
            found = found.setdefault({**NAMED, "models": model}[name], {})
    return found[0] if isinstance(found, list) else found


def state(project: Project) -> State:
    """Return all results of a project: kind -> file -> digest and mtime."""
    cached = [name for name in project.cache_files() if "/_prompts/" not in name]
    text = {name for name in cached if ".text." in name or "_te" in Path(name).stem}
    runs = f"runs/{RUN}"
    lock = json.loads((project / f"{runs}/dataset.lock").read_bytes())["digest"]
    weights = [
        path
        for path in (project / runs).rglob("*.safetensors")
        if not {"samples", "checkpoints", "saved", "work", "sdscripts", "caches"} & set(path.parts)
    ]
    return {
        "latents": _files(project, (name for name in cached if name not in text)),
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


def check(project: Project, key: Key, change: Change, *, model: str, trainer: str) -> None:
    """Change a key of a built project, give the same command, and then give it again.

    Raises:
        AssertionError: something else was made than the key shapes, or something is left to do.
    """
    kinds = _kinds(key, change)
    target = PUBLISH if "publication" in kinds else TRAIN
    if change.files is not None:
        change.files(project)
    if change.before:
        project.configure(lambda values: section(values, key, model).update(change.before))
    if change.before or target != TRAIN:
        project.run(target)
    before = state(project)
    project.configure(lambda values: set_key(section(values, key, model), key[-1], change.value))
    result = project.run(target, check=False)
    if change.refused:
        _refused(project, result, change, before)
        return
    assert result.returncode == 0, result.output
    after = state(project)
    assert made(before, after) == closure(kinds, trainer), _told(before, after, result)
    again = project.run(target)
    if target == TRAIN:
        assert again.idle, again.output
    assert state(project) == after, again.output


def _told(before: State, after: State, result: Result) -> str:
    """Return which files are not as they were, and what the command said."""
    files = {
        kind: sorted(
            name
            for name in before[kind].keys() | after[kind].keys()
            if before[kind].get(name) != after[kind].get(name)
        )
        for kind in before
    }
    return f"{files}\n{result.output}"


def set_key(holder: dict[str, Any], key: str, value: Any) -> None:
    if callable(value):
        value(holder)
    else:
        holder[key] = value


def _refused(project: Project, result: Result, change: Change, before: State) -> None:
    assert result.returncode != 0, result.output
    assert "Traceback" not in result.output, result.output
    result.one_line("error: ", *change.refused.split(" | "))
    assert state(project) == before, result.output


# -- the tests of a world -------------------------------------------------------------------------


def completeness(
    trainer: str, changes: Mapping[Key, Change], elsewhere: Mapping[str, str]
) -> Callable[[], None]:
    """Return the test that no key of the configuration is forgotten."""

    def test() -> None:
        known = {*keys(trainer)}
        assert changes.keys() <= known
        assert {key for key in known - changes.keys() if key[-1] not in elsewhere} == set()

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
) -> Callable[[Key, Project, Path], None]:
    """Return the test of each key that makes something or is refused."""
    alone = [
        key
        for key, change in changes.items()
        if not _is_quiet(key, change) and not _is_published(key, change)
    ]

    @pytest.mark.parametrize("key", alone, ids=".".join)
    def test(key: Key, key_template: Project, tmp_path: Path) -> None:
        change = changes[key]
        if change.refused and (line := _refusal(key_template.config, key, change, model)):
            assert all(words in line for words in change.refused.split(" | ")), line
            assert "\n" not in line
            return
        project = key_template.copy(tmp_path / "project")
        check(project, key, change, model=model, trainer=trainer)

    return test


def _refusal(values: dict[str, Any], key: Key, change: Change, model: str) -> str:
    """Return the line that refuses a configuration as soon as it is read; "" where none does."""
    holder = section(values, key, model)
    holder.update(change.before)
    set_key(holder, key[-1], change.value)
    try:
        parse(values)
    except UserError as error:
        return str(error)
    return ""


def published(changes: Mapping[Key, Change], model: str) -> Callable[[Project, Path], None]:
    """Return the test of the keys of a publication, changed one after another."""
    keys = [key for key, change in changes.items() if _is_published(key, change)]
    keys.sort(key=lambda key: key[-1] == "caches")  # without which others shape nothing

    def test(key_template: Project, tmp_path: Path) -> None:
        project = key_template.copy(tmp_path / "project")
        for prepare in {changes[key].files for key in keys} - {None}:
            assert prepare is not None
            prepare(project)
        result = project.run(PUBLISH)
        for key in keys:
            before = state(project)
            project.configure(
                lambda values, key=key: set_key(  # type: ignore[misc]
                    section(values, key, model), key[-1], changes[key].value
                )
            )
            result = project.run(PUBLISH)
            after = state(project)
            assert made(before, after) == {"publication"}, (key, _told(before, after, result))
            result = project.run(PUBLISH)
            assert state(project) == after, (key, result.output)

    return test


def together(changes: Mapping[Key, Change], model: str) -> Callable[[Project, Path], None]:
    """Return the test that all other keys, changed in one go, make nothing."""

    def test(key_template: Project, tmp_path: Path) -> None:
        project = key_template.copy(tmp_path / "project")
        before = state(project)
        for machine in (True, False):
            values = key_template.config
            for key, change in changes.items():
                if _is_quiet(key, change) and machine == (change.makes is None):
                    set_key(section(values, key, model), key[-1], change.value)
            project.config = values
            result = project.run(TRAIN)
            assert result.idle or not machine, result.output
            assert state(project) == before, _told(before, state(project), result)
        assert project.run(TRAIN).idle

    return test


# -- keys that are changed alike in several worlds ------------------------------------------------

ONE = "one place of this machine for another"
ABOUT_WAN = "about Wan"

DATASETS: dict[Key, Change] = {
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
    ("datasets", "missing_caption"): nothing("empty", "no caption is missing"),
    ("datasets", "empty_caption"): nothing("allow", "no caption is empty"),
    ("datasets", "on_error"): nothing("skip", "no item is bad"),
    ("datasets", "path"): nothing("data/same", ONE),
    ("datasets", "flat"): nothing(True, "there are no sub-folders"),
    ("datasets", "adopt_from"): nothing("data/same", "adopt_{run} alone reads it"),
}
CAPTIONS: dict[Key, Change] = {
    ("datasets", "captions", "variants"): Change(3),
    ("datasets", "captions", "seed"): Change(7),
    ("datasets", "captions", "caption_and_tags"): Change("tags_first"),
    ("datasets", "captions", "caption_separator"): Change("/"),
    ("datasets", "captions", "caption_prefix"): Change("drawn"),
    ("datasets", "captions", "caption_suffix"): Change("on paper"),
    ("datasets", "captions", "caption_dropout_rate"): Change(0.9),
    ("datasets", "captions", "caption_dropout_every_n_epochs"): Change(2),
    ("datasets", "captions", "enable_wildcard"): Change(True),
    ("datasets", "captions", "shuffle_caption"): Change(False),
    ("datasets", "captions", "keep_tokens"): Change(2),
    ("datasets", "captions", "keep_tokens_separator"): Change("|||"),
    ("datasets", "captions", "token_warmup_min"): Change(3),
    ("datasets", "captions", "token_warmup_step"): Change(0),
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
    ("models", "dit"): refused("models/x.safetensors", ABOUT_WAN),
    ("models", "dit_high_noise"): refused("models/x.safetensors", ABOUT_WAN),
    ("models", "clip", "path"): refused("models/x.safetensors", ABOUT_WAN),
    ("models", "fp8_t5"): refused(True, ABOUT_WAN),
    ("models", "vae_cache_cpu"): refused(True, ABOUT_WAN),
    ("models", "encoder"): refused("musubi", ABOUT_WAN),
    ("models", "image_encoder", "path"): refused("models/x.safetensors", "musubi-tuner"),
    ("models", "latents_arguments"): refused(["--vae_tiling"], "musubi-tuner"),
    ("models", "text_arguments"): refused(["--fp8_vl"], "musubi-tuner"),
}
MACHINES: dict[Key, Change] = {
    ("batch", "items"): Change(2),
    ("batch", "minutes"): Change(1),
    ("cluster", "partition"): Change("gpu"),
    ("cluster", "account"): Change("lab"),
    ("musubi_tuner", "path"): Change("nowhere"),
    ("musubi_tuner", "batch_size"): Change(2),
    ("musubi_tuner", "num_workers"): Change(2),
    ("sd_scripts", "path"): Change("nowhere"),
    ("store", "keep"): Change("1 GB"),
    **{
        ("cluster", job, name): Change(value)
        for job in ("encode", "train")
        for name, value in {
            "partition": "gpu",
            "gpus": 2,
            "cpus": 3,
            "mem_mb": 900,
            "runtime": 9,
        }.items()
    },
    ("cluster", "train", "nodes"): Change(2),
}
PUBLICATION: dict[Key, Any] = {
    ("publish", "path"): "elsewhere",
    **{
        ("publish", "path_maps", name): lambda section, new={name: place}: section.update(
            {"linux": "/a", "windows": "A:/", "wsl": tempfile.gettempdir()} | new
        )
        for name, place in {"linux": "/b", "windows": "B:/", "wsl": "/"}.items()
    },
    ("publish", "caches"): False,
    ("publish", "attention"): "xformers",
    ("publish", "num_processes"): 2,
    ("publish", "batch_size"): 2,
    ("publish", "num_workers"): 3,
    ("publish", "powershell"): True,
    ("publish", "folder"): "{run}_{dataset}_{resolution}",
}
PROMPT: dict[Key, Change] = {("prompt",): nothing("a cat", "of generate_{run} alone")}
GENERATION: dict[Key, Change] = {
    ("runs", "generate", name): refused(value, "runs.tiny.generate: its trainer generates no clips")
    for name, value in {
        "prompts": ["a cat"],
        "negative_prompt": "blurred",
        "videos": 2,
        "frames": 5,
        "resolution": 32,
        "num_inference_steps": 2,
        "guidance_scale": 2.0,
        "flow_shift": 2.0,
        "scheduler": "euler",
        "seed": 1,
        "fps": 8,
        "image": "first.png",
        "base": False,
    }.items()
} | {
    ("runs", "generate", "prompt_file"): refused("gone.txt", "gone.txt cannot be read"),
}
EXPORT: dict[Key, Change] = {
    ("export", "folder"): nothing("elsewhere", "of export_{run} alone"),
    ("export", "resolution"): nothing(32, "of export_{run} alone"),
    ("export", "overwrite"): nothing(True, "of export_{run} alone"),
}
