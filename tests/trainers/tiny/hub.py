"""Tiny tokenizers, written as files of a repository on the hub."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def write_json(path: Path, content: Any) -> None:
    """Write a file of JSON, and the folders that it lies in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def byte_tokenizer(folder: Path, specials: Sequence[str], **settings: Any) -> Mapping[str, int]:
    """Write a tokenizer of 256 bytes, followed by special tokens; return the ids of those.

    Args:
        folder: where its files go.
        specials: the tokens 256, 257, ...
        settings: of tokenizer_config.json, `tokenizer_class` among them.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    ids = {token: len(alphabet) + number for number, token in enumerate(specials)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in specials])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "vocab.json", vocabulary)
    (folder / "merges.txt").write_text("#version: 0.2\n")
    write_json(
        folder / "tokenizer_config.json",
        {
            "added_tokens_decoder": {
                str(number): {
                    "content": token,
                    "special": True,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "single_word": False,
                }
                for token, number in ids.items()
            },
            **settings,
        },
    )
    return ids


def shrunk(config: Mapping[str, Any], small: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with the values of some keys replaced, at every depth."""
    return {
        key: shrunk(value, small) if isinstance(value, Mapping) else small.get(key, value)
        for key, value in config.items()
    }


class _FoundError(Exception):
    pass


def settings_of(module: Any, name: str, load: Callable[[], object]) -> dict[str, Any]:
    """Return the arguments with which a function makes an object of a class of its module."""
    made = getattr(module, name)

    def stop(*_: object, **settings: Any) -> None:
        raise _FoundError(settings)

    setattr(module, name, stop)
    try:
        load()
    except _FoundError as found:
        return dict(found.args[0])
    finally:
        setattr(module, name, made)
    raise AssertionError(f"{name} is not made")


def write_random(
    model: Any,
    path: Path,
    rename: Callable[[str], str] = str,
    dtype: Any = None,
    seed: int = 0,
    **metadata: str,
) -> None:
    """Write small random weights of a network as safetensors, under names of one's own choice."""
    import torch
    from safetensors.torch import save_file

    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, value in model.state_dict().items():
        if value.dtype.is_floating_point:
            near = float(value.ndim == 1 and name.endswith(("weight", "running_var")))
            scale = 0.1 if value.ndim < 2 else value[0].numel() ** -0.5
            value = near + scale * torch.randn(value.shape, generator=random)
            value = value.to(dtype or torch.float32)
        tensors[rename(name)] = value.contiguous()
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata={"format": "pt", **metadata})


def letter_tokenizer(folder: Path, specials: Sequence[str], **settings: Any) -> None:
    """Write a Unigram tokenizer of single letters, as T5's: first its special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    letters = ["▁", *map(chr, range(33, 127))]
    vocabulary = [(token, 0.0) for token in specials] + [(each, -3.0) for each in letters]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=specials.index("<unk>")))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", specials.index("</s>"))]
    )
    tokenizer.add_special_tokens(list(specials))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", settings)


def clip_tokenizer(folder: Path) -> None:
    """Write a CLIP tokenizer of single letters: 512 of them and two special tokens."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    names = [*letters, *(f"{each}</w>" for each in letters), "<|startoftext|>", "<|endoftext|>"]
    write_json(folder / "vocab.json", {name: number for number, name in enumerate(names)})
    (folder / "merges.txt").write_text("#version: 0.2\n")
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "CLIPTokenizer",
            "bos_token": "<|startoftext|>",
            "eos_token": "<|endoftext|>",
            "unk_token": "<|endoftext|>",
            "pad_token": "<|endoftext|>",
            "model_max_length": 77,
        },
    )


def t5_tokenizer(folder: Path) -> None:
    """Write T5's tokenizer."""
    letter_tokenizer(
        folder,
        ["<pad>", "</s>", "<unk>"],
        tokenizer_class="T5Tokenizer",
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        extra_ids=0,
        model_max_length=512,
    )
