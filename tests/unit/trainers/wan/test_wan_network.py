"""Every form of a Wan DiT is loaded with exactly its weights, or refused in one line."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from dit_world import (
    forms,
    image_dit,
    inputs,
    original_config,
    original_dit,
    tiny_dit,
    write_file,
)
from latentmake.base.errors import ModelError, TrainingError
from latentmake.config.models import Model
from latentmake.models.files import PARTS, folder_in
from latentmake.runs.findings import model_finding
from latentmake.trainers.lora import add_adapter
from latentmake.trainers.musubi.checks import networks
from latentmake.trainers.wan.dit import check_networks, dit_digest, read_dit, trained_networks
from latentmake.trainers.wan.recipe import load_transformer
from refusals import refused
from wan_world import write_wan_vae

TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]
IMAGE = {"task": "i2v-14B", "clip": "clip.pth"}


def model(dit: Path | str | None, **changes: Any) -> Model:
    section = {"task": "t2v-1.3B", "vae": "vae.pth", "text": "t5.pth", **changes}
    if dit is not None:
        section["dit"] = str(dit)
    return Model.model_validate(section)


def check(given: Model, targets: list[str] = TARGETS) -> None:
    check_networks(given, "wan", targets, "runs.a.trainer.target_modules")


def planning_refusal(given: Model) -> str:
    """Return the one line in which a model is refused; its checklist says the same."""
    line = refused(lambda: check(given), kind=ModelError)
    assert line.startswith("models.wan.dit")
    findings = [model_finding(file) for file in trained_networks(given)]
    (failed,) = [each for each in findings if each.verdict == "failed"]
    assert failed.note in line
    return line


def refusal(path: Path) -> str:
    """Return the one line in which a network is refused."""
    line = refused(lambda: load_transformer(str(path)), kind=ModelError)
    assert line.count(str(path)) == 1
    return line


def frames_dit() -> Any:
    """That of first and last frame: with a position embedding of both pictures' tokens."""
    return image_dit(pos_embed_seq_len=10)


@pytest.mark.parametrize("make", [tiny_dit, image_dit, frames_dit])
def test_every_form_passes_planning_and_gives_the_same_network(tmp_path: Path, make: Any) -> None:
    dit = make()
    given = inputs(dit)
    expected = dit(**given).sample
    for kind, path in forms(dit, tmp_path).items():
        planned = model(path, **({} if make is tiny_dit else IMAGE))
        check(planned)
        (file,) = trained_networks(planned)
        assert model_finding(file).verdict == "ok"
        assert read_dit(str(path))[1]["num_layers"] == 2
        if ("folder" in kind and "original" not in kind) or kind == "diffusers file":
            (musubi,) = networks(planned)
            assert "is in diffusers' names, which musubi-tuner cannot read" in musubi.fault
        loaded = load_transformer(str(path), dtype=torch.float32)
        state = loaded.state_dict()
        assert state.keys() == dit.state_dict().keys(), kind
        assert all(torch.equal(state[name], value) for name, value in dit.state_dict().items())
        assert torch.equal(loaded(**given).sample, expected), kind
        assert not any(parameter.requires_grad for parameter in loaded.parameters())


def test_heads_of_a_lone_file_are_128_wide(tmp_path: Path) -> None:
    wide = tiny_dit(heads=2, head=128, num_layers=1)
    file = write_file(original_dit(wide.state_dict()), tmp_path / "wide.safetensors")
    assert load_transformer(str(file)).config.num_attention_heads == 2
    # A configuration of another network beside it changes nothing, and none that is damaged.
    beside = tmp_path / "config.json"
    for content in ("{", '{"_class_name": "UNet"}'):
        beside.write_text(content)
        assert load_transformer(str(file)).config.num_attention_heads == 2
    beside.write_text(json.dumps({**original_config(wide), "num_heads": 4, "eps": 1e-5}))
    assert load_transformer(str(file)).config.num_attention_heads == 4
    assert load_transformer(str(file)).config.eps == 1e-5
    narrow = write_file(tiny_dit().state_dict(), tmp_path / "narrow/dit.safetensors")
    assert "24 wide, and no config.json" in refusal(narrow)


