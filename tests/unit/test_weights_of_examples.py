"""The examples name weights that the downloads on the pages of the trainers fetch."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from huggingface_hub.cli.hf import app as hf

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "config/examples").glob("*.yaml"))
ELSEWHERE = ("models/stable-diffusion-xl-base-1.0/", "models/t5-v1_1-xxl", "models/vae-ft-mse/")
"""Places of weights that a comment of an example names."""
KEYS = ("vae", "text", "clip", "image_encoder", "unet", "dit", "dit_high_noise", "checkpoint")


class Download(NamedTuple):
    """A command that fetches files of a repository into a folder; no patterns for all of them."""

    folder: str
    patterns: tuple[str, ...]

    def fetches(self, place: str) -> bool:
        """Whether it fetches a file, or files of a folder."""
        name = place.removeprefix(f"{self.folder}/")
        if name == place:
            return place == self.folder and not self.patterns
        return not self.patterns or any(
            fnmatch(name, each) or each.startswith(f"{name}/") for each in self.patterns
        )


def downloads() -> Iterator[Download]:
    for page in sorted((ROOT / "docs/trainers").glob("*.md")):
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.S):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words[:2] == ["hf", "download"]:
                    yield download(words)


def download(words: list[str]) -> Download:
    """Read a command by the hub's own parser."""
    top = hf.make_context("hf", words[1:], resilient_parsing=True)
    _, command, rest = hf.resolve_command(top, words[1:])
    asked: dict[str, Any] = command.make_context("download", rest, parent=top).params
    return Download(asked["local_dir"], (*asked["filenames"], *(asked["include"] or ())))


def places(model: dict[str, Any]) -> Iterator[str]:
    """Yield each path of weights and tokenizers of a model."""
    for key in KEYS:
        found = model.get(key, [])
        for each in found if isinstance(found, list) else [found]:
            named = each if isinstance(each, dict) else {"path": each}
            yield from (named[part] for part in ("path", "tokenizer") if part in named)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_each_path_of_an_example_is_fetched_by_a_line_of_a_page(example: Path) -> None:
    known = [*downloads()]
    assert len(known) > 20
    for model in yaml.safe_load(example.read_text(encoding="utf-8"))["models"].values():
        for place in places(model):
            if place.startswith("models/") and not place.startswith(ELSEWHERE):
                assert any(each.fetches(place) for each in known), place


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_pages_that_an_example_names_are_there(example: Path) -> None:
    text = example.read_text(encoding="utf-8")
    named = re.findall(r"\bdocs/(?:trainers/)?[\w-]+\.md(?:#[\w-]+)?", text)
    for page, _, anchor in (each.partition("#") for each in named):
        titles = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(encoding="utf-8"), re.M)
        anchors = {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in titles}
        assert not anchor or anchor in anchors, f"{page}#{anchor}"
