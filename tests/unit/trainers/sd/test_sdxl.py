"""SDXL: a step is that of diffusers' example, pictures are the pipeline's, files load elsewhere."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, NamedTuple

import checkpoint_world
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DDPMScheduler,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from latentmake.config.models import Model
from latentmake.encode.encoders.text import text_encoders
from latentmake.formats.safetensors import read_head
from latentmake.layouts.names import plain_latents_metadata
from latentmake.models.tensors import original_unet_layer
from latentmake.trainers.loop.caches import SDXL as TENSORS
from latentmake.trainers.loop.caches import Caches, read_items
from latentmake.trainers.lora import lora_tensors
from latentmake.trainers.sd.recipe import SdPainter, SdRecipe
from latentmake.trainers.sd.unet import KOHYA_WEIGHTS, SdOrder
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from trainer_world import make_order, make_training, of_model
from transformers import AutoTokenizer, CLIPTextModel, CLIPTextModelWithProjection

CPU = torch.device("cpu")
CAPTIONS = ("a red circle", "a blue square on a yellow ground")
SETTINGS: dict[str, Any] = {
    "steps": 2,
    "rank": 2,
    "alpha": 1.0,
    "learning_rate": 1e-2,
    "target_modules": [
        *("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out"),
        *("conv1", "conv2", "conv_shortcut", "time_emb_proj"),
    ],
}


class World(NamedTuple):
    order: SdOrder
    pipeline: Any


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, micro: Path) -> World:
    """A small SDXL, the caches of two items, and an order that draws their captions."""
    root = tmp_path_factory.mktemp("sdxl")
    checkpoint_world.write(root, root / "sdxl.safetensors", micro / "tokenizer", "sdxl")
    places = [str(root / name) for name in ("text_encoder", "text_encoder_2")]
    model = Model.model_validate({"architecture": "sdxl", "vae": str(root / "vae"), "text": places})
    cached = text_encoders(model, CPU, torch.float32).encode(["", *CAPTIONS])
    (root / "cache/text").mkdir(parents=True)
    for name, tensors in zip("01", cached[1:], strict=True):
        save_file(tensors, root / f"cache/text/{name}.safetensors")
    random, lines = torch.Generator().manual_seed(3), []
    for number in range(2):
        latents = str(root / f"cache/{number}.safetensors")
        known = plain_latents_metadata(0.13025, 0.0, (40, 36), (32, 32))
        save_file({"latents": torch.randn(4, 4, 4, generator=random)}, latents, known)
        text = str(root / f"cache/text/{number}.safetensors")
        row = {"dataset": "shapes", "stem": str(number), "source": f"{number}.png", "repeats": 1}
        lines.append(json.dumps({**row, "latents": {"32": latents}, "text": text}) + "\n")
    (root / "manifest.jsonl").write_text("".join(lines))
    (root / "dataset.lock").write_text(json.dumps({"digest": "d" * 64}))
    order = make_order(root, prompts=True, **SETTINGS)
    save_file(cached[0], root / "cache/text/negative.safetensors")  # which the order made anew
    order = of_model(order, architecture="sdxl").model_copy(update={"sample_size": (48, 32)})
    pipeline = StableDiffusionXLPipeline(
        vae=AutoencoderKL.from_pretrained(root / "vae"),
        text_encoder=CLIPTextModel.from_pretrained(places[0]),
        text_encoder_2=CLIPTextModelWithProjection.from_pretrained(places[1]),
        tokenizer=AutoTokenizer.from_pretrained(root / "tokenizer"),
        tokenizer_2=AutoTokenizer.from_pretrained(root / "tokenizer_2"),
        unet=UNet2DConditionModel.from_pretrained(root / "unet"),
        scheduler=DDIMScheduler.from_pretrained(root / "scheduler", clip_sample=False),
        add_watermarker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    return World(order, pipeline)


@pytest.mark.parametrize("adapter", ["lora", "full"])
def test_loss_and_gradients_are_those_of_diffusers_example(world: World, adapter: str) -> None:
    """As train_text_to_image_lora_sdxl.py and train_text_to_image_sdxl.py make a step."""
    trainer = world.order.trainer.model_copy(update={"adapter": adapter})
    training = make_training(world.order.model_copy(update={"trainer": trainer}))
    denoiser, random = training.learner.denoiser, torch.Generator().manual_seed(5)
    for name, each in denoiser.named_parameters():
        if "lora_B" in name:
            each.data.normal_(std=0.1, generator=random)
    reference = copy.deepcopy(denoiser.unet)
    batch = training.caches.batch([0, 1])
    noise, timesteps = training.objective.draw(batch.latents.shape, random)
    losses, _ = training.painter.losses(denoiser, batch, noise, timesteps)
    losses.mean().backward()

    files = [each.latents.path for each in training.caches.examples]
    latents = torch.stack([load_file(file)["latents"] for file in files]) * 0.13025
    noisy = DDPMScheduler.from_config(world.pipeline.scheduler.config).add_noise(
        latents, noise, timesteps
    )
    embeds, _, pooled, _ = world.pipeline.encode_prompt(
        list(CAPTIONS), device=CPU, do_classifier_free_guidance=False
    )
    # Of 40 x 36 pixels, scaled to 36 x 32, 32 x 32 are cut: height before width, top before left.
    sizes = torch.tensor([[36, 40, 0, 2, 32, 32]] * 2)
    added = {"time_ids": sizes, "text_embeds": pooled}
    predicted = reference(noisy, timesteps, embeds, added_cond_kwargs=added).sample
    loss = torch.nn.functional.mse_loss(predicted.float(), noise.float())
    loss.backward()

    torch.testing.assert_close(losses.mean(), loss, rtol=1e-5, atol=1e-6)
    ours = {name: each.grad for name, each in denoiser.unet.named_parameters()}
    for name, each in reference.named_parameters():
        if each.requires_grad:
            assert each.grad is not None and each.grad.abs().max() > 0, name
            torch.testing.assert_close(ours[name], each.grad, rtol=1e-5, atol=1e-6)


def test_pictures_are_those_of_the_pipeline(world: World, tmp_path: Path) -> None:
    recipe, samples = SdRecipe(world.order), world.order.trainer.samples
    stored = Caches(read_items(Path(world.order.manifest)), TENSORS).examples[0].latents
    settings, seed = world.order.sample_settings(), samples.seed
    painter = SdPainter(recipe, settings, world.order.negative, stored, CPU)
    painter.network = recipe.make_network(channels=4, text_width=384, dtype=torch.float32).eval()
    text = world.order.prompts[0].text
    drawn = painter.latents(text, seed, settings.size, lambda: None, None)
    expected = world.pipeline(
        CAPTIONS[0],
        negative_prompt="",
        height=32,
        width=48,
        latents=torch.randn((1, 4, 4, 6), generator=torch.Generator().manual_seed(seed)),
        num_inference_steps=samples.num_inference_steps,
        guidance_scale=samples.guidance_scale,
        output_type="latent",
    ).images
    torch.testing.assert_close(drawn * 0.13025, expected[0], rtol=1e-3, atol=1e-4)
    picture = tmp_path / "picture.png"
    assert painter.write(picture, drawn) is not None
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_both_files_of_the_lora_load_whole_into_the_pipeline(world: World) -> None:
    training = make_training(world.order)
    training.run()
    ours = lora_tensors(training.learner.denoiser.unet)
    for file in ("pytorch_lora_weights.safetensors", KOHYA_WEIGHTS):
        world.pipeline.load_lora_weights(world.order.output, weight_name=file)
        unet = world.pipeline.unet
        (name,) = unet.peft_config
        theirs = get_peft_model_state_dict(unet, adapter_name=name)
        assert theirs.keys() == ours.keys()
        for key, value in theirs.items():
            assert torch.equal(value, ours[key]), key
        module = unet.mid_block.attentions[0].transformer_blocks[0].attn1.to_q
        assert module.scaling == {name: 0.5}
        world.pipeline.unload_lora_weights()
    head = read_head(Path(world.order.output, KOHYA_WEIGHTS))
    assert "lora_unet_middle_block_1_transformer_blocks_0_attn1_to_q.alpha" in head.entries
    known = head.metadata
    assert known["ss_base_model_version"] == "sdxl_base_v1-0" and known["ss_v2"] == "False"


def test_layers_outside_of_attention_have_the_names_of_the_release(world: World) -> None:
    unet = world.pipeline.unet
    weights = {name for name in unet.state_dict() if name.endswith(".weight")}
    named = checkpoint_world.of_unet({name: name for name in unet.state_dict()})
    ups = ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"]
    blocks = {"layers_per_block": 1, "up_block_types": ups}
    for theirs, name in named.items():
        if name in weights and "norm" not in name:
            assert f"{original_unet_layer(name.removesuffix('.weight'), blocks)}.weight" == theirs
