"""Defaults that launched trainers have from their guides: what wins, and what stays trained."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from latentmake.config.root import Config, parse
from latentmake.config.trainers import SdTrainer, WanTrainer
from latentmake.data.memo import Memo
from latentmake.plan.run_plan import RunPlan
from latentmake.trainers.launched.order import Resume
from latentmake.trainers.musubi.backend import Musubi
from latentmake.trainers.musubi.order import MusubiOrder
from latentmake.trainers.sd.unet import SdOrder
from latentmake.trainers.sdscripts.backend import SdScripts
from latentmake.trainers.sdscripts.order import SdScriptsOrder
from latentmake.trainers.wan.dit import WanOrder
from musubi_world import RUN, called, make_run, stand_in, write_order
from rows_world import model_of

FLUX = {"architecture": "flux", "layout": "sdscripts", "vae": "v", "checkpoint": "c.safetensors"}
FLUX |= {"text": ["a", "b"]}
SDXL = {**FLUX, "architecture": "sdxl"}
SD1 = {**FLUX, "architecture": "sd1", "text": ["a"]}
LUMINA = {"architecture": "lumina", "vae": "v", "text": ["a"], "checkpoint": "c.safetensors"}
IN_ARGUMENTS = ["--timestep_sampling", "flux_shift", "--guidance_scale", "1.0"]
IN_ARGUMENTS += ["--model_prediction_type", "raw"]
PLAIN_WAN = model_of("wan", "t2v-1.3B")


def config(model: dict[str, Any], trainer: dict[str, Any], tuner: str = "tuner") -> Config:
    kind = "sdscripts" if "checkpoint" in model else "musubi"
    run = {"datasets": RUN, "model": "wan", "resolutions": 64, "trainer": {"kind": kind, **trainer}}
    return parse(
        {
            "datasets": {RUN: {"path": f"data/{RUN}"}},
            "models": {"wan": model},
            "runs": {RUN: run},
            "musubi_tuner": {"path": tuner},
            "sd_scripts": {"path": "sd-scripts"},
        }
    )


def order_of(model: dict[str, Any], **trainer: Any) -> Any:
    kind = SdScriptsOrder if "checkpoint" in model else MusubiOrder
    return kind.of_run(config(model, trainer), RUN)


def arguments_of(model: dict[str, Any], **trainer: Any) -> list[str]:
    order = order_of(model, **trainer)
    backend = Musubi() if isinstance(order, MusubiOrder) else SdScripts()
    return backend.arguments(order, order.places, "sdpa", Resume())


def value(found: list[str], flag: str) -> str | None:
    assert found.count(flag) <= 1, f"{flag} is there twice"
    return found[found.index(flag) + 1] if flag in found else None


# -- command lines ------------------------------------------------------------------------------


def test_an_alpha_follows_the_rank_where_it_is_a_share_and_a_whole_network_learns_more_slowly() -> (
    None
):
    for rank, alpha in ((32, "16"), (8, "4"), (64, "32")):
        assert value(arguments_of(SDXL, network_dim=rank), "--network_alpha") == alpha
    assert value(arguments_of(FLUX, network_dim=64), "--network_alpha") == "1"
    assert value(arguments_of(SDXL, script="sdxl_train"), "--learning_rate") == "1e-05"
    assert value(arguments_of(SDXL), "--learning_rate") == "0.0001"
    assert value(arguments_of(LUMINA, network_dim=64), "--network_alpha") == "64"


def test_the_users_keys_and_arguments_win_and_no_flag_is_there_twice() -> None:
    found = arguments_of(
        FLUX, network_alpha=8, gradient_checkpointing=False, arguments=["--guidance_scale=3.5"]
    )
    assert value(found, "--network_alpha") == "8"
    assert "--gradient_checkpointing" not in found and "--guidance_scale" not in found
    assert "--guidance_scale=3.5" in found and "--timestep_sampling" in found
    found = arguments_of(PLAIN_WAN, arguments=["--seed", "7", "--gradient_checkpointing"])
    assert value(found, "--seed") == "7" and found.count("--gradient_checkpointing") == 1
    found = arguments_of(PLAIN_WAN, seed=0, gradient_checkpointing=False)
    assert value(found, "--seed") == "0" and "--gradient_checkpointing" not in found


def test_arguments_of_an_optimizer_are_left_out_with_another() -> None:
    kandinsky = model_of("kandinsky5", "k5-pro-t2v-5s-sd")
    for optimizer, there in (("adamw8bit", True), ("adamw", True), ("adafactor", False)):
        found = arguments_of(kandinsky, optimizer_type=optimizer)
        assert ("--optimizer_args" in found) == there
    found = arguments_of(kandinsky)
    own = found[found.index("--optimizer_args") + 1 :][:2]
    assert own == ["weight_decay=0.001", "betas=(0.9,0.95)"]


# -- what is trained stays trained --------------------------------------------------------------

# Digests of settings as release 0.2.0 wrote them.
EARLIER: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (PLAIN_WAN, {}, "274594d34c8db7952969a4f12c256c0f3fe35ec4187929f96eab5a545c3c7a66"),
    (
        model_of("wan", "i2v-A14B"),
        {"network_alpha": 16, "learning_rate": 1e-4},
        "70c18260f749aba13aa7a0c82aab6c17777d3bec390c6498b02514bbefcbafe0",
    ),
    (
        model_of("qwen_image", ""),
        {"network_dim": 16},
        "583843313ba69688ebb74c14a9cfaccc5a67f4d121f43554b594431c774d1c29",
    ),
    (
        model_of("z_image", ""),
        {"arguments": ["--gradient_checkpointing", "--seed", "42"]},
        "079769d968a35a6c7245c517ec22e9fb832c1d91cadcad3b439b16f4f5cc1fa2",
    ),
    (
        model_of("kandinsky5", "k5-pro-t2v-5s-sd"),
        {"discrete_flow_shift": None},
        "f6eb9e00ada5f01c45357318ce6782462f08f2fd8d30a31ffa3f80cb90893a09",
    ),
    (FLUX, {}, "45366a3b6525748329227d17b9c3205b4b7a9561165350b222964349d572a09c"),
    (
        FLUX,
        {"arguments": IN_ARGUMENTS, "gradient_checkpointing": True},
        "cf40d24a2f1f24b3d46f8f1c5131f020c0e76f75bf8949b7d7b755839cadb102",
    ),
    (
        SDXL,
        {"network_dim": 8, "seed": 3},
        "b56123ef96e81042df39978c813a35027905009acb38a2cd98f3dd678caad499",
    ),
    (
        SDXL,
        {"script": "sdxl_train"},
        "6d9f15c391a5edeb1fb3887c6fb0bc8fb91ba349b58d3b3763759cd79deedd15",
    ),
    (SD1, {}, "183b4aab0ebad3fa0fd58b393134d20603b7e90650cc2f105e70245a2fc3242a"),
    (LUMINA, {}, "f542a01c388ac5ad7200d426420d679b4a93bad353d4d31f6a6fc96243882628"),
]


@pytest.mark.parametrize(("model", "trainer", "digest"), EARLIER)
def test_settings_have_the_digests_of_earlier_releases(
    model: dict[str, Any], trainer: dict[str, Any], digest: str
) -> None:
    order = order_of(model, **trainer)
    read = type(order).model_validate_json(order.model_dump_json())  # as the job reads it
    assert order.settings_digest() == read.settings_digest() == digest


def test_settings_of_our_own_trainers_have_the_digests_of_earlier_releases() -> None:
    def sd(**keys: Any) -> str:
        trainer = SdTrainer(kind="sd", mixed_precision="no", **keys)  # the default of then
        return SdOrder.model_construct(trainer=trainer, texts={}).settings_digest()

    def wan(**keys: Any) -> str:
        fields: dict[str, Any] = {"texts": {}, "flow_shift": 3.0, "boundary": None}
        trainer = WanTrainer(kind="wan", mixed_precision="bf16", **keys)
        return WanOrder.model_construct(trainer=trainer, **fields).settings_digest()

    assert sd() == "dc485e47d38307a55fb5920f929df26046810bee56a38d64d2786d98a59381c6"
    changed = sd(seed=1, gradient_checkpointing=True)
    assert changed == "970e80fd971611f9734de8fafde8e7cbec9cabf90d5d64ce4961a01d7ada8d7b"
    assert wan() == "555cfddb44a25e681d3b03b320f218118d53ad404605779bceb8d5252fc4bf06"
    changed = wan(rank=4, gradient_checkpointing=False)
    assert changed == "856a2ca688670513657fdeffff327b80912d6b455d128563b511dc75a8af7962"


class Project:
    """A run of Wan with its caches, and a stand-in for musubi-tuner."""

    def __init__(self, root: Path) -> None:
        self.tuner = stand_in(root / "tuner")
        self.lock = make_run(Path.cwd(), tuner=self.tuner).lock
        self.log = Path("log")

    def config(self, trainer: dict[str, Any]) -> Config:
        model = {"task": "t2v-1.3B", "dit": "models/dit.safetensors"}
        model |= {"vae": "models/vae.safetensors", "text": "models/t5.safetensors"}
        settings = {"max_train_epochs": 4, "save_every_n_epochs": 1, **trainer}
        return config(model, settings, str(self.tuner))

    def train(self, **trainer: Any) -> list[str] | None:
        """Train, and return the arguments of the script; None where nothing was to be trained."""
        call = self.tuner / "called.json"
        call.unlink(missing_ok=True)
        order = MusubiOrder.of_run(self.config(trainer), RUN)
        path = write_order(order, Path("order.json"))
        receipt = Path(f"runs/{RUN}/trained.json")
        Musubi().train(path, log=self.log, receipt=receipt, threads=1)
        return called(self.tuner)["argv"] if call.exists() else None

    def plan(self, **trainer: Any) -> RunPlan:
        facts: Any = SimpleNamespace(
            config=self.config(trainer), memo=Memo(None), read_only=False, forced=()
        )
        plan = RunPlan(RUN, {}, lock=json.loads(Path(self.lock).read_text())["digest"])
        Musubi().plan(facts, plan, train=False)
        return plan


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.delenv("STAND_IN", raising=False)
    return Project(tmp_path)


def test_a_default_of_before_that_is_now_asked_for_is_trained(project: Project) -> None:
    assert value(project.train() or [], "--network_alpha") == "1"
    assert project.train(network_alpha=1.0) is None
    assert project.plan(network_alpha=32.0).training_order is not None
    assert value(project.train(network_alpha=32.0) or [], "--network_alpha") == "32"
    assert "takes back the previous result" in project.plan().note
    assert project.train() is None


def test_the_plan_says_in_one_line_which_defaults_a_training_uses(project: Project) -> None:
    plan = project.plan(learning_rate=1e-4, seed=3, gradient_checkpointing=False)
    assert plan.note == (
        f"training of {RUN}: by the guide of Wan: network_dim 32, network_alpha 1, "
        "timestep_sampling shift, discrete_flow_shift 3"
    )
    own = dict.fromkeys(("network_dim", "network_alpha", "learning_rate", "seed"), 1)
    own |= {"timestep_sampling": "uniform", "discrete_flow_shift": None}
    assert project.plan(**own, gradient_checkpointing=True).note == ""
