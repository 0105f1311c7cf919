"""Guides of the documentation, each with the world that its commands are run in.

`GUIDES` is the table. To add a guide is to add a line, and a function for a world that is new: it
lays pictures, videos or whatever else the guide assumes into the folder of a project.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import captioner_world
import named_weights
import preloaded
import pytest
import style_guides
import trainer_guides
import yaml
from guide_page import Block, blocks_of, commands_of, difference, shell_lines
from huggingface_hub.cli.hf import app as hf
from huggingface_hub.utils import filter_repo_objects
from latentmake.config.root import parse
from project import ROOT, Project
from video_world import write_video

_SHOWN_ONLY = (
    *("aws", "cd", "curl", "echo", "export", "git", "hf", "mkdir", "module", "nvidia-smi", "pip"),
    *("python3", "rsync", "scp", "snakemake", "snkmt", "source", "ssh", "tensorboard", "tmux"),
    *("uv", "watch", "wget", ".venv/bin/pip", "apt-get", "deactivate", "sudo"),
)
"""First words of commands in bash blocks, which are shown and not run."""


def _not_made(name: str, make: Callable[[Path], None]) -> Path:
    raise NotImplementedError(f"no {name} here: give `made`")


@dataclass
class Here:
    """A folder that a guide is followed in, and what handles the commands that cannot be run.

    Attributes:
        project: the copy of the project.
        hub: id of a repository on the hub -> function that writes its files, tiny, into a folder.
        handlers: the first words of a shown command -> function that does what it would have done.
        environment: variables of each command.
        paths: further folders for PYTHONPATH.
        made: makes a folder of a name once for all tests, by a function.
    """

    project: Project
    hub: Mapping[str, Callable[[Path], object]]
    handlers: dict[str, Callable[[list[str]], None]] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    paths: list[str] = field(default_factory=list)
    made: Callable[[str, Callable[[Path], None]], Path] = field(default=_not_made)


class Guide(NamedTuple):
    """How a guide is tested.

    Attributes:
        lay: lays what the guide assumes.
        needs: "trainers" for real trainers (tests/trainers/test_guides_real.py), "slurm" for a
            cluster (tests/slurm/test_guides_slurm.py), nothing for tests/workflow/test_guides.py.
        shrink: text in blocks -> shorter work in its place, such as "2000": "20".
    """

    lay: Callable[[Here], None]
    needs: str = ""
    shrink: Mapping[str, str] = {}


# -- worlds ---------------------------------------------------------------------------------------


def videos(here: Here) -> None:
    """Four films with captions, in `films`."""
    folder = here.project / "films"
    folder.mkdir()
    for number, name in enumerate(("harbour", "market", "station", "street")):
        write_video(folder / f"{name}.mp4", "libx264", 40 + number, size=(192, 112))
        (folder / f"{name}.txt").write_text(f"a {name} in the rain\n", encoding="utf-8")


def figures(here: Here) -> None:
    """The figures, the captioner and the Stable Diffusion of a sample."""
    for name in ("figures", "tiny-captioner", "tiny-sd"):
        shutil.copytree(ROOT / "data" / name, here.project / "data" / name)


def sample(here: Here) -> None:
    """The data and the configuration of the sample, with a training and drawings of few steps."""
    for part in ("data", "config"):
        subprocess.run(["cp", "-r", ROOT / part, here.project.folder], check=True)
    file = here.project / "config/config.yaml"
    text = file.read_text(encoding="utf-8")
    for old, new in (("steps: 300", "steps: 4"), ("{guid", "{num_inference_steps: 1, guid")):
        assert old in text
        text = text.replace(old, new)
    file.write_text(text, encoding="utf-8")


def sample_with_losses(here: Here) -> None:
    """The same, whose losses are those that its page shows."""
    sample(here)
    here.environment[preloaded.PROBES] = "64"


def front(here: Here) -> None:
    """The short sample, trained; beside it 30 pictures and a Stable Diffusion 1.5."""
    sample(here)
    here.project.run("train_michael_gove", "--cores", "1")
    style_guides.pictures(here)
    style_guides.make_repository(here.project / "models/sd15")


# -- tiny weights ---------------------------------------------------------------------------------


def make_wan(folder: Path) -> None:
    """Write the files of Wan 2.1's repository for diffusers: those of the sample's small Wan."""
    subprocess.run(["cp", "-r", f"{ROOT / 'data/tiny-wan'}/.", folder], check=True)


def make_flux(folder: Path) -> None:
    """Write the files of FLUX.1 dev and of its text encoders by their names, without weights."""
    named_weights.MODELS["flux"](folder, ROOT / "data/tiny-sd/tokenizer")


HUB: dict[str, Callable[[Path], object]] = {
    "florence-community/Florence-2-base-ft": captioner_world.florence,
    "stable-diffusion-v1-5/stable-diffusion-v1-5": style_guides.make_repository,
    "stabilityai/sd-vae-ft-mse": style_guides.make_other_vae,
    "stabilityai/stable-diffusion-xl-base-1.0": trainer_guides.sdxl,
    "black-forest-labs/FLUX.1-dev": make_flux,
    "comfyanonymous/flux_text_encoders": make_flux,
    "Wan-AI/Wan2.1-T2V-1.3B": trainer_guides.wan21,
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": make_wan,
    "Comfy-Org/Wan_2.1_ComfyUI_repackaged": trainer_guides.wan21_dit,
}
"""Repository -> function that writes its files, tiny, into a folder."""

TRAINERS_HUB: dict[str, Callable[..., None]] = {
    "Tongyi-MAI/Z-Image": trainer_guides.z_image,
}
"""The same for weights that trainers' code writes: the function is also given `tiny`, which returns
the folder of a family's weights (`WEIGHTS` in tests/trainers/tiny).
"""


# -- the table ------------------------------------------------------------------------------------

GUIDES: dict[str, Guide] = {
    "../README.md": Guide(front),
    "guides/captioners.md": Guide(figures),
    "guides/captions.md": Guide(style_guides.built),
    "guides/disk.md": Guide(style_guides.trained, shrink=style_guides.SMALL),
    "guides/gpus.md": Guide(style_guides.built),
    "guides/install-trainers.md": Guide(trainer_guides.installed_trainers, "trainers"),
    "guides/kohya.md": Guide(trainer_guides.kohya, shrink=trainer_guides.SMALL_FILES),
    "guides/machine.md": Guide(style_guides.carried, shrink=style_guides.SMALL),
    "guides/memory.md": Guide(style_guides.trained),
    "guides/model.md": Guide(style_guides.built),
    "guides/musubi-tuner.md": Guide(trainer_guides.musubi, "trainers", trainer_guides.SMALL),
    "guides/results.md": Guide(style_guides.trained, shrink=style_guides.SHORT),
    "guides/s3.md": Guide(lambda here: None, "s3", {"[512]": "[128]"}),
    "guides/slurm.md": Guide(trainer_guides.slurm, "slurm", trainer_guides.SMALL_JOBS),
    "guides/style.md": Guide(style_guides.pictures, shrink=style_guides.SHORT_STYLE),
    "guides/verify.md": Guide(style_guides.built),
    "guides/watch.md": Guide(style_guides.built),
    "guides/wan.md": Guide(trainer_guides.wan, shrink=trainer_guides.SHORT_CLIPS),
    "questions.md": Guide(style_guides.trained),
    "sample.md": Guide(
        sample_with_losses,
        shrink={"snakemake --cores 2": "snakemake -n --cores 2", "end: 0.1...,": "end: ...,"},
    ),
    "trainers/sd.md": Guide(
        style_guides.pictures,
        shrink={"resolutions: [512]": "resolutions: [64]", "steps: 2000": "steps: 4"},
    ),
    "trainers/wan.md": Guide(
        videos,
        shrink={
            "target_frames: 81": "target_frames: 17",
            "[[832, 480]]": "[[96, 64]]",
            "epochs: 10}": "epochs: 1}\n    generate: {num_inference_steps: 2}",
        },
    ),
}
"""Page in docs -> how it is tested."""


# -- running --------------------------------------------------------------------------------------


def follow(name: str, here: Here) -> None:
    """Lay a guide's world, run its blocks in their order, and compare what they print.

    Fails with page, line, command and difference of each command that prints otherwise than the
    page says. `pytest -n 0 -s` shows all that was printed, to be copied into a page.
    """
    page, guide = ROOT / "docs" / name, GUIDES[name]
    text = page.read_text(encoding="utf-8")
    for old in guide.shrink:
        if old not in text:
            pytest.fail(f"{page.name} lacks `{old}`, which its test makes smaller", pytrace=False)
    guide.lay(here)
    names = page.relative_to(ROOT)
    wrong: list[str] = []
    for block in blocks_of(page, guide.shrink):
        if block.title:
            target = here.project / block.title
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(block.text, encoding="utf-8")
        if block.language in ("yaml", "yml"):
            _check_yaml(names, block)
        elif block.language == "console" and not block.title:
            for command in commands_of(block):
                done = _run(command.text, here)
                _shrink_written(here, guide.shrink)
                print(f"\n$ {command.text}\n{done.stdout}")
                place = f"{names}:{command.line}: $ {command.text}"
                if differs := difference(command.output, done.stdout):
                    wrong.append(f"{place}\n{differs}")
                if done.returncode != command.status:
                    wrong.append(f"{place}\n  ended with {done.returncode}:\n{done.stdout}")
                    pytest.fail("\n".join(wrong), pytrace=False)
        elif block.language == "bash" and not block.title:
            _show(names, block, here)
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)


def _run(command: str, here: Here) -> subprocess.CompletedProcess[str]:
    folder = here.project.folder
    programs = folder / ".programs"
    if not programs.exists():
        programs.mkdir()
        for name in ("snakemake", "latentmake"):
            program = programs / name
            program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {name} "$@"\n')
            program.chmod(0o755)
    preload = preloaded.environment() if here.project.preloads else {}
    paths = [preload.get("PYTHONPATH"), os.fspath(folder / "scripts"), *here.paths]
    values = {
        **here.project.environment(),
        **preload,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PATH": os.pathsep.join([os.fspath(programs), os.environ["PATH"]]),
        "BROWSER": "true",
        "COLUMNS": "110",
        **here.environment,
    }
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=folder,
        env=values,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=900,
        check=False,
    )


def _shrink_written(here: Here, shrink: Mapping[str, str]) -> None:
    """Make work shorter in configurations too that a command wrote."""
    for path in here.project.folder.glob("*.yaml") if shrink else ():
        text = path.read_text(encoding="utf-8")
        for old, new in shrink.items():
            text = text.replace(old, new)
        if text != path.read_text(encoding="utf-8"):
            path.write_text(text, encoding="utf-8")


def _check_yaml(page: Path, block: Block) -> None:
    values = yaml.safe_load(block.text)
    assert values is not None, f"{page}:{block.line}: the block is empty"
    if isinstance(values, dict) and {"datasets", "models", "runs"} <= values.keys():
        parse(values)


def _show(page: Path, block: Block, here: Here) -> None:
    """Check a block that is not run; do what its downloads would have done."""
    done = subprocess.run(
        ["bash", "-n"], input=block.text, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{page}:{block.line}: {done.stderr}"
    for line, text in shell_lines(block):
        for words in _commands_in(text):
            place = f"{page}:{line}: {text}"
            assert words[0] in _SHOWN_ONLY, f"{place}\n`{words[0]}` is not in _SHOWN_ONLY"
            if words[:2] == ["hf", "download"]:
                _download(place, words, here)
            for begin, handle in here.handlers.items():
                if words[: len(begin.split())] == begin.split():
                    handle(words)


def _commands_in(text: str) -> Iterator[list[str]]:
    """Yield the words of each command of a line, without variables set for it."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word and set(word) <= set("();<>|&"):
            if words:
                yield words
            words = []
        elif words or "=" not in word:
            words.append(word)


