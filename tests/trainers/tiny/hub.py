"""Files of tiny tokenizers, and of random weights."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def write_json(path: Path, content: Any) -> None:
    """Write a file of JSON, and the folders that it lies in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def write_tokenizer(
    folder: Path,
    bytes: Sequence[str] = (),
    letters: Sequence[str] = (),
    pairs: bool = False,
    settings: Mapping[str, Any] | None = None,
    files: Mapping[str, Any] | None = None,
) -> None:
    """Write a tokenizer.

    Args:
        folder: where its files go.
        bytes: special tokens, the tokens 256, 257, ...; the others are bytes.
        letters: special tokens, the first ones; the others are letters, as of T5.
        pairs: whether its tokens are those of CLIP: letters inside and at the end of words.
        settings: of tokenizer_config.json.
        files: other files, by their names: text, or values of JSON.
    """
    if bytes:
        _write_bytes(folder, bytes, settings or {})
    elif letters:
        _write_letters(folder, letters, settings or {})
    elif pairs:
        _write_pairs(folder)
    for name, content in (files or {}).items():
        if isinstance(content, str):
            (folder / name).write_text(content)
        else:
            write_json(folder / name, content)


def _write_bytes(folder: Path, specials: Sequence[str], settings: Mapping[str, Any]) -> None:
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
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    added = {str(id_): {"content": token, "special": True, **flags} for token, id_ in ids.items()}
    write_json(folder / "tokenizer_config.json", {"added_tokens_decoder": added, **settings})


def _write_letters(folder: Path, specials: Sequence[str], settings: Mapping[str, Any]) -> None:
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


def _write_pairs(folder: Path) -> None:
    """Write a vocabulary of 512 letters and two special tokens."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    names = [*letters, *(f"{each}</w>" for each in letters), "<|startoftext|>", "<|endoftext|>"]
    write_json(folder / "vocab.json", {name: number for number, name in enumerate(names)})
    (folder / "merges.txt").write_text("#version: 0.2\n")


# -- weights --------------------------------------------------------------------------------------


class _Made(Exception):
    """A loader has made its network."""


def network_of(loader: Callable[..., object], file: Path, needs: Iterable[str] = ()) -> Any:
    """Return the network that a loader makes before it loads a file.

    Args:
        loader: makes a network, reads the file, and calls `load_state_dict`.
        file: a file that the loader is called with.
        needs: names of tensors that it asks for before.
    """
    import torch
    from safetensors.torch import save_file

    def stop(self: Any, *_: Any, **__: Any) -> None:
        raise _Made(self)

    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: torch.zeros(1) for name in (*needs, "unused")}, file)
    load, torch.nn.Module.load_state_dict = torch.nn.Module.load_state_dict, stop
    try:
        loader()
    except _Made as made:
        return made.args[0]
    finally:
        torch.nn.Module.load_state_dict = load
        file.unlink()
    raise AssertionError(f"{file.name}: its loader reads no weights")


def write_random(
    network: Any,
    file: Path,
    renames: Iterable[tuple[str, str]] = (),
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write small random weights of a network; `renames` are patterns of names and new texts."""
    import torch
    from safetensors.torch import save_file

    random = torch.Generator().manual_seed(0)
    tensors = {}
    for name, value in network.state_dict().items():
        if value.dtype.is_floating_point:
            near = float(value.ndim == 1 and name.endswith(("weight", "running_var")))
            scale = 0.1 if value.ndim < 2 else value[0].numel() ** -0.5
            value = near + scale * torch.randn(value.shape, generator=random)
        for pattern, text in renames:
            name = re.sub(pattern, text, name)
        tensors[name] = value.contiguous()
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, file, metadata={"format": "pt", **(metadata or {})})
