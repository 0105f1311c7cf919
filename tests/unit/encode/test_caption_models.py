"""Captioners of each kind, of random weights, through their real classes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import captioner_world as world
import numpy as np
import pytest
import torch
from captioner_world import picture, sample, settings
from latentmake.base.errors import ModelError
from latentmake.encode.encoders import captions as module
from latentmake.encode.encoders.captions import ChatModel, captions, load_captioner, sized
from latentmake.encode.encoders.tagger import read_tags, spaced, square
from latentmake.models.captioner_recipe import network_of
from latentmake.plan.orders import Order
from order_world import silent
from PIL import Image
from refusals import refused

CPU = torch.device("cpu")
LANGUAGE = tuple(name for name in world.MAKERS if name != "tagger")
CHATS = ("qwen", "smolvlm", "llava")
pytestmark = pytest.mark.usefixtures("one_thread")


class Nets:
    """Folders of captioners by kind; a test skips if its kind needs packages that are missing.

    `test_caption_packages.py` runs this module again where they are there.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        for name, maker in world.MAKERS.items():
            if name not in world.lacking():
                maker(root / name)

    def __truediv__(self, path: str) -> Path:
        if path.partition("/")[0] in world.lacking():
            pytest.skip("it needs the packages of envs/captioners.lock")
        return self.root / path


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> Nets:
    return Nets(tmp_path_factory.mktemp("nets"))


def write(folder: Path, *pixels: Any, **keys: Any) -> list[str]:
    """Return the answers for pictures, encoded together."""
    dataset = SimpleNamespace(captioners={"it": settings(folder, **keys)})
    order = SimpleNamespace(model="it", dataset_settings=dataset)
    loaded = captions(cast(Order, order), CPU, silent)
    samples = [sample(each, number) for number, each in enumerate(pixels)]
    results = list(loaded.encode(samples))
    assert all(tensors == {} and [*named] == ["caption"] for tensors, named in results)
    return [named["caption"] for _, named in results]


PICTURES = [picture(number) for number in range(4)]


@pytest.mark.parametrize("name", [*world.MAKERS])
def test_a_batch_gives_what_single_pictures_give_again_and_again(nets: Nets, name: str) -> None:
    together = write(nets / name, *PICTURES)
    assert together == write(nets / name, *PICTURES)
    samples = [sample(each) for each in PICTURES]
    one = load_captioner(settings(nets / name), CPU, silent)
    with torch.inference_mode():
        assert together == [one([each])[0] for each in samples]
    assert len({*together}) > 1, "answers depend on the picture"
    assert all(answer == answer.strip() and "<" not in answer[:1] for answer in together)


@pytest.mark.parametrize("name", LANGUAGE)
def test_the_prompt_counts(nets: Nets, name: str) -> None:
    prompts = ("a photo of", "what does the big dog")
    if name == "florence":
        prompts = ("<CAPTION>", "<DETAILED_CAPTION>")
    first, second = (write(nets / name, *PICTURES, prompt=prompt) for prompt in prompts)
    assert first != second
    answers = write(nets / name, *PICTURES, prompt=prompts[0], max_new_tokens=1)
    begins = name.startswith("blip")  # the prompt is the beginning of its caption
    assert all(answer.startswith(prompts[0]) == begins for answer in answers)
    assert all(len(answer.removeprefix(prompts[0]).split()) <= 1 for answer in answers)


@pytest.mark.parametrize("name", ["blip", "blip2"])
def test_a_question_is_no_part_of_its_answer(nets: Nets, name: str) -> None:
    question = "what does the dog ?"
    (answer,) = write(nets / name, PICTURES[0], prompt=question)
    assert answer and question not in answer


@pytest.mark.parametrize("name", LANGUAGE)
def test_a_temperature_draws_by_the_seed_and_the_picture(nets: Nets, name: str) -> None:
    before = torch.random.get_rng_state()
    drawn = write(nets / name, *PICTURES, temperature=2.0)
    assert torch.equal(before, torch.random.get_rng_state())
    assert drawn != write(nets / name, *PICTURES)
    assert drawn == write(nets / name, *PICTURES, temperature=2.0)
    assert drawn[:2] == write(nets / name, *PICTURES[:2], temperature=2.0)
    assert drawn != write(nets / name, *PICTURES, temperature=2.0, seed=1)


@pytest.mark.parametrize("name", [*world.MAKERS])
def test_a_clip_is_several_pictures_or_its_middle_frame(nets: Nets, name: str) -> None:
    clip = picture(5, 30, 44, 3)
    (answer,) = write(nets / name, clip)
    sees_all = name in CHATS
    assert (answer == write(nets / name, clip[1])[0]) is not sees_all
    other = np.concatenate([clip[:2], 255 - clip[2:]])
    assert (write(nets / name, other) == [answer]) is not sees_all


