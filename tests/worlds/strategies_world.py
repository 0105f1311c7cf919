"""An sd-scripts whose classes for Lumina go wrong as they are told, and a project for it.

Only what its own classes do not do at will: they fail at one item, die, write other arrays. Names
of modules, classes and arguments are those of its library/strategy_lumina.py and lumina_util.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import world
from latentmake import backends
from latentmake.config.root import parse
from latentmake.data.memo import Memo
from latentmake.plan.facts import Facts
from latentmake.plan.orders import Order
from latentmake.plan.planner import make_plan
from latentmake.plan.run_plan import Plan
from order_world import carry_out
from safetensors.torch import save_file

STEMS = ("ant", "bee", "cat", "dog", "eel", "fox")
FILES = {
    "lumina_train_network.py": "import library.strategy_lumina\n",
    "library/__init__.py": "",
    "library/unrelated.py": "",
    "library/device.py": "",
    "library/train_util.py": """
import library.device
HIGH_VRAM = False

def clean_memory_on_device(device):
    pass

class ImageInfo:
    def __init__(self, key, repeats, caption, is_reg, path):
        self.key, self.caption, self.path = key, caption, path
""",
    "library/lumina_util.py": """
import json, os, sys
import torch

def moods():
    with open(os.path.join(os.path.dirname(__file__), "moods.json")) as file:
        return json.load(file)

def loaded(path, dtype, device):
    with open(os.path.join(os.path.dirname(__file__), "loads"), "a") as file:
        file.write(f"{os.path.basename(path)} {dtype} {' '.join(sys.argv[:1])}\\n")
    return torch.nn.Linear(1, 1).to(dtype)

def load_ae(ckpt_path, dtype, device):
    return loaded(ckpt_path, dtype, device)

def load_gemma2(ckpt_path, dtype, device):
    return loaded(ckpt_path, dtype, device)
""",
    "library/strategy_lumina.py": """
import os
import numpy as np
import torch
from library import train_util
from library.lumina_util import moods

class LuminaLatentsCachingStrategy:
    def __init__(self, to_disk, batch_size, skip):
        assert (to_disk, batch_size, skip) == (True, 1, False)

    def cache_batch_latents(self, network, batch, flip, alpha, random_crop):
        (info,) = batch
        mood = moods().get(os.path.splitext(os.path.basename(info.path))[0])
        width, height = info.bucket_reso
        size = f"_{height // 8}x{width // 8}"
        values = torch.randn(16, height // 8, width // 8).numpy()
        wanted = moods()
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls in range(*wanted.get("crowded", [0])):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if mood == "raise":
            raise RuntimeError("Kernel size can't be greater than actual input size")
        if mood == "nothing":
            return
        if mood == "nan":
            values[0, 0, 0] = np.nan
        arrays = {
            f"latents{size}": values,
            f"original_size{size}": np.array(info.image_size),
            f"crop_ltrb{size}": np.array([0.0, 1.0, 2.0, 3.0]),
        }
        if mood == "other":
            del arrays[f"crop_ltrb{size}"]
        np.savez(info.latents_npz, **arrays)

class LuminaTokenizeStrategy:
    def __init__(self, system_prompt, max_length, tokenizer_cache_dir=None):
        self.length, self.prompt = max_length or 8, system_prompt

class LuminaTextEncodingStrategy:
    pass

class LuminaTextEncoderOutputsCachingStrategy:
    def __init__(self, to_disk, batch_size, skip, is_partial):
        assert (to_disk, batch_size, skip, is_partial) == (True, 1, False, False)

    def cache_batch_outputs(self, tokenizer, networks, encoding, batch):
        (info,) = batch
        empty = not info.caption
        state = np.zeros if empty or moods().get(info.caption) == "zeros" else np.ones
        np.savez(
            info.text_encoder_outputs_npz,
            hidden_state=state((tokenizer.length, 4), np.float32),
            attention_mask=np.zeros(tokenizer.length, np.int64),
            input_ids=np.array([len(tokenizer.prompt), *range(tokenizer.length - 1)]),
        )
""",
}


def install(folder: Path, **moods: Any) -> Path:
    """Write the folder of an sd-scripts; `moods` are stem or caption -> what goes wrong with it."""
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    set_moods(folder, **moods)
    return folder


def set_moods(folder: Path, **moods: Any) -> None:
    """Say what goes wrong from now on."""
    (folder / "library/moods.json").write_text(json.dumps(moods))


def loads(folder: Path) -> list[str]:
    """Return a line for each network that was loaded, and forget them."""
    place = folder / "library/loads"
    found = place.read_text().splitlines() if place.exists() else []
    place.unlink(missing_ok=True)
    return found


def make(**model: Any) -> dict[str, Any]:
    """Make six pictures and an sd-scripts in the working directory; return a configuration."""
    install(Path("sd-scripts"))
    for number, stem in enumerate(STEMS):
        world.draw(Path(f"data/{stem}.png"), number, (80, 64))
        Path(f"data/{stem}.txt").write_text(f"a {stem}")
    Path("models").mkdir(exist_ok=True)
    for name, tensor in (
        ("ae", "encoder.down.3.block.0.conv1.weight"),
        ("gemma", "model.layers.0.post_feedforward_layernorm.weight"),
        ("dit", "cap_embedder.0.weight"),
    ):
        save_file({tensor: torch.ones(2)}, f"models/{name}.safetensors")
    return config(**model)


def config(resolution: int = 64, **model: Any) -> dict[str, Any]:
    """Return a configuration of a run over all of them; `model` are further keys of its model."""
    values = {
        "architecture": "lumina",
        "vae": "models/ae.safetensors",
        "text": "models/gemma.safetensors",
        "checkpoint": "models/dit.safetensors",
        **model,
    }
    return {
        "datasets": {"shapes": {"path": "data"}},
        "models": {"tiny": values},
        "runs": {"tiny": {"datasets": ["shapes"], "model": "tiny", "resolutions": [resolution]}},
        "sd_scripts": {"path": "sd-scripts"},
    }


def facts(values: dict[str, Any]) -> Facts:
    """Return facts for a plan by what is on the disk alone."""
    Path(".latentmake/memo.sqlite").unlink(missing_ok=True)
    memo = Memo(Path(".latentmake/memo.sqlite"))
    return Facts(parse(values), memo, program_digest=backends.program_digest)


def plan(values: dict[str, Any]) -> Plan:
    """Plan the run."""
    return make_plan(facts(values), ["tiny"])


def encode(order: Order, said: list[str] | None = None) -> Any:
    """Carry out an order; return its receipt."""
    say = (said if said is not None else []).append
    return carry_out(order, say=say, encoder=backends.encoder_of(order))


def repaint(path: Path) -> None:
    """Paint another picture of the same size."""
    world.draw(path, 77, (80, 64))
