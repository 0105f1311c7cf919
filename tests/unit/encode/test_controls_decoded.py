"""Controls and layers are what the plan saw and what the scripts can read, or are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from controlled_world import configured, draw, put
from latentmake.base.errors import SourceError
from latentmake.config.machines import MusubiTuner
from latentmake.config.root import Config
from latentmake.data.memo import Memo
from latentmake.encode.reading import Reading, Sample, identify, samples_of
from latentmake.geometry.buckets import Size
from latentmake.plan.facts import Facts
from latentmake.plan.orders import Order, Target, Work
from PIL import Image


def order_of(kind: str, config: Config, work: Work) -> Order:
    section, model = config.datasets["pictures"], config.models["model"]
    tuner = MusubiTuner(path="musubi-tuner")
    return Order(kind, "pictures", "model", section, model, {}, (work,), musubi_tuner=tuner)


@pytest.fixture
def order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Order:
    """An order for the text of one item with two controls, which lie in a dataset on the disk."""
    monkeypatch.chdir(tmp_path)
    put("cat")
    for number in range(2):
        draw(f"control/cat_{number}.png", number)
    config = configured("qwen_image_edit", control_directory="control")
    facts = Facts(config, Memo(None))
    (item,) = facts.items("pictures", "model")[0]
    source = item.inputs("text@64", facts.layout("model"))
    work = Work(source, (Target("text@64", "cache/cat.safetensors", None),))
    return order_of("text", config, work)


def made(order: Order) -> list[Sample]:
    reading = Reading(order.items[0])
    identify(order, "recipe", reading)
    reading.missing = reading.keys
    return samples_of(order, reading)


def text_of(order: Order) -> object:
    return made(order)[0].content


def test_a_damaged_control_is_named(order: Order) -> None:
    path = Path("control/cat_1.png")
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(SourceError, match=r"^control/cat_1\.png: "):
        text_of(order)


def test_an_image_that_got_another_size_after_the_plan_is_named(order: Order) -> None:
    draw("data/cat.png", size=(48, 64))
    with pytest.raises(SourceError, match=r"^data/cat\.png: was changed after the build began"):
        text_of(order)


def layered(mode: str) -> list[Sample]:
    put("cat")
    draw("data/cat_1.png", 2)
    with Image.open("data/cat_1.png") as image:
        image.convert(mode).save("data/cat_2.png")
        image.convert("RGBA").save("data/cat_1.png")
    config = configured("qwen_image_layered", multiple_target=True)
    facts = Facts(config, Memo(None))
    (item,) = facts.items("pictures", "model")[0]
    work = Work(item.inputs("64", facts.layout("model")), (Target("64", "x", None, Size(64, 64)),))
    return made(order_of("latents", config, work))


def test_layers_have_an_alpha_channel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert layered("RGBA") == []
    for mode in ("RGB", "P"):
        with pytest.raises(SourceError) as caught:
            layered(mode)
        line = str(caught.value)
        assert line == "data/cat_2.png: is a layer without an alpha channel; save it as RGBA"
