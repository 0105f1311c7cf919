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


def test_t5_is_exported_in_bfloat16_and_clip_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stamp = cachefile.stamp(key="k", source="s", recipe={})
    states = {f"text_encoder{end}.hidden_state": torch.rand(3, 8) for end in ("", "_2")}
    Path("text.safetensors").write_bytes(cachefile.serialize(states, stamp))
    row: dict[str, Any] = {
        "dataset": "cats",
        "stem": "a",
        "source": "a.png",
        "text": "text.safetensors",
    }
    row |= {"latents": {"16": "a.safetensors"}}
    aside = {"dataset": "cats", "stem": "b", "source": "b.png", "aside": "is damaged"}
    rows = (json.dumps(each) for each in (row, aside))
    Path("manifest.jsonl").write_text("\n".join(rows))
    order = ExportOrder(
        run="cats",
        manifest="manifest.jsonl",
        folder="out",
        part="16",
        ending=None,
        texts=[(T5, False), (CLIP, True)],
        overwrite=False,
    )
    assert [*export(order, say=silent).values()] == [2]
    t5, clip = (load_file(f"out/cats/a{ending}")["emb"] for ending in (T5, CLIP))
    first, second = states.values()
    assert t5.dtype == torch.bfloat16 and t5.equal(first.to(torch.bfloat16))
    assert clip.dtype == torch.float32 and clip.equal(second)


def test_a_file_that_a_cache_was_taken_from_is_left_and_any_other_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    latents = {"latents": torch.rand(4, 2, 2)}
    save_file({"latent": latents["latents"]}, "a.img_sdxl")
    adopted = {cachefile.ADOPTED: digest.of_file(Path("a.img_sdxl"))}
    stamp = cachefile.stamp(key="k", source="s", recipe={})
    Path("a.safetensors").write_bytes(cachefile.serialize(latents, {**stamp, **adopted}))
    row = {"dataset": "cats", "stem": "a", "source": "a.png", "latents": {"16": "a.safetensors"}}
    Path("manifest.jsonl").write_text(json.dumps({**row, "text": None}))
    values: dict[str, Any] = {"run": "cats", "manifest": "manifest.jsonl", "folder": None}
    values |= {"part": "16", "ending": LATENTS, "texts": [], "overwrite": False}
    assert export(ExportOrder(**values), say=silent) == {"up to date": 1}
    save_file({"latent": latents["latents"] + 1}, "a.img_sdxl")
    with pytest.raises(CacheError, match="not of latentmake's making"):
        export(ExportOrder(**values), say=silent)


IMPOSSIBLE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "URL": ({"path": "s3://bucket/cats"}, {}, "lies at a URL"),
    "hub": (
        {},
        {"text": [{"hub": "somebody/something", "revision": "1" * 40}]},
        "no config.json on this disk",
    ),
    "nothing named": ({}, {"ai_training": None}, "models.tiny.ai_training: this key is missing"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_cannot_be_exported_is_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dataset, model, words = IMPOSSIBLE[name]
    Path("text").mkdir()
    Path("text/config.json").write_text('{"model_type": "t5", "d_model": 8}')
    config = parse(
        {
            "datasets": {"cats": {"path": "data", **dataset}},
            "models": {
                "tiny": {"vae": "vae", "text": "text", "ai_training": {"text": T5}, **model}
            },
            "runs": {"first": {"datasets": "cats", "model": "tiny", "resolutions": 64}},
        }
    )
    with pytest.raises(ConfigError, match=words) as caught:
        plan_for(Facts(config, Memo(None)), "first")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "words"),
    [(None, "has the resolutions 64, 96"), (32, "has no resolution 32"), ([96, 64], "96x64")],
)
def test_an_export_is_of_one_of_the_resolutions_of_its_run(asked: object, words: str) -> None:
    config = parse(
        {
            "datasets": {"cats": {"path": "data"}},
            "models": {"tiny": {"vae": "vae", "text": "text", "ai_training": {"latents": LATENTS}}},
            "runs": {"first": {"datasets": "cats", "model": "tiny", "resolutions": [64, 96]}},
            "export": {"resolution": asked},
        }
    )
    with pytest.raises(ConfigError, match=words) as caught:
        plan_for(Facts(config, Memo(None)), "first")
    assert str(caught.value).startswith("export.resolution: ")
