"""Clips of a run: what is drawn, what is kept, and what goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dit_world import tiny_dit
from generation_world import RUN, generate, make_world, order_of, text_file, write_lora_of
from latentmake.base.errors import CacheError, SourceError, TrainingError
from latentmake.config.models import Model
from latentmake.config.weights import Weights
from latentmake.encode.encoders.wan import load_wan_vae
from latentmake.formats.video import spread_frames, write_mp4
from latentmake.runs.results import INDEX, Clip, GenerationIndex
from latentmake.trainers.loop import recipe as loop
from latentmake.trainers.loop.generation import (
    GenerationOrder,
    captions_of,
    clip_name,
    clip_reasons,
)
from latentmake.trainers.wan.sampling import CLIP, FIRST_FRAME, condition_of
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from wan_world import write_clip_vision

OUT = RUN / "generated"
NASTY = "../../<b>\n'a' \"cat\" & été {x} $(rm)"


@pytest.fixture(autouse=True)
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_world()


def index() -> GenerationIndex:
    found = GenerationIndex.read(OUT / INDEX)
    assert found is not None
    return found


def files() -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in OUT.glob("*.mp4")}


def done(order: GenerationOrder) -> bool:
    return not clip_reasons(order)


def test_each_prompt_and_seed_is_a_clip_with_the_adapter_and_one_without() -> None:
    order = order_of("a wave", NASTY, seeds=[4, 5])
    assert not done(order)
    generate(order)
    assert done(order)
    clips = index().clips
    assert {(clip.prompt, clip.seed, bool(clip.adapter)) for clip in clips} == {
        (prompt, seed, used) for prompt in ("a wave", NASTY) for seed in (4, 5)
        for used in (False, True)
    }  # fmt: skip
    assert files().keys() == {clip.file for clip in clips}
    assert not [path for path in OUT.iterdir() if path.suffix not in (".mp4", ".json")]
    pictures = {clip.file: spread_frames(OUT / clip.file, 5) for clip in clips}
    assert all(len(each) == 5 and each[0].shape == (32, 48, 3) for each in pictures.values())
    drawn = {np.stack(each).tobytes() for each in pictures.values()}
    assert len(drawn) == 8  # each of them is another clip


def test_names_of_files_are_safe_whatever_the_prompt() -> None:
    names = {clip_name(prompt, 1, adapter=True) for prompt in ("", "..", NASTY, "é" * 300, "/a")}
    assert len(names) == 5
    for name in names:
        assert Clip(file=name, key="", prompt="", seed=0, adapter="", asked=False, size=0)
        assert len(name) < 100
    assert clip_name("A wave, blue!", 7, adapter=False).startswith("a-wave-blue-")


def test_nothing_is_drawn_twice_and_only_what_changed_anew() -> None:
    generate(order_of("a wave", "a boat"))
    before = files()
    generate(order_of("a wave", "a boat"))
    assert files() == before
    order = order_of("a wave", "a ship")
    assert not done(order)
    generate(order)
    after = files()
    same = {name for name in before if "a-wave" in name}
    assert {name: after[name] for name in same} == {name: before[name] for name in same}
    assert {name.split("-")[1] for name in after.keys() - same} == {"ship"}
    assert done(order)


def test_clips_of_earlier_releases_are_not_drawn_again() -> None:
    order = order_of("a wave")
    generate(order)
    made = index()
    lora = made.parts["trained LoRA"]
    earlier = made.model_dump(exclude={"parts", "values", "places"})
    earlier |= {"weights": made.parts["networks"], "settings": made.settings}
    (OUT / INDEX).write_text(json.dumps(earlier))
    assert index() == made and done(order)
    other = order_of("a wave", weights="others", num_inference_steps=3)
    write_lora_of(tiny_dit(), RUN, seed=9)
    assert [difference.name for difference in clip_reasons(other)] == [
        "networks",
        "num_inference_steps",
        "trained LoRA",
        "clips to draw: 2, no longer up to date or asked for: 2",
    ]
    assert clip_reasons(other)[2].old == f"{lora[:8]}.."


def test_a_prompt_of_the_command_line_stays_until_settings_change() -> None:
    generate(order_of("a wave"))
    asked = order_of("a boat", asked=True)
    assert not done(asked)
    generate(asked)
    assert [clip.prompt for clip in index().clips] == ["a boat", "a boat", "a wave", "a wave"]
    assert done(asked) and done(order_of("a wave"))
    generate(order_of("a wave", num_inference_steps=3))
    assert {clip.prompt for clip in index().clips} == {"a wave"}
    assert len(files()) == 2


def test_a_clip_that_is_gone_or_cut_short_is_drawn_again() -> None:
    order = order_of("a wave")
    generate(order)
    before = files()
    for name in before:
        (OUT / name).write_bytes(before[name][0][:-1])
        assert not done(order)
        generate(order)
        assert files()[name][0] == before[name][0]


def test_finished_clips_outlive_a_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    order = order_of("a wave")
    generate(order)
    write_lora_of(tiny_dit(), RUN, seed=9)
    order, drawn = order_of("a boat", "a wave"), files()

    def killed(path: Path, *others: Any) -> None:
        if len(files().keys() - drawn.keys()) == 2:
            raise KeyboardInterrupt
        write_mp4(path, *others)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "write_mp4", killed)
        with pytest.raises(KeyboardInterrupt):
            generate(order)
    before = files()
    assert len(before) == 4 and not done(order)
    generate(order)
    changed = {name for name, content in files().items() if before[name] != content}
    assert changed == {clip_name("a wave", 0, adapter=True)} and done(order)


def test_two_networks_have_a_lora_each() -> None:
    make_world(two=True)
    order = order_of("a wave")
    assert len(order.adapters) == 2
    generate(order)
    before = files()
    write_lora_of(tiny_dit(), RUN, seed=9, high_noise=True)
    generate(order)
    changed = {name for name, content in files().items() if before[name] != content}
    assert changed == {clip_name("a wave", 0, adapter=True)}


def test_the_strength_of_a_lora_is_that_of_its_matrices() -> None:
    saved = RUN / "saved/step-000001"
    write_lora_of(tiny_dit(), saved, seed=9)
    file = saved / "pytorch_lora_weights.safetensors"
    order = order_of("a wave", lora=str(saved), adapters=[str(file)], strength=0.5)
    generate(order)
    assert done(order) and not done(order_of("a wave"))
    assert index().settings["lora_strength"] == 0.5
    found = files()[clip_name("a wave", 0, adapter=True)][0]
    halved = {
        name: each / 2 if "lora_B" in name else each for name, each in load_file(file).items()
    }
    with safe_open(file, "pt") as opened:
        save_file(halved, file, opened.metadata())
    generate(order.model_copy(update={"strength": 1.0}))
    assert files()[clip_name("a wave", 0, adapter=True)][0] == found
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(TrainingError, match=r"; correct runs\.waves\.generate\.lora"):
        generate(order)


def test_faults_are_one_line() -> None:
    order = order_of("a wave")
    generate(order)
    before = files()
    lora = Path(order.adapters[0])
    whole = lora.read_bytes()
    lora.write_bytes(whole[:100])
    with pytest.raises(TrainingError, match=r"pytorch_lora_weights\.safetensors.*; delete them"):
        generate(order)
    lora.unlink()
    with pytest.raises(TrainingError, match=r"LoRA cannot be read \(No such file.*trains it again"):
        generate(order)
    assert files() == before
    lora.write_bytes(whole)
    order = order_of("a wave", num_inference_steps=1)
    Path(order.prompts[0].text).write_bytes(b"damaged")
    with pytest.raises(CacheError, match=r"_wan_te\.safetensors: .*; "):
        generate(order)


def test_captions_of_the_first_items_are_prompts_where_there_are_none() -> None:
    rows = []
    for number, caption in enumerate(["one", "two", "two", "", "three", "four", "five"]):
        prompt = order_of(caption or "x").prompts[0]
        if not caption:
            prompt = prompt.model_copy(update={"text": text_file("", 16)})
        row = {"dataset": "d", "stem": str(number), "source": "s", "latents": {"64": ["x"]}}
        rows.append({**row, "text": {"64": prompt.text}, "validation": number == 0})
    manifest = RUN / "manifest.jsonl"
    manifest.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = captions_of(order_of(captions=4))
    assert [each.prompt for each in found.prompts] == ["two", "three"]


# -- image-to-video -------------------------------------------------------------------------------


def from_picture(path: str, **changes: Any) -> GenerationOrder:
    """Return an order of Wan 2.2's image-to-video with one network, made where it is missing."""
    if not Path("models/i2v").exists():
        tiny_dit(in_channels=36).save_pretrained("models/i2v")
        write_lora_of(tiny_dit(in_channels=36), RUN)
    values = {"task": "i2v-A14B", "vae": "models/vae", "text": "models/text", "dit": "models/i2v"}
    return order_of("a wave", model=Model.model_validate(values), image=path, **changes)


