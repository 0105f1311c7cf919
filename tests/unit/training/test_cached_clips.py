"""CachedClipDataset reads what the build wrote, and says where that has changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from latentmake.errors import CacheError
from latentmake.files import atomic, cachefile
from latentmake.training.loop.cached_clips import CachedClipDataset

STAMP = cachefile.stamp(key="k", source="s", recipe={})
LATENTS, TEXT = "cache/a_wan.safetensors", "cache/a_wan_te.safetensors"


@pytest.mark.parametrize("name", [LATENTS, TEXT])
def test_a_changed_byte_is_found_as_the_file_is_first_read(tmp_path: Path, name: str) -> None:
    values = torch.arange(16.0 * 4).reshape(16, 1, 2, 2)
    latents = {"latents_1x2x2_float32": values}
    atomic.write(tmp_path / LATENTS, cachefile.serialize(latents, STAMP))
    text = {"varlen_t5_bfloat16": torch.ones(3, 8, dtype=torch.bfloat16)}
    atomic.write(tmp_path / TEXT, cachefile.serialize(text, STAMP | {"caption1": "a cat"}))
    row = {"dataset": "cats", "stem": "a", "source": "a.png"}
    row |= {"latents": {"16": [LATENTS]}, "text": {"16": TEXT}}
    manifest = tmp_path / "runs/cats/manifest.jsonl"
    atomic.write(manifest, json.dumps(row).encode())
    for _ in range(2):
        item = CachedClipDataset(manifest)[0]
        assert torch.equal(item["latents"], values) and item["prompt"] == "a cat"
    data = bytearray((tmp_path / name).read_bytes())
    data[-5] ^= 4
    (tmp_path / name).write_bytes(data)
    with pytest.raises(CacheError, match="is damaged: checksum differs") as caught:
        CachedClipDataset(manifest)[0]
    assert str(caught.value).startswith(f"{tmp_path / name}: ")
