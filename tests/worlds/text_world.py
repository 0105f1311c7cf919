"""Text encoders of each architecture, of random weights, and what a plain reading makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import world
from demo.text import t5_tokenizer
from latentmake.config.models import Model
from latentmake.encode.encoders.text import TextEncoders, text_encoders
from safetensors.torch import load_file
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    T5Config,
    T5EncoderModel,
)

CPU = torch.device("cpu")
ROUNDING = {"rtol": 1e-4, "atol": 1e-4}
LAYERS, WIDTH, HEADS = 4, 16, 2
EXTRA = "<cat>"  # a token that SDXL's second tokenizer alone knows, with an id above that of EOS
FOLDERS = {
    "sd1": ("clip",),
    "sd2": ("open",),
    "sdxl": ("clip", "big"),
    "sd3": ("projecting", "big", "t5"),
    "flux": ("clip", "t5"),
}


def letters(number: int) -> str:
    """A caption of so many tokens: words of seven letters, each another one."""
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    text = "".join(alphabet[(index * 7 + index // 26) % 26] for index in range(number))
    return " ".join(text[start : start + 7] for start in range(0, number, 7))


def tokenizer_of(kind: str) -> Any:
    """CLIP's; `open` and `big` pad with "!", whose id is 0, and `big` has one token more."""
    tokenizer = world.make_tokenizer()
    if kind in ("open", "big"):
        tokenizer.pad_token = "!"
    if kind == "big":
        tokenizer.add_tokens([EXTRA])
    return tokenizer


def make_texts(root: Path) -> None:
    """Save each kind of encoder as `{kind}/text_encoder`, with its tokenizer beside it."""
    for seed, kind in enumerate(("clip", "open", "big", "projecting")):
        torch.manual_seed(seed)
        tokenizer = tokenizer_of(kind)
        tokenizer.save_pretrained(root / kind / "tokenizer")
        old = kind in ("big", "clip")  # as in the first release of these models
        config = CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=WIDTH,
            intermediate_size=32,
            projection_dim=12,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            max_position_embeddings=77,
            bos_token_id=0 if old else tokenizer.bos_token_id,
            eos_token_id=2 if old else tokenizer.eos_token_id,
            pad_token_id=1 if old else tokenizer.pad_token_id,
            initializer_factor=5.0,  # else a state hardly knows its neighbours
        )
        projects = kind in ("big", "projecting")
        network = (CLIPTextModelWithProjection if projects else CLIPTextModel)(config)
        for name, weight in network.named_parameters():
            if name.endswith("bias") or "norm" in name:
                torch.nn.init.normal_(weight, mean=float("norm" in name), std=0.3)
        network.save_pretrained(root / kind / "text_encoder")
    torch.manual_seed(9)
    t5 = t5_tokenizer([letters(40)])
    t5.save_pretrained(root / "t5" / "tokenizer")
    config = T5Config(
        vocab_size=len(t5), d_model=WIDTH, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    T5EncoderModel(config).save_pretrained(root / "t5" / "text_encoder")


def model_of(root: Path, architecture: str | None, **settings: Any) -> Model:
    """A model of an architecture."""
    kinds = settings.pop("kinds", FOLDERS[architecture or "sd1"])
    texts = [{"path": str(root / kind / "text_encoder")} for kind in kinds]
    for place in texts:
        if "/t5/" in place["path"] and "t5_length" in settings:
            place["max_length"] = settings["t5_length"]
    settings.pop("t5_length", None)
    return Model.model_validate(
        {"vae": "nowhere", "text": texts, "architecture": architecture, **settings}
    )


def encoders_of(root: Path, architecture: str | None, **settings: Any) -> TextEncoders:
    return text_encoders(model_of(root, architecture, **settings), CPU, torch.float32)


# -- a plain reading ------------------------------------------------------------------------------


class Read:
    """What CLIP makes of one row of tokens, step by step from its weights.

    Attributes:
        states: after each layer, the embeddings first, [tokens, width] each.
        last: the last of them, normalised.
    """

    def __init__(
        self, root: Path, kind: str, ids: Sequence[int], mask: Sequence[int] | None = None
    ) -> None:
        state = load_file(root / kind / "text_encoder" / "model.safetensors")
        self._state = {name.removeprefix("text_model."): each for name, each in state.items()}
        positions = self._state["embeddings.position_embedding.weight"][: len(ids)]
        states = self._state["embeddings.token_embedding.weight"][list(ids)] + positions
        seen = torch.tril(torch.ones(len(ids), len(ids))).bool()
        if mask is not None:
            seen &= torch.tensor(mask).bool()[None]
        self.states = [states]
        for layer in range(LAYERS):
            states = self._layer(f"encoder.layers.{layer}.", states, seen)
            self.states.append(states)
        self.last = self.normalised(states)

    def normalised(self, states: torch.Tensor, name: str = "final_layer_norm") -> torch.Tensor:
        weight, bias = self._state[f"{name}.weight"], self._state[f"{name}.bias"]
        return torch.nn.functional.layer_norm(states, states.shape[-1:], weight, bias)

    def projected(self, vector: torch.Tensor) -> torch.Tensor:
        return self._state["text_projection.weight"] @ vector

    def _linear(self, name: str, states: torch.Tensor) -> torch.Tensor:
        return states @ self._state[f"{name}.weight"].T + self._state[f"{name}.bias"]

    def _layer(self, name: str, states: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        normal = self.normalised(states, f"{name}layer_norm1")
        heads = [
            self._linear(f"{name}self_attn.{each}_proj", normal).reshape(len(states), HEADS, -1)
            for each in "qkv"
        ]
        query, key, value = (each.transpose(0, 1) for each in heads)
        scores = query @ key.transpose(1, 2) / (WIDTH // HEADS) ** 0.5
        weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        attended = (weights @ value).transpose(0, 1).reshape(len(states), -1)
        states = states + self._linear(f"{name}self_attn.out_proj", attended)
        inner = self._linear(f"{name}mlp.fc1", self.normalised(states, f"{name}layer_norm2"))
        return states + self._linear(f"{name}mlp.fc2", inner * torch.sigmoid(1.702 * inner))