def draw(path: str, colour: str, size: tuple[int, int] = (90, 40)) -> str:
    Image.new("RGB", size, colour).save(path)
    return path


def test_a_picture_is_the_first_frame_of_its_clips() -> None:
    order = from_picture(draw("red.png", "red"))
    generate(order)
    before = files()
    assert len(before) == 2 and done(order)
    Path("red.png").rename("moved.png")
    assert done(from_picture("moved.png"))
    other = from_picture(draw("blue.png", "blue"))
    assert not done(other)
    generate(other)
    assert all(files()[name] != before[name] for name in before)


def test_a_condition_is_that_of_the_caches() -> None:
    """Mask and latents of the first frame, and what CLIP sees, as encoding a clip gives them."""
    clip = write_clip_vision(Path("models"))["folder"]
    order = from_picture(draw("red.png", "red", (96, 64)))
    model = order.model.model_copy(update={"clip": Weights(path=str(clip))})
    found = condition_of(order.model_copy(update={"model": model}), torch.device("cpu"))
    assert found[FIRST_FRAME].shape == (1, 20, 2, 4, 6) and found[CLIP].shape[2] == 160
    pixels = torch.zeros(1, 5, 32, 48, 3, dtype=torch.uint8)
    pixels[..., 0] = 255
    vae = load_wan_vae(model.vae, torch.device("cpu"), torch.float32)
    expected = vae.encode_first_frame(pixels, torch.float32)
    assert torch.allclose(found[FIRST_FRAME], expected, atol=1e-4)


def test_a_picture_that_is_none_is_one_line() -> None:
    Path("text.png").write_text("no picture")
    with pytest.raises(SourceError, match=r"text\.png"):
        generate(from_picture("text.png"))
    order = from_picture("text.png")
    Path("text.png").unlink()
    with pytest.raises(SourceError, match=r"text\.png: cannot be read"):
        generate(order)