def test_a_task_that_finds_objects_gives_their_names(nets: Nets) -> None:
    network = settings(nets / "florence", prompt="<OD>")
    model = module.TaskModel(network_of(network), network, CPU, torch.float32)
    found = {"<OD>": {"bboxes": [[0, 0, 1, 1]] * 2, "labels": ["cat", "dog"]}}
    model.processor.post_process_generation = lambda **_: found
    assert model.write([sample(PICTURES[0])]) == ["cat, dog"]


def test_fewer_tokens_than_places_are_written(nets: Nets) -> None:
    (answer,) = write(nets / "blip", PICTURES[0], max_new_tokens=500)
    assert len(answer.split()) < 32


def test_a_large_picture_is_scaled_down_and_a_small_one_stays() -> None:
    assert sized(picture(0, 30, 44), 22).size == (22, 15)
    assert sized(picture(0, 1, 500), 100).size == (100, 1)
    for longest in (None, 44, 90):
        assert np.array_equal(sized(PICTURES[0], longest), PICTURES[0])


def test_the_size_of_the_picture_counts(nets: Nets) -> None:
    assert write(nets / "qwen", *PICTURES, image_size=8) != write(nets / "qwen", *PICTURES)


# -- chats ----------------------------------------------------------------------------------------

TEXT_ONLY = "{% for message in messages %}{{ message['content'] | trim }} {% endfor %}"
PUTS_PICTURE = TEXT_ONLY.replace("{{ message", "<|image_pad|> {{ message")
PARTS_ONLY = (
    "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'text' "
    "%}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)


def chat(folder: Path, template: str) -> ChatModel:
    own = settings(folder, prompt="what is it ?")
    model = ChatModel(network_of(own), own, CPU, torch.float32)
    model.processor.chat_template = template
    return model


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (world.QWEN_TEMPLATE, "<|vision_start|><|image_pad|><|vision_end|>what is it ?<|im_end|>"),
        (TEXT_ONLY, "<|image_pad|>\nwhat is it ? "),
        (PUTS_PICTURE, "<|image_pad|> what is it ? "),
    ],
)
def test_a_chat_has_its_picture_in_each_form_of_template(
    nets: Nets, template: str, text: str
) -> None:
    model = chat(nets / "qwen", template)
    assert text in model._message(1)
    assert model._message(1).count("<|image_pad|>") == 1
    assert model.write([sample(PICTURES[0])])[0]


def test_a_template_without_pictures_is_refused(nets: Nets) -> None:
    model = chat(nets / "qwen", PARTS_ONLY)
    assert "takes no picture" in refused(lambda: model._message(1), kind=ModelError)


# -- tags -----------------------------------------------------------------------------------------


def test_tags_are_those_of_timm_above_the_thresholds(nets: Nets) -> None:
    """The pixels are prepared as wdv3_timm.py does, with timm's own transform."""
    timm = pytest.importorskip("timm")
    model = timm.create_model(f"local-dir:{nets / 'tagger'}", pretrained=True).eval()
    config = timm.data.resolve_data_config(model.pretrained_cfg, model=model)
    transform = timm.data.create_transform(**{**config, "crop_pct": 1.0})
    canvas = Image.new("RGB", (44, 44), (255, 255, 255))
    canvas.paste(Image.fromarray(PICTURES[0]), (0, 7))
    with torch.no_grad():
        logits = model(transform(canvas)[None][:, [2, 1, 0]])
    probabilities = dict(zip(world.TAGS, logits[0].sigmoid().tolist(), strict=True))
    general = sorted(("1girl", "long_hair", ">_<"), key=lambda tag: -probabilities[tag])
    expected = [*general, "sks_(game)"]
    keys = {"general": 0.0, "character": 0.0}
    (found,) = write(nets / "tagger", PICTURES[0], thresholds=keys, underscores=True)
    assert found.split(", ") == expected
    for tag in general:
        limit = probabilities[tag]
        for change, shown in ((-1e-4, True), (1e-4, False)):
            least = {"general": min(1, max(0, limit + change)), "character": 1}
            (found,) = write(nets / "tagger", PICTURES[0], thresholds=least, underscores=True)
            assert (tag in found.split(", ")) is shown
    (found,) = write(nets / "tagger", PICTURES[0], thresholds={"general": 1, "rating": 0})
    assert {*found.split(", ")} >= {"general", "sensitive"}