def test_of_a_release_with_two_networks_the_right_one_is_taken(tmp_path: Path) -> None:
    tiny_dit().save_pretrained(tmp_path / "high_noise_model")
    tiny_dit(ffn_dim=48).save_pretrained(tmp_path / "low_noise_model")
    for key, width in (("dit", 48), ("dit_high_noise", 40)):
        assert load_transformer(folder_in(str(tmp_path), PARTS[key])).config.ffn_dim == width


def test_weights_of_another_kind_or_number_format_are_refused(tmp_path: Path) -> None:
    state = tiny_dit().state_dict()
    name = "blocks.0.attn1.to_q.weight"
    for content, fault in (
        ({k: v for k, v in state.items() if k != name}, f"lacks {name}"),
        ({k: v for k, v in state.items() if not k.startswith("blocks.0.ffn")}, "lacks blocks.0.ff"),
        ({**state, "vace_blocks.0.proj.weight": torch.ones(1)}, "holds vace_blocks.0.proj.weight"),
        ({**state, name: torch.ones(24, 23)}, "of shape [24, 23] instead of [24, 24]"),
        ({**state, name: state[name].to(torch.float8_e4m3fn)}, "in fp8; the trainer wan needs"),
        ({"blocks.0.lora_A.weight": torch.ones(2, 2)}, "is a LoRA, not a Wan DiT"),
        ({"something": torch.ones(2)}, "is another network"),
    ):
        file = write_file(content, tmp_path / "bad" / "dit.safetensors")
        (file.parent / "config.json").write_text(json.dumps(original_config(tiny_dit())))
        assert fault in refusal(file)
    assert "a Wan VAE" in refusal(write_wan_vae(tmp_path)[".safetensors"])
    assert "is not a .safetensors file" in refusal(write_wan_vae(tmp_path)[".pth"])
    assert "does not exist" in refusal(tmp_path / "nothing" / "here")
    model = Model.model_validate({"vae": "v", "text": "t", "task": "t2v-1.3B", "dit": "Wan-AI/Wan"})
    with pytest.raises(ModelError, match="run `hf download Wan-AI/Wan --local-dir models/Wan`"):
        check_networks(model, "wan", ["to_q"], "")
    (tmp_path / "empty").mkdir()
    assert "no config.json" in refusal(tmp_path / "empty")


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    dit = tiny_dit()
    whole = forms(dit, tmp_path / "whole")
    folder = tmp_path / "folder"

    def fresh(kind: str) -> Path:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole[kind], folder)
        return folder

    cut = next(fresh("sharded folder").glob("*00002-of*"))
    cut.write_bytes(cut.read_bytes()[:-1])
    with pytest.raises(ModelError, match=f"{cut.name}: is cut short"):
        load_transformer(str(folder))
    config = fresh("folder") / "config.json"
    said = json.loads(config.read_text())
    for change, fault in (
        ({"num_layers": 3}, "has num_layers 2, and its config.json says 3"),
        ({"num_attention_heads": 7}, "its config.json says 7 heads"),
        ({"_class_name": "WanVACE"}, "is of class WanVACE, not"),
    ):
        config.write_text(json.dumps({**said, **change}))
        assert fault in refusal(folder)
    config.write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: cannot be read"):
        load_transformer(str(folder))


def test_bfloat16_weights_are_mapped_and_not_copied(tmp_path: Path) -> None:
    dit = tiny_dit(heads=8, head=128, num_layers=4, ffn_dim=4096)
    dit = dit.to(torch.bfloat16)
    file = write_file(dit.state_dict(), tmp_path / "dit.safetensors")
    size = file.stat().st_size
    assert size > 80e6

    def held() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        (anonymous,) = (line.split()[1] for line in lines if line.startswith("RssAnon"))
        return int(anonymous) * 1024

    before = held()
    loaded = load_transformer(str(file))
    assert held() - before < 0.2 * size
    assert sum(each.numel() for each in loaded.parameters()) * 2 > 0.98 * size


