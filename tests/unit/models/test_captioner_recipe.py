"""Recipes of made captions: what counts, what does not, and messages about incomplete models."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from latentmake.base import digest
from latentmake.base.errors import ConfigError, ModelError
from latentmake.config.captioners import Captioner
from latentmake.models.captioner_recipe import make, network_of
from refusals import refused

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": '{"model_type": "qwen2_5_vl"}',
    "model.safetensors": "weights",
    "tokenizer.json": "{}",
    "tokenizer_config.json": "{}",
    "preprocessor_config.json": "{}",
    "chat_template.jinja": "{{ messages }}",
}
TAGGER = {
    "config.json": '{"architecture": "vit"}',
    "model.safetensors": "weights",
    "selected_tags.csv": "name,category",
}


def folder(place: str, files: dict[str, str]) -> Path:
    Path(place).mkdir(parents=True)
    for name, text in files.items():
        Path(place, name).write_text(text)
    return Path(place)


def recipe(model: Any = "net", *, clips: bool = True, **keys: Any) -> dict[str, object]:
    settings = Captioner.model_validate({"model": model, **keys})
    return make(settings, digest.of_file, "captioners.it", clips=clips)


def line(kind: type[ConfigError | ModelError] = ModelError, **keys: Any) -> str:
    return refused(lambda: recipe(**keys), kind=kind)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    folder("net", FILES)
    folder("tagger", TAGGER)


def test_another_place_and_name_give_the_same_recipe() -> None:
    shutil.copytree("net", "other/name")
    shutil.copytree("net", f"hub/models--some--model/snapshots/{COMMIT}")
    hub = {"hub": "some/model", "revision": COMMIT}
    assert recipe() == recipe("other/name") == recipe(hub)
    shutil.copytree("tagger", "again")
    Path("again/model.safetensors").rename("again/wd.safetensors")
    assert recipe("tagger") == recipe("again/wd.safetensors")
    assert "net" not in json.dumps(recipe("net")).replace("network", "")


@pytest.mark.parametrize("name", [*FILES, "generation_config.json", "merges.txt"])
def test_a_file_that_the_model_reads_counts(name: str) -> None:
    before = recipe()
    path = Path("net", name)
    path.write_text('{"model_type": "qwen2_5_vl", "a": 1}')
    assert recipe() != before


def test_other_files_and_post_processing_do_not_count() -> None:
    before = recipe()
    Path("net/README.md").write_text("read me")
    Path("net/code.py").write_text("1")
    after = {"trigger": "sks", "prefix": "a", "replace": {"a": "b"}, "drop": ["a"], "max_words": 3}
    assert recipe(**after) == before


@pytest.mark.parametrize(
    "keys",
    [
        {"prompt": "What is it?"},
        {"dtype": "float16"},
        {"quantization": "4bit"},
        {"max_new_tokens": 9},
        {"temperature": 0.5},
        {"image_size": 512},
        {"frames": 3},
        {"trust_remote_code": True},
    ],
)
def test_a_setting_of_the_answer_counts(keys: dict[str, Any]) -> None:
    assert recipe(**keys) != recipe()


def test_a_seed_counts_with_a_temperature_and_code_if_it_is_trusted() -> None:
    assert recipe(seed=2) == recipe()
    assert recipe(seed=2, temperature=0.5) != recipe(temperature=0.5)
    before = recipe(trust_remote_code=True)
    Path("net/code.py").write_text("1")
    assert recipe(trust_remote_code=True) != before
    assert recipe(clips=False, frames=3) == recipe(clips=False)


@pytest.mark.parametrize(
    ("kind", "prompt"),
    [("florence2", "<CAPTION>"), ("blip", None), ("paligemma", "caption en")],
)
def test_a_default_prompt_is_a_prompt(kind: str, prompt: str | None) -> None:
    Path("net/chat_template.jinja").unlink()
    Path("net/config.json").write_text(json.dumps({"model_type": kind}))
    assert recipe()["network"] == "task"
    assert recipe() == recipe(prompt=prompt)
    assert recipe()["prompt"] == prompt


def test_a_chat_template_may_lie_in_three_files() -> None:
    assert recipe()["network"] == "chat"
    for name in ("tokenizer_config.json", "processor_config.json", "chat_template.json"):
        for other in ("chat_template.jinja", "chat_template.json", "processor_config.json"):
            Path("net", other).unlink(missing_ok=True)
        Path("net/tokenizer_config.json").write_text("{}")
        assert recipe()["network"] == "task"
        Path("net", name).write_text('{"chat_template": "{{ messages }}"}')
        assert recipe()["network"] == "chat"
    Path("net/chat_template.json").unlink()
    Path("net/tokenizer_config.json").write_text("{")
    assert "captioners.it.model: net/tokenizer_config.json: cannot be read" in line()


def test_the_tags_of_a_tagger_count_in_any_order() -> None:
    before = recipe("tagger")
    assert recipe("tagger", thresholds={"general": 0.5}) != before
    assert recipe("tagger", underscores=True) != before
    assert recipe("tagger", exclude=["b", "a"]) == recipe("tagger", exclude=["a", "b", "a"])
    Path("tagger/selected_tags.csv").write_text("name,category,count")
    assert recipe("tagger") != before
    assert network_of(Captioner.model_validate({"model": "tagger"})).kind == "tagger"


def test_a_key_without_an_effect_is_refused() -> None:
    said = line(ConfigError, model="tagger", prompt="a")
    assert "captioners.it.prompt: has no effect with a tagger" in said
    assert "captioners.it.underscores: is for taggers" in line(ConfigError, underscores=True)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["model.safetensors"], "holds no weights"),
        (["config.json"], "has no config.json"),
        (["tokenizer.json"], "has no tokenizer.json or vocab.json"),
        (["preprocessor_config.json"], "has no preprocessor_config.json or processor_config.json"),
    ],
)
def test_an_incomplete_model_is_named(files: list[str], words: str) -> None:
    for name in files:
        Path("net", name).unlink()
    said = line()
    assert said.startswith("captioners.it.model: net: this model folder") and words in said


def test_a_missing_model_has_the_line_that_fetches_it() -> None:
    hub = {"hub": "some/model", "revision": COMMIT}
    assert f"run `hf download some/model --revision {COMMIT}`" in line(model=hub)
    said = line(model="some/model")
    assert "run `hf download some/model --local-dir models/model`" in said


def test_another_model_is_no_captioner() -> None:
    folder("vae", {"config.json": '{"_class_name": "AutoencoderKL"}', "model.safetensors": "w"})
    assert "is no vision-language model, and no tagger" in line(model="vae")
    assert "name its folder" in line(model="net/model.safetensors")
    Path("net/config.json").unlink()
    assert "no config.json beside these weights" in line(model="net/model.safetensors")


def test_planning_needs_no_torch() -> None:
    code = "import sys, latentmake.models.captioner_recipe; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
