"""What the settings of the trainer `sd` do to the network, the loss and the steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from hypothesis import given
from hypothesis import strategies as st
from latentmake.base.errors import ModelError, TrainingError
from latentmake.config.trainers import SdTrainer
from latentmake.config.weights import Weights
from latentmake.encode.encoders.local_state import load_projection, write_projection
from latentmake.runs.order import RunFiles
from latentmake.trainers.loop.recipe import generator, make_accelerator
from latentmake.trainers.loop.state import Learner, rate_of, trained_state
from latentmake.trainers.sd import network
from latentmake.trainers.sd.recipe import SdRecipe
from latentmake.trainers.sd.unet import parameters_of
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trainer_world import (
    TEXT_WIDTH,
    make_order,
    make_scheduler,
    make_training,
    make_unet,
    objective_in,
    of_model,
    record,
    trained,
    weights,
)

PARTS = {
    "unet": lambda name: True,
    "time_embedding": lambda name: name.startswith("time_embedding."),
    "mid_block": lambda name: name.startswith("mid_block."),
    "up_blocks.1": lambda name: name.startswith("up_blocks.1."),
    "norms": lambda name: "norm" in name,
    "attention": lambda name: ".attn1." in name or ".attn2." in name,
    "cross_attention": lambda name: ".attn2." in name,
    "cross_attention_qk": lambda name: ".attn2.to_q." in name or ".attn2.to_k." in name,
    "cross_attention_out": lambda name: ".attn2.to_out." in name,
}


@pytest.fixture(scope="module")
def unet(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = make_unet(tmp_path_factory.mktemp("settings") / "unet")
    return network.load_unet(Weights(path=str(folder)))


@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_all_its_layers_and_no_other(unet: Any, part: str) -> None:
    names = [name for name, _ in unet.named_parameters()]
    found = parameters_of([part], names)
    assert found == {name for name in names if PARTS[part](name)}
    assert found


def test_parts_alone_are_trained_and_reinitialised_ones_begin_anew(tmp_path: Path) -> None:
    order = make_order(
        tmp_path,
        adapter="parts",
        parts=["norms"],
        reinitialize=["conv_out"],
        steps=3,
        learning_rate=1e-3,
    )
    before = load_file(tmp_path / "unet/diffusion_pytorch_model.safetensors")
    start = trained_state(make_training(order).learner.denoiser)
    make_training(order).run()
    after = load_file(RunFiles(order).weights)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "norm" in name or "conv_out" in name}
    assert {name.removeprefix("unet.") for name in start} == changed
    # Another seed draws other weights; the same one the same.
    assert torch.equal(
        start["unet.conv_out.weight"],
        trained_state(make_training(order).learner.denoiser)["unet.conv_out.weight"],
    )
    other = make_order(tmp_path, adapter="parts", reinitialize=["conv_out"], seed=5)
    drawn = trained_state(make_training(other).learner.denoiser)["unet.conv_out.weight"]
    assert not torch.equal(start["unet.conv_out.weight"], drawn)
    assert not torch.equal(before["conv_out.weight"], drawn)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_min_snr_weighs_as_its_paper_says(tmp_path: Path, prediction: Any) -> None:
    make_scheduler(tmp_path)
    timesteps = torch.tensor([0, 10, 400, 999])
    betas = torch.linspace(0.0001**0.5, 0.02**0.5, 1000, dtype=torch.float64) ** 2
    alpha = torch.cumprod(1 - betas, 0)[timesteps]
    snr = alpha / (1 - alpha)
    expected = snr.clamp(max=5) / (snr if prediction == "epsilon" else snr + 1)
    found = objective_in(tmp_path, prediction_type=prediction, snr_gamma=5).weights(timesteps)
    torch.testing.assert_close(found, expected.float(), rtol=1e-3, atol=0)
    assert objective_in(tmp_path, prediction_type=prediction).weights(timesteps) is None


def test_noise_offset_moves_whole_channels(tmp_path: Path) -> None:
    make_scheduler(tmp_path)
    shape = torch.Size((2, 4, 8, 8))
    plain, timesteps = objective_in(tmp_path).draw(shape, generator("offset"))
    moved, others = objective_in(tmp_path, noise_offset=0.5).draw(shape, generator("offset"))
    shift = moved - plain
    torch.testing.assert_close(shift, shift[..., :1, :1].expand(shape), rtol=0, atol=1e-6)
    assert 0.1 < float(shift[..., 0, 0].std()) < 1.5
    assert timesteps.shape == others.shape


def test_flow_matching_mixes_and_aims_as_diffusers_does(tmp_path: Path) -> None:
    FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(tmp_path)
    objective = objective_in(tmp_path)
    random = generator("flow")
    latents = torch.randn(4, 4, 8, 8, generator=random)
    noise, timesteps = objective.draw(latents.shape, random)
    scheduler: Any = FlowMatchEulerDiscreteScheduler.from_pretrained(tmp_path)
    scheduler.set_timesteps(timesteps=timesteps.sort(descending=True).values.tolist())
    order = timesteps.argsort(descending=True)
    # set_timesteps applies the shift again; its own sigmas are replaced by the unshifted.
    scheduler.sigmas = torch.cat([timesteps[order] / 1000, torch.zeros(1)])
    scheduler.timesteps = timesteps[order]
    theirs = scheduler.scale_noise(latents[order], timesteps[order], noise[order])
    mine, target = objective.mixed(latents, noise, timesteps)
    torch.testing.assert_close(mine[order], theirs, rtol=1e-5, atol=1e-5)
    # A step along the target, all the way, gives back the latents.
    sigmas = (timesteps / 1000).view(-1, 1, 1, 1)
    torch.testing.assert_close(mine - sigmas * target, latents, rtol=1e-4, atol=1e-5)
    with pytest.raises(ModelError, match="flow matching"):
        objective_in(tmp_path, snr_gamma=5)


@pytest.mark.parametrize("kind", ["diffusion", "flow"])
def test_flow_matching_learns_and_draws_with_either_schedule(tmp_path: Path, kind: str) -> None:
    if kind == "flow":
        FlowMatchEulerDiscreteScheduler().save_pretrained(tmp_path / "scheduler")
    prediction = {"prediction_type": "flow_matching"} if kind == "diffusion" else {}
    order = make_order(
        tmp_path,
        prompts=True,
        adapter="full",
        steps=40,
        learning_rate=3e-3,
        samples={"num_inference_steps": 3},
        **prediction,
    )
    make_training(order).run()
    made = record(order)
    assert made["loss_end"] < 0.8 * made["loss_start"]
    assert len(list(RunFiles(order).samples.glob("*.png"))) == 10


@given(
    st.sampled_from(["constant", "linear", "cosine", "constant_with_warmup"]),
    st.integers(1, 200),
    st.integers(0, 50),
    st.floats(0, 1),
)
def test_the_learning_rate_rises_stays_and_ends_where_it_should(
    kind: Any, steps: int, warmup: int, least: float
) -> None:
    least = least if kind in ("linear", "cosine") else 0.0
    warmup = 0 if kind == "constant" else warmup
    settings = SdTrainer(kind="sd", lr_scheduler=kind, lr_warmup_steps=warmup, lr_min_ratio=least)
    shares = [rate_of(step, settings, steps) for step in range(steps + 1)]
    assert all(0 <= share <= 1 for share in shares)
    if kind == "constant":
        assert set(shares) == {1.0}
        return
    rising, falling = shares[:warmup], shares[warmup:]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    if falling:
        assert falling[0] == pytest.approx(1.0)
        assert min(falling) >= least - 1e-9
        if kind in ("linear", "cosine") and steps > warmup:
            assert falling[-1] == pytest.approx(least)


@pytest.mark.parametrize(
    ("optimizer", "rate"), [("lion", 1e-3), ("prodigy", 1.0), ("dadaptation", 1.0)]
)
def test_each_optimiser_learns_and_resumes_to_the_bit(
    tmp_path: Path, optimizer: str, rate: float
) -> None:
    settings: dict[str, Any] = {"optimizer": optimizer, "learning_rate": rate, "ema_decay": 0.9}
    order = trained(tmp_path, adapter="full", steps=30, checkpointing_steps=7, **settings)
    layout, made, expected = RunFiles(order), record(order), weights(order)
    assert made["loss_end"] < made["loss_start"]
    layout.record.unlink()
    layout.weights.unlink()
    make_training(order).run()  # goes on from step 28
    assert weights(order) == expected
    events = EventAccumulator(str(layout.logs))
    events.Reload()
    assert events.Scalars("learning_rate")[-1].value > 0


def test_an_absent_library_and_unknown_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="lion has no argument `momentum`"):
        make_training(make_order(tmp_path, optimizer="lion", optimizer_arguments={"momentum": 0.9}))
    with pytest.raises(TrainingError, match="cannot be made with these arguments"):
        make_training(make_order(tmp_path, optimizer_arguments={"betas": [2.0, 0.9]}))
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        with pytest.raises(TrainingError, match="pip install bitsandbytes"):
            make_training(make_order(tmp_path, optimizer="adamw8bit"))


def test_the_average_is_the_result_and_is_what_its_formula_says(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"adapter": "parts", "parts": ["conv_out"], "learning_rate": 1e-2}
    order = trained(tmp_path, ema_decay=0.5, steps=4, **settings)
    plain = trained(tmp_path, output="plain", save_every_n_steps=1, steps=4, **settings)
    start = load_file(tmp_path / "unet/diffusion_pytorch_model.safetensors")["conv_out.bias"]
    average = start.clone()
    for step in range(1, 5):
        folder = RunFiles(plain).saved / f"step-{step:06d}" / "unet"
        now = load_file(folder / "diffusion_pytorch_model.safetensors")["conv_out.bias"]
        # diffusers lets the decay grow: (1 + n) / (10 + n) for the n-th update, from 0 on.
        n = step - 1
        decay = min(0.5, (1 + n) / (10 + n)) if n else 0.0
        average = decay * average + (1 - decay) * now
    written = load_file(RunFiles(order).weights)["conv_out.bias"]
    torch.testing.assert_close(written, average)
    assert not torch.equal(written, load_file(RunFiles(plain).weights)["conv_out.bias"])


def test_a_step_that_the_scaler_skips_advances_neither_rate_nor_average(tmp_path: Path) -> None:
    order = make_order(tmp_path, ema_decay=0.9, lr_scheduler="linear", learning_rate=1e-2)
    recipe = SdRecipe(order)
    accelerator = make_accelerator(order.trainer)
    accelerator.scaler = torch.amp.GradScaler("cpu")  # accelerate makes one on a GPU alone
    denoiser = recipe.make_network(channels=4, text_width=TEXT_WIDTH, dtype=torch.float32)
    learner = Learner(recipe, denoiser, accelerator, steps=4)

    def step(factor: float) -> tuple[float, int, float]:
        accelerator.backward(factor * sum(each.square().sum() for each in learner.parameters))
        learner.step()
        average = learner.state()[1]["average"]
        means = sum(float(each.abs().sum()) for each in average["shadow_params"])
        return learner.rate, average["optimization_step"], means

    before = step(1.0)
    assert before[:2] == (pytest.approx(0.75e-2), 1)
    assert step(math.inf) == before
    assert accelerator.optimizer_step_was_skipped
    after = step(1.0)
    assert after[:2] == (pytest.approx(0.5e-2), 2) and after[2] != before[2]


def test_epochs_show_each_item_that_often(tmp_path: Path) -> None:
    order = make_order(tmp_path, epochs=2, gradient_accumulation_steps=2, save_every_n_epochs=1)
    training = make_training(order)
    assert training.steps == math.ceil(2 * training.batch_order.batches_per_epoch / 2)
    training.run()
    assert record(order)["steps"] == training.steps
    _, last = sorted(RunFiles(order).saved.iterdir())
    assert last.name == f"step-{training.steps:06d}"
    assert (last / RunFiles(order).weights.name).read_bytes() == weights(order)


def test_a_file_asks_for_a_copy_at_once(tmp_path: Path) -> None:
    order = make_order(tmp_path, steps=2)
    layout = RunFiles(order)
    layout.output.mkdir(parents=True)
    layout.save.touch()
    make_training(order).run()
    assert not layout.save.exists()
    assert [each.name for each in layout.saved.iterdir()] == ["step-000001"]


def test_a_new_projection_is_trained_written_and_taken_up(tmp_path: Path) -> None:
    order = make_order(tmp_path, prompts=True, steps=3, learning_rate=1e-2)
    make_unet(tmp_path / "wide", cross_attention_dim=24)
    order = of_model(order, unet=Weights(path=str(tmp_path / "wide")), text_projection="new")
    training = make_training(order)
    start = training.learner.denoiser.text_projection
    assert start is not None
    before = start.weight.detach().clone()
    training.run()
    layout = RunFiles(order)
    layer = load_projection(str(layout.output / "text_projection"))
    assert (layer.in_features, layer.out_features) == (TEXT_WIDTH, 24)
    assert not torch.equal(layer.weight, before)
    # Another training begins with what this one has learnt.
    written = str(layout.output / "text_projection")
    again = of_model(order, text_projection=written).model_copy(update={"output": "elsewhere"})
    taken = make_training(again).learner.denoiser.text_projection
    assert taken is not None
    assert torch.equal(taken.weight, layer.weight)
    # A run without one leaves none behind.
    plain = trained(tmp_path, steps=1)
    assert not (RunFiles(plain).output / "text_projection").exists()


def test_a_projection_that_does_not_fit_is_named(tmp_path: Path) -> None:
    order = make_order(tmp_path)
    write_projection(torch.nn.Linear(5, TEXT_WIDTH), tmp_path / "narrow")
    with pytest.raises(ModelError, match=f"from 5 to {TEXT_WIDTH}, but the captions are"):
        make_training(of_model(order, text_projection=str(tmp_path / "narrow")))
    save_file({"a": torch.ones(2, 2), "b": torch.ones(2, 2)}, tmp_path / "two.safetensors")
    with pytest.raises(ModelError, match="not one linear layer"):
        load_projection(str(tmp_path / "two.safetensors"))
    with pytest.raises(ModelError, match="does not exist"):
        load_projection(str(tmp_path / "none"))