def test_tags_are_excluded_in_both_spellings_and_lose_underscores(nets: Nets) -> None:
    every = {"thresholds": {"general": 0, "character": 0}}
    (found,) = write(nets / "tagger", PICTURES[0], **every)
    assert {*found.split(", ")} == {"1girl", "long hair", ">_<", "sks (game)"}
    (found,) = write(nets / "tagger", PICTURES[0], **every, exclude=["Long Hair", "sks_(game)"])
    assert {*found.split(", ")} == {"1girl", ">_<"}
    assert [*map(spaced, ("0_0", "o_o", "(o)_(o)", "3d_(artwork)", "a_b_cd"))] == [
        *("0_0", "o_o", "(o)_(o)", "3d (artwork)", "a b cd")
    ]


def test_a_picture_lies_in_the_middle_of_a_white_square() -> None:
    black = np.zeros((2, 6, 3), np.uint8)
    found = square(black, 6)
    assert found[:2].min() == found[4:].min() == 255 and found[2:4].max() == 0
    assert square(black, 12).shape == (12, 12, 3)


# -- mistakes -------------------------------------------------------------------------------------


def damaged(nets: Nets, tmp_path: Path, name: str, change: Callable[[Path], object]) -> str:
    folder = tmp_path / name
    shutil.copytree(nets / name, folder)
    change(folder)
    return refused(lambda: write(folder, PICTURES[0]), kind=ModelError)


def rewritten(name: str, text: str | bytes) -> Callable[[Path], object]:
    data = text.encode() if isinstance(text, str) else text
    return lambda folder: (folder / name).write_bytes(data)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("blip", rewritten("model.safetensors", b"cut"), "cannot be loaded as a captioner"),
        ("blip", rewritten("config.json", '{"model_type": "blop"}'), "as a captioner"),
        ("blip", rewritten("tokenizer.json", "{"), "as a captioner"),
        ("tagger", rewritten("model.safetensors", b"cut"), "cannot be loaded as a tagger"),
        ("tagger", rewritten("selected_tags.csv", "a\nb"), "no table with the columns `name`"),
        ("tagger", rewritten("selected_tags.csv", "name,category\na,0"), "has 1 tags, it 6"),
    ],
)
def test_a_damaged_model_is_one_line(
    nets: Nets, tmp_path: Path, name: str, change: Callable[[Path], object], words: str
) -> None:
    assert words in damaged(nets, tmp_path, name, change)


def test_missing_weights_are_not_drawn(nets: Nets, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        state = load_file(path)
        state.pop("vision_model.post_layernorm.weight")
        save_file(state, path, metadata={"format": "pt"})

    assert "lacks vision_model.post_layernorm.weight" in damaged(nets, tmp_path, "blip", change)


def test_a_missing_library_is_one_line(nets: Nets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda _: None)
    for bits in ("8bit", "4bit"):
        own = settings(nets / "blip", quantization=bits)
        said = refused(lambda own=own: load_captioner(own, CPU, silent), kind=ModelError)
        assert f"`quantization: {bits}` needs bitsandbytes" in said
        assert "pip install bitsandbytes" in said


def test_a_tagger_without_timm_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("config.json", "{}"), ("selected_tags.csv", "name,category\na,0")):
        (tmp_path / name).write_text(text)
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda _: None)
    said = refused(lambda: load_captioner(settings(tmp_path), CPU, silent), kind=ModelError)
    assert "a tagger needs timm, which is missing" in said
    assert "pip install timm torchvision num2words" in said


def test_out_of_memory_is_passed_on(nets: Nets, monkeypatch: pytest.MonkeyPatch) -> None:
    own = settings(nets / "blip")
    load_captioner(own, CPU, silent)

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(module.LanguageModel, "_generated", full)
    with pytest.raises(torch.OutOfMemoryError):
        write(nets / "blip", PICTURES[0])


def test_code_of_a_model_runs_only_if_it_is_trusted(nets: Nets, tmp_path: Path) -> None:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_bytes())
        config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "own.py").write_text("raise SystemExit('it ran')")

    assert "trust_remote_code: true" in damaged(nets, tmp_path, "blip", change)


def test_tags_are_read_in_their_order(nets: Nets) -> None:
    tags = read_tags(nets / "tagger/selected_tags.csv")
    assert [tag for tag, _ in tags] == [*world.TAGS]
    assert [category for _, category in tags][:2] == ["rating", "general"]


def test_a_lost_quote_in_a_table_of_tags_is_one_line(tmp_path: Path) -> None:
    rows = "".join(f"{number},tag_{number},0\n" for number in range(10_000))
    (tmp_path / "tags.csv").write_text(f'tag_id,name,category\n"{rows}')
    with pytest.raises(ModelError, match="is no table with the columns `name` and `category`"):
        read_tags(tmp_path / "tags.csv")
