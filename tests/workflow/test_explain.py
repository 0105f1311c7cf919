"""`explain` names each part of a key that differs, with old and new."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import torch
from project import NOTHING, Project
from safetensors.torch import load_file, save_file

DIGEST = r"[0-9a-f]{8}\.\."


def change_weights(folder: Path) -> None:
    """Give a network other weights."""
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    save_file({name: tensor + torch.ones_like(tensor) for name, tensor in tensors.items()}, file)


def test_an_edited_caption_another_vae_and_another_text_encoder_are_named_with_old_and_new(
    built: Project,
) -> None:
    micro, other = built / "models/micro", built / "models/other"
    shutil.copytree(micro, other)
    change_weights(other / "vae")
    change_weights(micro / "text_encoder")  # where it lies
    built.configure(lambda config: config["models"]["micro"].update(vae="models/other/vae"))
    (built / "data/shapes/ant.txt").write_text("a purple circle\n")
    before = built.snapshot()

    said = built.ask("explain", "data/shapes/ant.png")
    for resolution in (16, 32):
        said.one_line(f"{resolution}/ant.latents.safetensors: stale (changed recipe)")
    said.one_line("text/ant.text.safetensors: stale (changed recipe)")
    vae = rf"VAE's digest {DIGEST} -> {DIGEST} \(models/other/vae\)"
    place = r"\(models/micro/text_encoder\)"
    text = rf"text encoder's digest {DIGEST} -> {DIGEST} {place}"
    assert len(re.findall(vae, said.output)) == 2 and len(re.findall(text, said.output)) == 1
    said.one_line('caption "a red circle" -> "a purple circle" (data/shapes/ant.txt)')
    assert built.changed(before) == NOTHING

    said.one_line("made", " by latentmake")

    # Each alone, by the name of the cache file.
    (name,) = built.texts("ant")
    said = built.ask("explain", str(built / name))
    assert re.search(text, said.output) and not re.search(vae, said.output)
    said.one_line('"a red circle" -> "a purple circle"')
    (values,) = json.loads(built.ask("explain", name, "--json").output)
    assert (values["path"], values["state"], values["runs"]) == (name, "stale", ["tiny"])
    (caption, *_) = values["differences"]
    assert (caption["name"], caption["old"]) == ("caption", '"a red circle"')

    planned = built.run("-n", "caches_tiny")
    assert re.search(rf"^recipe: {vae}: 12 latents of shapes$", planned.output, re.MULTILINE)
    assert re.search(rf"^recipe: {text}: 6 texts of shapes$", planned.output, re.MULTILINE)
