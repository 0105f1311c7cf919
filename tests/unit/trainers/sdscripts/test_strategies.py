"""Encoding by sd-scripts' own classes: faults are named, what is done is kept, sources count."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from latentmake.base.errors import ConfigError, DeviceError, ModelError, SourceError, TrainingError
from latentmake.config.root import parse
from latentmake.formats import cachefile
from latentmake.plan.orders import Order
from safetensors.torch import save_file
from strategies_world import STEMS, encode, loads, make, plan, set_moods

pytestmark = pytest.mark.usefixtures("own_folder")

SCRIPTS = Path("sd-scripts")


def orders(values: dict[str, Any]) -> dict[str, Order]:
    found = plan(values).orders
    assert len({order.kind for order in found}) == len(found)
    return {order.kind: order for order in found}


def recipes(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {kind: order.recipe for kind, order in orders(values).items()}


def stems() -> set[str]:
    return {path.name.partition("_")[0] for path in Path("cache").rglob("*_lumina.npz")}


def test_each_bad_item_is_named_and_stops_no_other() -> None:
    values = make()
    set_moods(SCRIPTS, bee="raise", cat="nan", dog="other", eel="nothing")
    said: list[str] = []
    with pytest.raises(SourceError, match=r"^4 of 6 items are faulty"):
        encode(orders(values)["latents"], said)
    for stem, fault in {
        "bee": "RuntimeError: Kernel size",
        "cat": r"the encoder returned NaN or infinity (latents_8x8)",
        "dog": "its file holds latents_8x8, original_size_8x8, not crop_ltrb",
        "eel": "FileNotFoundError",
    }.items():
        assert any(f"faulty: data/{stem}.png" in line and fault in line for line in said)
    assert loads(SCRIPTS) == ["ae.safetensors torch.bfloat16 " + str(driver())]
    set_moods(SCRIPTS)
    receipt = encode(orders(values)["latents"])
    assert receipt.counts["encoded"] == 4
    assert stems() == {*STEMS} and "latents" not in orders(values)
    assert not list(Path(".latentmake/encoding").iterdir())


def test_a_device_that_another_program_fills_for_a_while_is_blamed_and_no_item() -> None:
    values = make()
    set_moods(SCRIPTS, crowded=(2, 4))
    with pytest.raises(DeviceError, match=r"CUDA out of memory.*finished files are kept"):
        encode(orders(values)["latents"])
    set_moods(SCRIPTS)
    assert encode(orders(values)["latents"]).counts["encoded"] == 2


def driver() -> Path:
    from latentmake.trainers import launched as external

    return Path(str(external.__file__)).with_name("driver.py")


def test_noise_of_a_sample_depends_on_the_item_and_the_seed_alone() -> None:
    values = make(posterior_seed=3)
    encode(orders(values)["latents"])
    before = {path: path.read_bytes() for path in Path("cache").rglob("*.npz")}
    for path in before:
        path.unlink()
    Path("data/ant.png").unlink()
    encode(orders(values)["latents"])
    ant = {path for path in before if path.name.startswith("ant")}
    assert {path: path.read_bytes() for path in before.keys() - ant} == {
        path: data for path, data in before.items() if path not in ant
    }
    values["models"]["tiny"]["posterior_seed"] = 4
    assert len(orders(values)["latents"].items) == 5


def test_options_reach_the_tokenizer_and_an_empty_caption_may_be_zeros() -> None:
    values = make(text_arguments=["--system_prompt", "say", "--gemma2_max_token_length=6"])
    values["datasets"]["shapes"]["empty_caption"] = "allow"
    Path("data/ant.txt").write_text("")
    set_moods(SCRIPTS, **{"a bee": "zeros"})
    with pytest.raises(SourceError, match=r"data/bee.txt.*nothing but zeros \(hidden_state\)"):
        encode(orders(values)["text"])
    set_moods(SCRIPTS)
    encode(orders(values)["text"])
    path = Path("cache/shapes/tiny/text/ant_lumina_te.npz")
    with np.load(path) as found:
        assert found["hidden_state"].shape == (6, 4) and found["input_ids"][0] == 3
        assert {*found.files} == {"hidden_state", "attention_mask", "input_ids"}
    cachefile.read_header(path)
    assert "text" not in orders(values)
    values["models"]["tiny"]["text_arguments"][1] = "tell"
    assert len(orders(values)["text"].items) == 6 and "latents" in orders(values)


def test_sources_that_the_classes_import_count_and_no_others() -> None:
    values = make()
    before = recipes(values)
    for name in ("library/unrelated.py", "lumina_train_network.py", "docs.md"):
        (SCRIPTS / name).write_text("import library.unrelated  # as it was updated\n")
    assert recipes(values) == before
    (SCRIPTS / "library/device.py").write_text("# train_util imports it\n")
    after = recipes(values)
    assert all(after[kind] != before[kind] for kind in ("latents", "text"))


def test_weights_count_by_content_and_must_be_of_their_kind() -> None:
    values = make()
    before = recipes(values)
    Path("models/gemma.safetensors").rename("models/renamed.safetensors")
    values["models"]["tiny"]["text"] = "models/renamed.safetensors"
    assert recipes(values) == before
    save_file({"post_feedforward_layernorm.weight": torch.ones(3)}, "models/renamed.safetensors")
    after = recipes(values)
    assert after["latents"] == before["latents"] and after["text"] != before["text"]
    values["models"]["tiny"]["text"] = "models/dit.safetensors"
    with pytest.raises(
        ModelError, match=r"^models.tiny.text: .*holds no `text` of Lumina Image 2.0"
    ):
        plan(values)
    values["models"]["tiny"] |= {"text": "models/none.safetensors"}
    with pytest.raises(ModelError, match=r"^models.tiny.text: .*this model does not exist"):
        plan(values)


def test_an_sd_scripts_that_does_not_know_the_architecture_is_named_while_planning() -> None:
    values = make()
    (SCRIPTS / "library/strategy_lumina.py").unlink()
    with pytest.raises(
        TrainingError, match=r"sd-scripts has no library/strategy_lumina.py; update"
    ):
        plan(values)
    (SCRIPTS / "lumina_train_network.py").unlink()
    with pytest.raises(TrainingError, match=r"there is no lumina_train_network.py in this folder"):
        plan(values)


HUNYUAN = {"architecture": "hunyuan_image", "text": ["a", "b"]}
WAN = {"architecture": None, "task": "t2v-1.3B"}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"layout": "plain", "checkpoint": None}, "leave out `layout`"),
        ({"encoder": "latentmake"}, "`encoder: latentmake` is not for Lumina"),
        ({"posterior": "mean"}, "leave out `posterior`"),
        ({"task": "t2v-14B"}, "`task` is only for Wan"),
        ({"text": ["a", "b"]}, "has 1 text encoder"),
        ({"text": {"path": "a", "max_length": 8}}, "takes a path only: leave out `max_length`"),
        ({"text_arguments": ["--gemma2_max_token_length", "many"]}, "invalid int value: 'many'"),
        ({"text_arguments": ["--system_prompt"]}, "--system_prompt: expected one argument"),
        ({"latents_arguments": ["--vae_chunk_size", "9"]}, "`latents_arguments`: --vae_chunk_size"),
        (HUNYUAN | {"dtype": "float32"}, "decides about `dtype`"),
        ({"vae": None}, "models.tiny.vae: this key is missing"),
        (WAN | {"encoder": "sdscripts"}, "`encoder: sdscripts` is not for"),
    ],
)
def test_keys_that_these_encoders_cannot_have_are_refused(
    model: dict[str, Any], message: str
) -> None:
    values = make()
    values["models"]["tiny"] |= model
    values["models"]["tiny"] = {k: v for k, v in values["models"]["tiny"].items() if v is not None}
    with pytest.raises(ConfigError) as error:
        parse(values)
    assert message in str(error.value)


def test_a_run_needs_sd_scripts_and_fitting_steps() -> None:
    values = make()
    with pytest.raises(ConfigError, match=r"^sd_scripts: this key is missing"):
        parse({key: value for key, value in values.items() if key != "sd_scripts"})
    steps = {"fit": "bucket", "bucket_reso_steps": 32, "min_bucket_reso": 64}
    values["datasets"]["shapes"] |= steps
    with pytest.raises(ConfigError, match="32 is not a multiple of 64, as sd-scripts needs for lu"):
        parse(values)


def test_the_driver_imports_nothing_of_this_package() -> None:
    code = ast.parse(driver().read_text(encoding="utf-8"))
    names = {
        name
        for node in ast.walk(code)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (getattr(node, "module", None), *(each.name for each in node.names))
    }
    assert names and not any(str(name).startswith("latentmake") for name in names)
