"""A network of another kind, or names that fit nothing, are refused while planning."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import world
from diffusers import FlowMatchEulerDiscreteScheduler
from huggingface_hub import constants
from latentmake.backends import plan_training
from latentmake.base import digest
from latentmake.base.errors import ModelError, UserError
from latentmake.config.root import parse
from latentmake.config.trainers import SdTrainer
from latentmake.config.weights import Weights
from latentmake.data.memo import Memo
from latentmake.models.inspection import check_kind
from latentmake.plan.facts import Facts
from latentmake.plan.planner import make_plan
from latentmake.runs.order import read_order
from latentmake.trainers.sd.recipe import load_noise_schedule
from latentmake.trainers.sd.unet import SdOrder, parameter_names, shapes_of, start_of
from safetensors.numpy import save_file
from trainer_world import objective_in

REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def project(tmp_path: Path, micro: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(micro, "models/micro")
    world.make_dataset(Path("data/shapes"))
    values = world.config()
    values["runs"]["tiny"]["trainer"] = world.training()
    return values


def plan(values: dict[str, Any]) -> SdOrder:
    facts = Facts(parse(values), Memo(None))
    planned = make_plan(facts, ["tiny"]).runs["tiny"]
    plan_training(facts, planned)
    assert planned.training_order is not None
    return read_order(planned.training_order, SdOrder)


def lone(name: str) -> str:
    """Copy a network's weights to where no configuration tells what they are."""
    (file,) = Path(f"models/micro/{name}").glob("*.safetensors")
    Path(f"alone/{name}").mkdir(parents=True)
    return str(shutil.copy(file, f"alone/{name}"))


@pytest.mark.parametrize(
    "place", [lambda name: f"models/micro/{name}", lone], ids=["folder", "file"]
)
@pytest.mark.parametrize(
    ("key", "name"),
    [
        *(("vae", "unet"), ("vae", "text_encoder"), ("unet", "vae"), ("unet", "text_encoder")),
        *(("text", "unet"), ("text", "vae")),
    ],
)
def test_a_network_of_another_kind_is_refused(
    project: dict[str, Any], key: str, name: str, place: Callable[[str], str]
) -> None:
    project["models"]["micro"][key] = path = place(name)
    with pytest.raises(ModelError) as error:
        plan(project)
    words = {"vae": "a VAE", "unet": "a UNet", "text": "a text encoder"}
    assert str(error.value).startswith(f"models.micro.{key}: {path} holds ")
    assert f", not {words[key]}; " in str(error.value)
    assert not Path(".latentmake/orders").exists()


@pytest.mark.parametrize("name", ["vae", "unet", "text_encoder"])
def test_the_right_network_passes_as_folder_and_as_file(project: dict[str, Any], name: str) -> None:
    for path in (f"models/micro/{name}", lone(name)):
        check_kind(Weights(path=path), name.removesuffix("_encoder"), "here")


