"""Pictures asked for after a training are drawn from weights that are there; no step is trained."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accelerate.state import AcceleratorState
from latentmake.config.trainers import SdTrainer
from latentmake.config.weights import Weights
from latentmake.training.loop.order import Prompt, picture_reasons, read_index, wanted
from latentmake.training.loop.samples import draw_later
from latentmake.training.order import Record, RunFiles
from latentmake.training.sd.recipe import SdRecipe
from latentmake.training.sd.unet import SdOrder
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trainer_world import make_order, make_training, make_unet, train, write_order

pytestmark = pytest.mark.usefixtures("preloading")

SETTINGS: dict[str, Any] = {
    "steps": 4,
    "learning_rate": 1e-2,
    "save_every_n_steps": 3,
    "samples": {"num_inference_steps": 2, "every": 1},
}


@pytest.fixture(autouse=True)
def _own_precision() -> Iterator[None]:
    """accelerate keeps the number format of a process."""
    yield
    AcceleratorState._reset_state(True)


def asking(order: SdOrder, *numbers: int, **changes: Any) -> SdOrder:
    """Ask for the pictures of some prompts, by number, with other settings of the samples."""
    root = Path(order.manifest).parent
    prompts = [
        Prompt(prompt=f"a shape {n}", text=str(root / f"cache/text/{n}.safetensors"))
        for n in numbers
    ]
    said = order.trainer.samples.model_dump() | {"prompts": [x.prompt for x in prompts]} | changes
    trainer = SdTrainer(**{**order.trainer.model_dump(), "samples": said})
    return order.model_copy(update={"prompts": prompts, "trainer": trainer})


def build(order: SdOrder, root: Path) -> str:
    """Do what the build does, and return the log."""
    path = write_order(order, root / "order.json")
    train(path, log=root / "log", receipt=root / "receipt.json", threads=1)
    return (root / "log").read_text()


def files(order: SdOrder) -> dict[str, tuple[bytes, int]]:
    """Return content and mtime of all weights."""
    output = Path(order.output)
    return {
        str(path): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(output.rglob("*"))
        if path.suffix in (".safetensors", ".pt")
    }


def pictures(order: SdOrder) -> dict[str, Any]:
    """Return the pixels of all pictures, by their names."""
    return {
        path.name: np.asarray(Image.open(path), np.float32)
        for path in RunFiles(order).samples.glob("*.png")
    }


def test_a_new_prompt_is_drawn_from_the_weights_that_are_there(tmp_path: Path) -> None:
    first = asking(make_order(tmp_path, prompts=True, **SETTINGS), 0, 1)
    build(first, tmp_path)
    layout, before = RunFiles(first), files(first)
    shown = {path.name: path.read_bytes() for path in layout.samples.glob("*.png")}
    assert len(shown) == 10
    # In front of the others, whose pictures get other names and stay as they are.
    more = asking(first, 2, 0, 1)
    assert picture_reasons(more, wanted(more))
    log = build(more, tmp_path)
    assert "already trained on exactly this" in log
    assert [line for line in log.splitlines() if "sample picture of step" in line] == [
        f"tiny: 1 sample picture of step {step} drawn" for step in (0, 3, 4)
    ]
    assert files(more) == before
    index = read_index(layout.samples)
    assert index is not None
    assert index.prompts == ["a shape 2", "a shape 0", "a shape 1"]
    assert [[name is not None for name in row] for row in index.files] == [
        [step in (0, 3, 4), True, True] for step in range(5)
    ]
    for step, row in zip(index.steps, index.files, strict=True):
        for number, name in enumerate(row[1:]):
            assert name is not None
            before_it = shown[f"step-{step:06d}_0{number}.png"]
            assert (layout.samples / name).read_bytes() == before_it
    assert {path.name for path in layout.samples.glob("*.png")} == {
        name for row in index.files for name in row if name
    }
    with Image.open(layout.grid) as grid:
        assert grid.width > 3 * 128
    events = EventAccumulator(str(layout.logs / "samples"), size_guidance={"images": 0})
    events.Reload()
    assert [event.step for event in events.Images("samples/00")] == [0, 3, 4]
    assert [event.step for event in events.Images("samples/02")] == [0, 1, 2, 3, 4]
    assert not picture_reasons(more, wanted(more))
    # Taken back, nothing is drawn.
    for order in (first, asking(more, 0, every=2)):
        assert "of step" not in build(order, tmp_path)
    index = read_index(layout.samples)
    assert index is not None
    assert (index.steps, index.prompts) == ([0, 2, 4], ["a shape 0"])
    assert files(more) == before


@pytest.mark.parametrize(
    "settings",
    [
        {"rank": 2, "alpha": 1.0, "mixed_precision": "bf16", "target_modules": ["to_q", "conv1"]},
        {
            "adapter": "parts",
            "parts": ["cross_attention"],
            "reinitialize": ["conv_in"],
            "ema_decay": 0.9,
        },
    ],
    ids=["lora", "parts"],
)
def test_a_picture_drawn_afterwards_is_the_one_that_the_training_draws(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    late = asking(make_order(tmp_path, prompts=True, **{**SETTINGS, **settings}), 0)
    if settings.get("adapter") == "parts":
        make_unet(tmp_path / "wide", cross_attention_dim=24)
        wide = {"unet": Weights(path=str(tmp_path / "wide")), "text_projection": "new"}
        late = late.model_copy(update=wide)
    early = asking(late, 0, 1, 2).model_copy(update={"output": str(tmp_path / "early")})
    for order in (late, early):
        make_training(order).run()
    late = asking(late, 2, 0, 1)
    draw_later(SdRecipe(late))
    drawn, expected = (pictures(order) for order in (late, early))
    columns = [early.picture_keys().index(key) for key in late.picture_keys()]
    for step in range(5):
        for number, column in enumerate(columns):
            name = f"step-{step:06d}_0{number}.png"
            assert (name in drawn) == (number == 1 or step in (0, 3, 4))
            if name in drawn:
                other = expected[f"step-{step:06d}_0{column}.png"]
                np.testing.assert_allclose(drawn[name], other, rtol=0, atol=1)


def test_digests_are_those_of_earlier_releases(tmp_path: Path) -> None:
    """What was trained by them is trained."""
    order = make_order(
        tmp_path, prompts=True, steps=12, rank=4, alpha=2.0, seed=7, samples={"guidance_scale": 2.0}
    )
    assert wanted(order).model_dump() == {
        "data": "d" * 64,
        "settings": "609d02f4425f9b7f2a57f7c516863412384065ebcadafe79668b13bd5bc881f0",
        "weights": "w" * 64,
        "resumed": "",
        "version": 1,
    }
    assert (
        order.pictures_digest()
        == "e405daa54d1dca568f612bc7dcd2f83edf44fe7167540837e316334ea6d11f99"
    )
    assert [key[:16] for key in order.picture_keys()] == ["682fb917e06c06c6", "2707118d3bc88e3c"]


@pytest.mark.parametrize(
    "settings",
    [
        "e9b301ed4a79a61607362b15b854024f7012c548885bac64f9ff2eb8bf8a572a",  # attention: flash
        "6a970c13c1ce86dc54f55b151c959e09d77df6d9fa29dbd8b28bfa4894b65edd",  # attention: xformers
    ],
)
def test_a_training_with_a_key_that_is_gone_stays_trained(tmp_path: Path, settings: str) -> None:
    chosen: dict[str, Any] = {"steps": 12, "rank": 4, "alpha": 2.0, "seed": 7}
    samples = {"guidance_scale": 2.0}
    order = make_order(tmp_path, prompts=True, samples=samples, **chosen)
    plain, files = wanted(order), RunFiles(order)
    record = Record(
        wanted=plain.model_copy(update={"settings": settings, "resumed": "e" * 64}),
        steps=12,
        loss_start=1.0,
        loss_end=0.5,
        seconds=1.0,
    )
    record.write(files.record)
    files.weights.write_bytes(b"")
    assert files.trained(wanted(order)) == record
    other = make_order(tmp_path, prompts=True, samples=samples, **{**chosen, "seed": 8})
    assert files.trained(wanted(other)) is None
    files.record.unlink()
    assert wanted(order) == plain


def test_a_default_is_changed_with_the_version_alone() -> None:
    """Settings that have their default, or had it first, are no part of the digest."""
    defaults = SdTrainer(kind="sd").model_dump(mode="json", exclude={"samples"})
    defaults |= SdTrainer.former_defaults
    assert {key: defaults[key] for key in DEFAULTS} == DEFAULTS


DEFAULTS = {
    "adapter": "lora",
    "rank": 8,
    "alpha": None,
    "target_modules": ["to_q", "to_k", "to_v", "to_out.0"],
    "lora_dropout": 0.0,
    "parts": [],
    "reinitialize": [],
    "steps": None,
    "epochs": None,
    "optimizer": "adamw",
    "optimizer_arguments": {},
    "learning_rate": 1e-4,
    "lr_scheduler": "constant",
    "lr_warmup_steps": 0,
    "lr_min_ratio": 0.0,
    "train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "max_grad_norm": 1.0,
    "weight_decay": 0.01,
    "prediction_type": None,
    "snr_gamma": None,
    "noise_offset": 0.0,
    "ema_decay": None,
    "mixed_precision": "no",
    "gradient_checkpointing": False,
    "torch_compile": False,
    "deterministic": False,
    "seed": 0,
}