def _download(place: str, words: list[str], here: Here) -> None:
    """Check a download by the hub's own parser, and lay what it would have fetched, tiny."""
    try:
        top = hf.make_context("hf", words[1:], resilient_parsing=True)
        _, command, rest = hf.resolve_command(top, words[1:])
        asked: dict[str, Any] = command.make_context("download", rest, parent=top).params
    except Exception as error:
        raise AssertionError(f"{place}\n{error}") from error
    assert asked["repo_id"] in here.hub, f"{place}\nno tiny weights of it: see HUB"
    assert asked["local_dir"], f"{place}\nname the folder by --local-dir"
    made = here.project.folder / ".hub" / asked["repo_id"].replace("/", "--")
    if not made.exists():
        made.mkdir(parents=True)
        here.hub[asked["repo_id"]](made)
    there = sorted(str(path.relative_to(made)) for path in made.rglob("*") if path.is_file())
    wanted = [f"{name}*" if name.endswith("/") else name for name in asked["filenames"]]
    for each in (*wanted, *(asked["include"] or ())):
        fits = [*filter_repo_objects(there, allow_patterns=each)]
        assert fits, f"{place}\n`{each}` fits no file: {', '.join(there)}"
    patterns = wanted or asked["include"] or None
    ignored = asked["exclude"] or None
    for name in filter_repo_objects(there, allow_patterns=patterns, ignore_patterns=ignored):
        target = here.project / asked["local_dir"] / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((made / name).read_bytes())


def guides_that_need(what: str) -> list[str]:
    """Return the pages that need something."""
    return [name for name, guide in GUIDES.items() if guide.needs == what]