def test_without_casts_of_peft_autocast_gives_the_same_bits(tmp_path: Path) -> None:
    path = str(forms(tiny_dit(), tmp_path)["folder"])
    found = []
    for autocast in (False, True):
        torch.manual_seed(0)
        network = load_transformer(path)
        targets = [*TARGETS, "ffn.net.0.proj", "ffn.net.2"]
        add_adapter(network, rank=4, target_modules=targets, autocast=autocast)
        trained = [each for each in network.parameters() if each.requires_grad]
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for each in trained:
                each += 0.1 * torch.randn(each.shape, generator=generator)
        given = {name: value.bfloat16() for name, value in inputs(network).items()}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            predicted = network(**given).sample
        predicted.float().square().mean().backward()
        found.append([predicted, *(each.grad for each in trained)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


# -- what planning takes --------------------------------------------------------------------------


def test_another_task_is_refused(tmp_path: Path) -> None:
    paths = {
        name: forms(dit, tmp_path / name)["original folder"]
        for name, dit in {
            "text": tiny_dit(),
            "image": image_dit(),
            "image without CLIP": tiny_dit(in_channels=36),
        }.items()
    }
    for name, changes, fault in (
        ("image", {}, "is a Wan DiT of 36 input channels; t2v-1.3B has 16"),
        ("text", IMAGE, "is a Wan DiT of 16 input channels; i2v-14B has 36"),
        ("image", {"task": "i2v-A14B"}, "takes a CLIP image encoder's output; i2v-A14B needs none"),
        ("image without CLIP", IMAGE, "does not take a CLIP image encoder's output; i2v-14B needs"),
    ):
        assert fault in planning_refusal(model(paths[name], **changes))
    check(model(paths["image without CLIP"], task="i2v-A14B"))


def test_the_network_for_high_noise_is_checked_too(tmp_path: Path) -> None:
    good = forms(tiny_dit(), tmp_path / "a")["folder"]
    bad = forms(image_dit(), tmp_path / "b")["folder"]
    both = {"task": "t2v-A14B", "dit_high_noise": str(bad)}
    for given in (model(good, **both), model(None, **both)):
        assert planning_refusal(given).startswith(f"models.wan.dit_high_noise: {bad}: ")
    check(model(None, **{**both, "dit_high_noise": str(good)}))
    assert "is not set: there is no network to train" in planning_refusal(model(None))


def test_a_target_that_fits_nothing_is_refused_while_planning(tmp_path: Path) -> None:
    for path in forms(tiny_dit(), tmp_path).values():
        with pytest.raises(TrainingError) as caught:
            check(model(path), ["to_q", "to_x"])
        where = "runs.a.trainer.target_modules"
        assert str(caught.value).startswith(f"{where}: no layer of the DiT is named `to_x`; ")
    with pytest.raises(TrainingError, match="which is no linear layer of a block"):
        check(model(path), ["to_q", "time_proj"])
    check(model(path), ["ffn.net.0.proj", "ffn.net.2", "attn1.to_q"])


def test_the_digest_is_that_of_content_alone(tmp_path: Path) -> None:
    paths = forms(tiny_dit(), tmp_path)
    found = {name: dit_digest(model(path)) for name, path in paths.items()}
    assert found["folder"] == found["pipeline"]  # the same files
    assert len(set(found.values())) == len(found) - 1
    moved = tmp_path / "moved"
    paths["original folder"].rename(moved)
    assert dit_digest(model(moved)) == found["original folder"]
    for file in moved.iterdir():
        os.utime(file)
    assert dit_digest(model(moved)) == found["original folder"]
    config = moved / "config.json"
    config.write_text(config.read_text().replace('"eps": 1e-06', '"eps": 1e-05'))
    assert dit_digest(model(moved)) != found["original folder"]
    asked: list[str] = []

    def remembered(path: Path) -> str:
        asked.append(path.name)
        return path.name

    dit_digest(model(paths["sharded folder"]), remembered)
    assert asked[0] == "config.json" and len(asked) > 3


def test_a_configuration_of_another_model_beside_a_file_does_not_count(tmp_path: Path) -> None:
    wide = tiny_dit(heads=2, head=128, num_layers=1)
    file = write_file(original_dit(wide.state_dict()), tmp_path / "dit.safetensors")
    alone = dit_digest(model(file))
    (tmp_path / "config.json").write_text('{"_class_name": "UNet"}')
    assert dit_digest(model(file)) == alone
    (tmp_path / "config.json").write_text(json.dumps(original_config(wide)))
    assert dit_digest(model(file)) != alone
