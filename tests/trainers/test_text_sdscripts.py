"""Embeddings of layout sdscripts are those of sd-scripts' own code, whatever a caption contains.

sd-scripts reads captions by the released tokenizers, whatever lies beside a model.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import checkpoint_world
import numpy as np
import pytest
import tiny
import torch
from conftest import output_of, sources
from latentmake.config.models import Model
from latentmake.encode.encoders.sdscripts import text_arrays
from latentmake.encode.encoders.text import text_encoders
from safetensors.torch import load_file, save_file
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    T5Config,
    T5EncoderModel,
)

pytestmark = pytest.mark.real_trainer

CAPTIONS = (
    *("", " ", "a cat", "A CAT!", "!", "!! x!y | z|", "<s>a</s> <pad> <unk> <extra_id_0>"),
    *("a <|endoftext|> b", "<|startoftext|>a<|endoftext|>", "<tok> is a token", "!" * 90),
    *("e\u0301 é 日本 \U0001f600", "two\nlines\r\n and a\ttab", "a" * 73 + "!", "bc " * 90),
    *("x" * 148 + " !", "word! " * 60),
)
PADDED = "padded with !"  # as tokenizer_2 of diffusers' SDXL
FORMS = ("released", PADDED, "with further tokens", "only tokenizer.json")


def clip_tokenizer(folder: Path, form: str, second: bool) -> None:
    """Write CLIP's tokenizer as one of its copies has it."""
    tiny.write_tokenizer(folder, "clip")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    if second and form == PADDED:
        padded = json.dumps(config | {"pad_token": "!"})
        (folder / "tokenizer_config.json").write_text(padded)
    if form in ("with further tokens", "only tokenizer.json"):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.add_tokens(["<tok>", "!"][: 1 + second], special_tokens=True)
        tokenizer.save_pretrained(folder)
    if form == "only tokenizer.json":
        for file in folder.iterdir():
            if file.name != "tokenizer.json":
                file.unlink()


def clip(folder: Path, width: int, layers: int, *, projects: bool) -> list[str]:
    """Write a small CLIP; return its class and folder."""
    config = CLIPTextConfig(
        vocab_size=514,
        hidden_size=width,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        hidden_act="gelu" if width > 64 else "quick_gelu",
        projection_dim=width,
        bos_token_id=0,
        eos_token_id=2,
        initializer_factor=3.0,
    )
    kind = CLIPTextModelWithProjection if projects else CLIPTextModel
    kind(config).save_pretrained(folder)
    return [kind.__name__, str(folder)]


def t5(folder: Path) -> list[str]:
    config = T5Config(vocab_size=98, d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2)
    T5EncoderModel(config).save_pretrained(folder)
    return ["T5EncoderModel", str(folder)]


def networks_of(architecture: str, pipeline: Path) -> list[list[str]]:
    """Write an architecture's text encoders; return the class and folder of each."""
    torch.manual_seed(5)
    first, second, third = (pipeline / f"text_encoder{x}" for x in ("", "_2", "_3"))
    if architecture == "flux":
        return [clip(first, 64, 3, projects=False), t5(second)]
    # sd-scripts takes the eleventh of SDXL's first.
    layers = 12 if architecture == "sdxl" else 3
    found = [clip(first, 64, layers, projects=architecture == "sd3")]
    found.append(clip(second, 128, 3, projects=True))
    return found if architecture == "sdxl" else [*found, t5(third)]


def theirs(architecture: str, length: int, networks: list[list[str]], venv: Path) -> list[Any]:
    """Return the arrays of each caption by sd-scripts' code."""
    tokenizers = Path("released")
    for name in ("openai/clip-vit-large-patch14", "laion/CLIP-ViT-bigG-14-laion2B-39B-b160k"):
        tiny.write_tokenizer(tokenizers / name.replace("/", "_"), "clip")
    tiny.write_tokenizer(tokenizers / "google_t5-v1_1-xxl", "t5")
    folder = Path("theirs")
    folder.mkdir()
    job = {
        "module": architecture,
        "length": length,
        "tokenizers": str(tokenizers.absolute()),
        "networks": networks,
        "captions": CAPTIONS,
        "folder": str(folder.absolute()),
    }
    Path("job.json").write_text(json.dumps(job))
    script = Path(__file__).with_name("sdscripts_text.py")
    command = [venv / "bin/python", script, Path("job.json").absolute()]
    output_of(*command, cwd=sources("sd-scripts"))
    return [np.load(folder / f"{number}.npz") for number in range(len(CAPTIONS))]


def compare(model: Model, expected: list[Any]) -> None:
    encoders = text_encoders(model, torch.device("cpu"), torch.float32)
    for caption, arrays in zip(CAPTIONS, expected, strict=True):
        own = text_arrays(model, encoders.encode([caption])[0])
        assert own.keys() == {*arrays.files}
        for name in arrays.files:
            one, other = own[name], arrays[name]
            assert (one.shape, one.dtype) == (other.shape, other.dtype), name
            assert np.allclose(one, other, rtol=1e-4, atol=1e-4), (name, caption)


@pytest.mark.parametrize(
    ("architecture", "length"), [("sdxl", 75), ("sdxl", 225), ("sd3", 256), ("flux", 512)]
)
def test_special_tokens_in_captions_are_read_as_sd_scripts_does(
    architecture: str,
    length: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    forked_venv: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    pipeline = tmp_path / "pipe"
    networks = networks_of(architecture, pipeline)
    expected = theirs(architecture, length, networks, forked_venv)
    settings: dict[str, Any] = {"vae": "-", "architecture": architecture, "layout": "sdscripts"}
    texts: list[dict[str, Any]] = [{"path": path} for _, path in networks]
    if architecture == "sdxl":
        settings["max_token_length"] = length
    else:
        texts[-1]["max_length"] = length
        tokenizer = Path(texts[-1]["path"].replace("text_encoder", "tokenizer"))
        tiny.write_tokenizer(tokenizer, "t5")
    for form in FORMS:
        for number in range(sum(kind != "T5EncoderModel" for kind, _ in networks)):
            folder = pipeline / ("tokenizer_2" if number else "tokenizer")
            shutil.rmtree(folder, ignore_errors=True)
            clip_tokenizer(folder, form, second=number == 1)
        compare(Model.model_validate({**settings, "text": texts}), expected)
    if architecture == "sdxl":
        first, second = (load_file(f"{path}/model.safetensors") for _, path in networks)
        state = checkpoint_world.of_open_clip(second, "conditioner.embedders.1.model.")
        for name, value in first.items():
            name = "text_model." + name.removeprefix("text_model.")
            state[f"conditioner.embedders.0.transformer.{name}"] = value
        save_file({x: state[x].contiguous() for x in state}, "one.safetensors")
        clip_tokenizer(tmp_path / "tokenizer", PADDED, second=False)
        compare(Model.model_validate({**settings, "checkpoint": "one.safetensors"}), expected)
