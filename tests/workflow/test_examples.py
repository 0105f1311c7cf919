"""The examples for Stable Diffusion 1.5, as they are, with tiny models in the real ones' places."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_networks
import torch
import world
import yaml
from project import ROOT, Project
from safetensors import safe_open
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

WIDE = 24
STEMS = ("ant", "cat", "eel")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, micro: Path) -> Path:
    """The folders that the examples name, each with a tiny network of the same kind."""
    from tokenizers import Tokenizer
    from tokenizers.models import Unigram
    from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

    folder = tmp_path_factory.mktemp("models")
    plain = folder / "stable-diffusion-v1-5"
    plain.mkdir()
    for name in ("vae", "tokenizer", "text_encoder", "scheduler"):
        (plain / name).symlink_to(micro / name)
    torch.manual_seed(5)
    # Attention at few places alone: at all 64 x 64 of them a CPU takes minutes a step.
    attends, settings = (False, False, False, True), {"attention_head_dim": 4, "norm_num_groups": 4}
    unet = tiny_networks.unet((8, 8, 8, 16), 16, attends, **settings)
    unet.save_pretrained(plain / "unet")
    vae = tiny_networks.vae(mid_block_add_attention=False, scaling_factor=0.13025)
    vae.save_pretrained(folder / "stable-diffusion-xl-base-1.0/vae")
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces += [(letter, -3.0) for letter in "abcdefghijklmnopqrstuvwxyz "]
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(Unigram(pieces, unk_id=2)),
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
    ).save_pretrained(folder / "t5-v1_1-xxl")
    T5EncoderModel(
        T5Config(
            vocab_size=len(pieces),
            d_model=WIDE,
            d_kv=8,
            d_ff=32,
            num_layers=1,
            num_heads=2,
            feed_forward_proj="gated-gelu",
        )
    ).save_pretrained(folder / "t5-v1_1-xxl")
    return folder


def trained(fresh: Callable[[], Project], models: Path, example: str) -> tuple[Project, str]:
    project = fresh()
    config: dict[str, Any] = yaml.safe_load((ROOT / f"config/examples/{example}.yaml").read_text())
    project.config = config
    for number, stem in enumerate(STEMS):
        world.draw(project / f"data/photos/{stem}.png", number)
        (project / f"data/photos/{stem}.txt").write_text(world.CAPTIONS[stem])
    (project / "models").mkdir(exist_ok=True)
    for each in models.iterdir():
        (project / "models" / each.name).symlink_to(each.resolve())
    (run,) = config["runs"]
    project.run(f"train_{run}")
    return project, run


def scalars(project: Project, run: str) -> dict[str, list[float]]:
    events = EventAccumulator(str(project / f"runs/{run}/logs"))
    events.Reload()
    return {
        name: [event.value for event in events.Scalars(name)] for name in events.Tags()["scalars"]
    }


def test_the_plain_example_trains_the_whole_unet(
    fresh: Callable[[], Project], models: Path
) -> None:
    project, run = trained(fresh, models, "sd15")
    before = load_file(models / "stable-diffusion-v1-5/unet/diffusion_pytorch_model.safetensors")
    after = load_file(project / f"runs/{run}/unet/diffusion_pytorch_model.safetensors")
    assert before.keys() == after.keys()
    assert sum(not torch.equal(before[name], after[name]) for name in before) > len(before) / 2
    said = scalars(project, run)
    assert {len(values) for values in said.values()} == {4}  # 4 epochs of one batch
    assert all(raw >= loss for loss, raw in zip(said["loss"], said["raw_loss"], strict=True))
    assert len(list((project / f"runs/{run}/saved").iterdir())) == 4
    with safe_open(project / "cache/photos/sd15/512/ant.latents.safetensors", "pt") as file:
        assert file.get_tensor("latents").dtype == torch.bfloat16
        assert file.get_slice("latents").get_shape() == [4, 64, 64]


def test_the_example_of_parts_trains_with_a_projection(
    fresh: Callable[[], Project], models: Path
) -> None:
    project, run = trained(fresh, models, "sd15-sdxlvae-t5")
    folder = project / f"runs/{run}"
    projection = load_file(folder / "text_projection/model.safetensors")
    assert projection["weight"].shape == (16, WIDE)
    lengths = set()
    for stem in STEMS:
        cache = project / f"cache/photos/sd15-sdxlvae-t5/text/{stem}.text.safetensors"
        state = load_file(cache)["text_encoder.hidden_state"]
        assert state.shape[1] == WIDE
        lengths.add(len(state))
    assert len(lengths) > 1  # unpadded
    latents = project / "cache/photos/sd15-sdxlvae-t5/512/ant.latents.safetensors"
    with safe_open(latents, "pt") as file:
        assert file.metadata()["scaling_factor"] == "0.13025"
    assert json.loads((folder / "training.json").read_text())["steps"] == 4
    assert (folder / "samples.png").is_file()
    assert max(scalars(project, run)["qk_grads_av"]) > 0
