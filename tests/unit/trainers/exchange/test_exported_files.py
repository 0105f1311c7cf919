"""Files that are exported for ai-training, and what cannot be exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from latentmake.base import digest
from latentmake.base.errors import CacheError, ConfigError
from latentmake.config.root import parse
from latentmake.data.memo import Memo
from latentmake.formats import cachefile
from latentmake.plan.facts import Facts
from latentmake.trainers.exchange.export import ExportOrder, export, plan_for
from order_world import silent
from safetensors.torch import load_file, save_file

LATENTS, T5, CLIP = ".img_sdxl", ".txt_t5cache", ".txt_clipl"
ORDER: dict[str, Any] = {"run": "cats", "manifest": "manifest.jsonl", "part": "16"}
ORDER |= {"overwrite": False}


pytestmark = pytest.mark.usefixtures("own_folder")


def test_t5_is_exported_in_bfloat16_and_clip_in_float32() -> None:
    stamp = cachefile.stamp(key="k", source="s", recipe={})
    states = {f"text_encoder{end}.hidden_state": torch.rand(3, 8) for end in ("", "_2")}
    Path("text.safetensors").write_bytes(cachefile.serialize(states, stamp))
    row: dict[str, Any] = {"dataset": "cats", "stem": "a", "source": "a.png"}
    row |= {"text": "text.safetensors", "latents": {"16": "a.safetensors"}}
    aside = {"dataset": "cats", "stem": "b", "source": "b.png", "aside": "is damaged"}
    rows = (json.dumps(each) for each in (row, aside))
    Path("manifest.jsonl").write_text("\n".join(rows))
    texts = [(T5, False), (CLIP, True)]
    order = ExportOrder(**ORDER, folder="out", ending=None, texts=texts)
    assert [*export(order, say=silent).values()] == [2]
    t5, clip = (load_file(f"out/cats/a{ending}")["emb"] for ending in (T5, CLIP))
    first, second = states.values()
    assert t5.dtype == torch.bfloat16 and t5.equal(first.to(torch.bfloat16))
    assert clip.dtype == torch.float32 and clip.equal(second)


def test_a_file_that_a_cache_was_taken_from_is_left_and_any_other_is_told() -> None:
    latents = {"latents": torch.rand(4, 2, 2)}
    save_file({"latent": latents["latents"]}, "a.img_sdxl")
    adopted = {cachefile.ADOPTED: digest.of_file(Path("a.img_sdxl"))}
    stamp = cachefile.stamp(key="k", source="s", recipe={})
    Path("a.safetensors").write_bytes(cachefile.serialize(latents, {**stamp, **adopted}))
    row = {"dataset": "cats", "stem": "a", "source": "a.png", "latents": {"16": "a.safetensors"}}
    Path("manifest.jsonl").write_text(json.dumps({**row, "text": None}))
    order = ExportOrder(**ORDER, folder=None, ending=LATENTS, texts=[])
    assert export(order, say=silent) == {"up to date": 1}
    save_file({"latent": latents["latents"] + 1}, "a.img_sdxl")
    with pytest.raises(CacheError, match="not of latentmake's making"):
        export(order, say=silent)


AI: dict[str, Any] = {"ai_training": {"text": T5}}
BOTH = {"ai_training": {"latents": LATENTS}}
HUB = {"text": [{"hub": "somebody/something", "revision": "1" * 40}]}
IMPOSSIBLE: list[tuple[str, dict[str, Any], object, str]] = [
    ("s3://bucket/cats", AI, None, "lies at a URL"),
    ("data", AI | HUB, None, "no config.json on this disk"),
    ("data", {"ai_training": None}, None, r"models\.tiny\.ai_training: this key is missing"),
    ("data", BOTH, None, r"^export\.resolution: .*has the resolutions 64, 96"),
    ("data", BOTH, 32, r"^export\.resolution: .*has no resolution 32"),
    ("data", BOTH, [96, 64], r"^export\.resolution: .*96x64"),
]


@pytest.mark.parametrize(("path", "model", "resolution", "words"), IMPOSSIBLE)
def test_what_cannot_be_exported_is_one_line(
    path: str, model: dict[str, Any], resolution: object, words: str
) -> None:
    Path("text").mkdir()
    Path("text/config.json").write_text('{"model_type": "t5", "d_model": 8}')
    sizes = [64, 96] if model is BOTH else 64
    config = parse(
        {
            "datasets": {"cats": {"path": path}},
            "models": {"tiny": {"vae": "vae", "text": "text", **model}},
            "runs": {"first": {"datasets": "cats", "model": "tiny", "resolutions": sizes}},
            "export": {"resolution": resolution},
        }
    )
    with pytest.raises(ConfigError, match=words) as caught:
        plan_for(Facts(config, Memo(None)), "first")
    assert "\n" not in str(caught.value)
