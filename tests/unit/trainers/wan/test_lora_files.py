"""A LoRA's files do in other programs what the LoRA does in our network."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY as METADATA
from dit_world import image_dit, inputs, tiny_dit
from latentmake.base.errors import TrainingError
from latentmake.trainers.lora import add_adapter, begin_lora, load_lora, lora_tensors
from latentmake.trainers.wan.dit import PLACES, PREFIX, lora_names
from latentmake.trainers.wan.recipe import write_lora
from refusals import refused
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from wan_world import tiny_umt5, tiny_wan_vae, write_umt5

TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]
DIFFUSERS, MUSUBI, COMFYUI = lora_names()
FILES = ["comfyui.safetensors", "musubi.safetensors", "pytorch_lora_weights.safetensors"]


def trained(dit: Any, *, alpha: float = 2, seed: int = 3, targets: list[str] | None = None) -> Any:
    """Give a network a LoRA that changes what it predicts."""
    add_adapter(dit, rank=4, alpha=alpha, target_modules=targets or TARGETS)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in lora_tensors(dit).values():
            value.copy_(0.3 * torch.randn(value.shape, generator=generator))
    return dit


def pipeline(folder: Path, dit: Any, second: Any = None) -> Any:
    """Assemble diffusers' pipeline of tiny parts; with two networks that of Wan 2.2."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(write_umt5(folder)["tokenizer"])
    made: Any = WanPipeline
    pipe = made(
        tokenizer=tokenizer,
        text_encoder=tiny_umt5(len(tokenizer)),
        vae=tiny_wan_vae(4),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=dit,
        transformer_2=second,
        boundary_ratio=None if second is None else 0.875,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generated(pipe: Any) -> torch.Tensor:
    """Return the latents of a tiny clip."""
    found: torch.Tensor = pipe(
        "a red circle",
        negative_prompt="",
        height=32,
        width=48,
        num_frames=5,
        num_inference_steps=4,
        guidance_scale=2.0,
        max_sequence_length=12,
        output_type="latent",
        generator=torch.Generator().manual_seed(5),
    ).frames
    return found


FEED_FORWARD = ["ffn.net.0.proj", "ffn.net.2"]


@pytest.mark.parametrize("alpha", [1, 4, 16.0])
@pytest.mark.parametrize(
    ("make", "others", "names"),
    [  # diffusers reads files of musubi-tuner with all layers alone
        (tiny_dit, FEED_FORWARD, FILES),
        (image_dit, [*FEED_FORWARD, "add_k_proj", "add_v_proj"], FILES),
        (tiny_dit, ["proj_out"], [DIFFUSERS, COMFYUI]),
    ],
    ids=["text", "image", "last layer"],
)
def test_every_file_does_in_diffusers_what_our_network_does(
    tmp_path: Path, make: Any, others: list[str], names: list[str], alpha: float
) -> None:
    targets = [*TARGETS, *others]
    ours = trained(make(), alpha=alpha, targets=targets)
    write_lora(ours, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES
    given = inputs(ours)
    expected = ours(**given).sample
    base = make()(**given).sample
    loader: Any = WanPipeline
    for name in names:
        state, metadata = loader.lora_state_dict(
            tmp_path, weight_name=name, return_lora_metadata=True
        )
        other = make()
        loader.load_lora_into_transformer(state, other, metadata=metadata)
        found = other(**given).sample
        assert (found - base).abs().max() > 0.1
        assert torch.allclose(found, expected, rtol=0, atol=1e-5), name


def test_a_lora_that_is_read_back_does_what_it_did(tmp_path: Path) -> None:
    ours = trained(tiny_dit(), alpha=3.5)
    write_lora(ours, tmp_path)
    given = inputs(ours)
    expected, base = ours(**given).sample, tiny_dit()(**given).sample
    fresh = tiny_dit()
    torch.manual_seed(7)
    drawn = torch.randn(2)
    torch.manual_seed(7)
    load_lora(fresh, tmp_path / DIFFUSERS, PREFIX)
    assert torch.equal(torch.randn(2), drawn)
    assert torch.equal(fresh(**given).sample, expected)
    fresh.disable_adapters()
    assert torch.equal(fresh(**given).sample, base)
    fresh.enable_adapters()
    assert torch.equal(fresh(**given).sample, expected)
    other = trained(tiny_dit(), alpha=3.5, seed=8)
    load_lora(other, tmp_path / DIFFUSERS, PREFIX)
    assert torch.equal(other(**given).sample, expected)


@pytest.mark.parametrize("name", FILES)
def test_a_training_begins_with_what_a_lora_of_any_names_does(tmp_path: Path, name: str) -> None:
    ours = trained(tiny_dit(), alpha=3, targets=[*TARGETS, "proj_out"])
    write_lora(ours, tmp_path)
    given = inputs(ours)
    for alpha in (3, 8):
        new = tiny_dit()
        add_adapter(new, rank=4, alpha=alpha, target_modules=[*TARGETS, "proj_out"])
        begin_lora(new, tmp_path / name, PLACES)
        assert torch.allclose(new(**given).sample, ours(**given).sample, rtol=0, atol=1e-5)


def test_a_lora_that_a_training_cannot_begin_from_is_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / MUSUBI
    write_lora(trained(tiny_dit()), tmp_path)
    write_lora(trained(tiny_dit(head=10)), tmp_path / "wide")
    for path, rank, targets, fault in (
        (file, 4, [*TARGETS, "proj_out"], "only the network has lora_unet_head_head.lora_A.weight"),
        (file, 4, ["to_q"], "only the file has lora_unet_blocks_0_cross_attn_k."),
        (file, 8, TARGETS, "it has the rank 4 in place of 8"),
        (tmp_path / "wide" / COMFYUI, 4, TARGETS, "size of tensor"),
        (tmp_path / "none", 4, TARGETS, "No such file"),
    ):
        network = tiny_dit()
        add_adapter(network, rank=rank, target_modules=targets)
        line = refused(partial(begin_lora, network, path, PLACES), kind=TrainingError)
        assert fault in line
        assert line.startswith(f"trainer.init_lora: {path} cannot be begun from (")


def test_a_lora_of_another_network_is_refused_in_one_line(tmp_path: Path) -> None:
    write_lora(trained(tiny_dit()), tmp_path)
    file = tmp_path / DIFFUSERS
    whole = file.read_bytes()
    for content, network, fault in (
        (whole, tiny_dit(num_layers=3), "only the network has transformer.blocks.2."),
        (whole, tiny_dit(head=10), "size of tensor"),
        (whole, trained(tiny_dit(), alpha=1), "another rank or alpha"),
        (whole, trained(tiny_dit(), targets=["to_q"]), "only the file has transformer.blocks.0."),
        (whole[:-1], tiny_dit(), "is cut short"),
        (
            (tmp_path / COMFYUI).read_bytes(),
            tiny_dit(),
            "Target modules",
        ),
        (b"", tiny_dit(), "is cut short"),
        (None, tiny_dit(), "No such file"),
    ):
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_bytes(content)
        line = refused(partial(load_lora, network, file, PREFIX), kind=TrainingError)
        assert line.startswith(f"{file}: these trained weights cannot be read") and fault in line


def test_a_lora_whose_alpha_is_too_large_is_refused_in_one_line(tmp_path: Path) -> None:
    write_lora(trained(tiny_dit()), tmp_path)
    file = tmp_path / DIFFUSERS
    with safe_open(file, "pt") as opened:
        described = json.loads(opened.metadata()[METADATA]) | {f"{PREFIX}.lora_alpha": 10**400}
    save_file(load_file(file), file, {METADATA: json.dumps(described)})
    line = refused(partial(load_lora, tiny_dit(), file, PREFIX), kind=TrainingError)
    assert line.startswith(f"{file}: these trained weights cannot be read (int")
    network = tiny_dit()
    add_adapter(network, rank=4, target_modules=TARGETS)
    line = refused(partial(begin_lora, network, file, PLACES), kind=TrainingError)
    assert line.startswith(f"trainer.init_lora: {file} cannot be begun from (int too large")


def test_the_loras_of_two_networks_load_by_name_into_a_pipeline_of_two(tmp_path: Path) -> None:
    # In diffusers' pipelines of Wan 2.2 the first network is that for high noise.
    folder = tmp_path / "lora"
    write_lora(trained(tiny_dit(), seed=1), folder, high_noise=True)
    write_lora(trained(tiny_dit(), seed=2), folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [*FILES, *(f"high_noise_{name}" for name in FILES)]
    )
    high, low = tiny_dit(), tiny_dit()
    load_lora(high, folder / lora_names(high_noise=True)[0], PREFIX)
    load_lora(low, folder / DIFFUSERS, PREFIX)
    expected = generated(pipeline(tmp_path, high, low))
    assert torch.allclose(
        expected,
        generated(pipeline(tmp_path, trained(tiny_dit(), seed=1), trained(tiny_dit(), seed=2))),
    )
    plain = pipeline(tmp_path, tiny_dit(), tiny_dit())
    base = generated(plain)
    plain.load_lora_weights(folder, weight_name=f"high_noise_{DIFFUSERS}", adapter_name="high")
    plain.load_lora_weights(
        folder, weight_name=DIFFUSERS, adapter_name="low", load_into_transformer_2=True
    )
    found = generated(plain)
    assert (found - base).abs().max() > 0.1
    assert torch.allclose(found, expected, rtol=0, atol=1e-5)