def test_a_complete_checkpoint_of_a_transformer_passes_for_its_network_and_vae(
    tmp_path: Path,
) -> None:
    parts = ("model.diffusion_model.joint_blocks.0.x", "first_stage_model.decoder.conv_in.weight")
    for number in (1, 2):
        tensors = {name: np.zeros(1, np.float32) for name in parts[:number]}
        save_file(tensors, tmp_path / f"{number}.safetensors")
    checkpoint, alone = (Weights(path=f"{tmp_path}/{number}.safetensors") for number in (2, 1))
    check_kind(checkpoint, "unet", "here")
    check_kind(checkpoint, "vae", "here")
    check_kind(alone, "unet", "here")
    with pytest.raises(ModelError, match="a DiT, not a VAE"):
        check_kind(alone, "vae", "here")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target_modules": ["to_q", "to_kk"]}, "target_modules: no layer of the UNet is "),
        ({"target_modules": ["o_q"]}, "target_modules: no layer of the UNet is named `o_q`"),
        ({"adapter": "parts", "parts": ["up_blocks.3"]}, "parts: this UNet has no `up_bl"),
        ({"adapter": "full", "reinitialize": ["mid_block", "down_blocks.7"]}, "reinitialize"),
    ],
)
def test_names_that_fit_nothing_are_refused(
    project: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    project["runs"]["tiny"]["trainer"].update(changes)
    with pytest.raises(UserError) as error:
        plan(project)
    assert str(error.value).startswith(f"runs.tiny.trainer.{said}")


def test_a_lora_to_begin_from_counts_by_its_content_and_is_checked(project: dict[str, Any]) -> None:
    trainer = project["runs"]["tiny"]["trainer"]
    trainer |= {"rank": 2, "target_modules": ["attn1.to_q"]}
    plain = plan(project)
    ending = "attn1.to_q.weight"
    shapes = {name: x for name, x in shapes_of(plain.unet).items() if name.endswith(ending)}

    def write(place: str, rank: int = 2, value: float = 0, wider: int = 0) -> None:
        tensors = {}
        for name, (outputs, inputs) in shapes.items():
            layer = f"lora_unet_{name.removesuffix('.weight').replace('.', '_')}"
            tensors[f"{layer}.lora_down.weight"] = np.full((rank, inputs + wider), value)
            tensors[f"{layer}.lora_up.weight"] = np.full((outputs, rank), value)
        save_file(tensors, place)

    def begun(place: str) -> tuple[str, str]:
        trainer["init_lora"] = place
        order = plan(project)
        return order.weights, order.settings_digest()

    write("one.safetensors")
    shutil.copy("one.safetensors", "same.safetensors")
    write("two.safetensors", value=1)
    one, same, two = (begun(f"{name}.safetensors") for name in ("one", "same", "two"))
    assert one == same and two[0] not in (one[0], plain.weights) and one[0] != plain.weights
    assert one[1] == two[1] == plain.settings_digest()
    facts = Facts(parse(project), Memo(None))
    planned = make_plan(facts, ["tiny"]).runs["tiny"]
    plan_training(facts, planned)
    assert planned.note == "training of tiny: begins from the LoRA two.safetensors"
    write("other.safetensors", rank=3)
    write("wider.safetensors", wider=1)
    for name, fault in (
        ("other.safetensors", "it has the rank 3"),
        ("wider.safetensors", "it is of another network"),
        ("none", "No such file"),
    ):
        with pytest.raises(UserError) as error:
            begun(name)
        assert str(error.value).startswith(f"runs.tiny.trainer.init_lora: {name} cannot be begun")
        assert fault in str(error.value) and "\n" not in str(error.value)
        assert ("its rank must be" in str(error.value)) == (name != "none")
    trainer["adapter"] = "full"
    with pytest.raises(UserError, match="`init_lora` needs `adapter: lora`"):
        begun("one.safetensors")


def test_names_are_those_of_the_network(project: dict[str, Any]) -> None:
    from latentmake.trainers.sd.network import load_unet

    place = Weights(path="models/micro/unet")
    names = [name for name, _ in load_unet(place).named_parameters()]
    assert sorted(parameter_names(place) or []) == sorted(names)
    assert parameter_names(Weights(path="models/micro/vae")) is None
    for changes in (
        {"target_modules": ["attn1.to_q", "conv_in", "time_embedding.linear_1"]},
        {"adapter": "parts", "parts": ["norms", "cross_attention_qk", "up_blocks.1"]},
    ):
        project["runs"]["tiny"]["trainer"].update(changes)
        assert plan(project).weights


def test_flow_matching_is_not_trained_as_diffusion(project: dict[str, Any]) -> None:
    FlowMatchEulerDiscreteScheduler().save_pretrained("models/micro/scheduler")
    assert plan(project).weights
    project["runs"]["tiny"]["trainer"]["prediction_type"] = "epsilon"
    with pytest.raises(ModelError, match="is one of flow matching, not one of `epsilon`"):
        plan(project)
    with pytest.raises(ModelError, match="is one of flow matching"):
        objective_in(Path("models/micro/scheduler"), prediction_type="epsilon")


def test_a_network_on_the_hub_has_the_schedule_of_its_repository(
    project: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = {"hub": "someone/something", "revision": REVISION, "subfolder": "unet"}
    project["models"]["micro"]["unet"] = hub
    order = plan(project)
    assert order.scheduler == ""
    unet = order.unet.model_copy(update={"revision": REVISION[::-1]})
    other = order.model.model_copy(update={"unet": unet})
    digests = [
        start_of(model, order.trainer, "trainer", digest.of_file)[0]
        for model in (order.model, other)
    ]
    assert digests[0] == order.weights != digests[1]
    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=f"^someone/something@{REVISION}.*`scheduler`") as error:
        load_noise_schedule(order)
    assert "\n" not in str(error.value)
    there = cache / "models--someone--something/snapshots" / REVISION / "scheduler"
    shutil.copytree("models/micro/scheduler", there)
    config = json.loads((there / "scheduler_config.json").read_bytes())
    found = load_noise_schedule(order)
    assert found.config.beta_schedule == config["beta_schedule"]


def test_an_optimizer_that_finds_its_rate_begins_at_one() -> None:
    for optimizer in ("prodigy", "dadaptation"):
        assert SdTrainer(kind="sd", optimizer=optimizer).learning_rate == 1.0
        assert SdTrainer(kind="sd", optimizer=optimizer, learning_rate=0.5).learning_rate == 0.5
    assert SdTrainer(kind="sd", optimizer="lion").learning_rate == 1e-4
