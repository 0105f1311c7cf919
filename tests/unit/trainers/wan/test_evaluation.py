"""Losses and clips of held-out items: by their definitions, kept by their keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from generation_world import evaluate, text_file
from latentmake.base import atomic, digest
from latentmake.formats import cachefile
from latentmake.formats.video import write_mp4
from latentmake.runs.order import RunFiles
from latentmake.runs.results import METRICS, Metrics
from latentmake.trainers.loop import recipe as loop
from latentmake.trainers.loop.draw import (
    Finished,
    held_out,
    name_of,
)
from latentmake.trainers.loop.generation import TIMESTEPS, EvaluationOrder, result_reasons
from latentmake.trainers.loop.launch import read
from latentmake.trainers.wan.dit import WanOrder
from latentmake.trainers.wan.recipe import WanRecipe
from safetensors.torch import load_file
from wan_trainer_world import TWO, make_order, make_training
from wan_world import tiny_wan_vae

pytestmark = pytest.mark.usefixtures("own_folder")

CPU = torch.device("cpu")


def stamp(root: Path) -> None:
    """Make the caches of a world ours: with a key of their content."""
    for path in (root / "cache").glob("*.safetensors"):
        key = digest.of_file(path)
        caption = {"caption1": path.stem} if path.stem.endswith("_te") else {}
        made = cachefile.stamp(key=key, source=key, recipe={})
        atomic.write(path, cachefile.serialize(load_file(path), made | caption))


def trained(root: Path, **changes: Any) -> WanOrder:
    order = make_order(root, steps=3, gradient_checkpointing=False, **changes)
    stamp(root)
    make_training(order).run()
    return order


def noisy(latents: torch.Tensor, key: str, number: int, share: float) -> tuple[torch.Tensor, ...]:
    seed = int(digest.of_value(["evaluation", key, number])[:16], 16) >> 1
    noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(seed))
    return (1 - share) * latents + share * noise, noise - latents


def merged(path: str, lora: Path) -> WanTransformer3DModel:
    """A network whose weights have the LoRA of a file in diffusers' names added."""
    network, state = WanTransformer3DModel.from_pretrained(path), load_file(lora)
    with torch.no_grad():
        for name, down in state.items():
            if not name.endswith("lora_A.weight"):
                continue
            module = name.removeprefix("transformer.").removesuffix(".lora_A.weight")
            up = state[name.replace("lora_A", "lora_B")]
            network.get_submodule(module).weight += up @ down  # alpha is the rank
    return network.eval()


@pytest.mark.parametrize("changes", [{}, TWO, {"task": "i2v-14B"}], ids=["t2v", "two", "i2v"])
def test_losses_are_those_of_a_few_lines_of_torch(changes: dict[str, Any], tmp_path: Path) -> None:
    order = trained(tmp_path, **changes)
    recipe = WanRecipe(order)
    caches = held_out(recipe)
    assert len(caches) == 1 and name_of(caches, 0) == "shapes/item3 48x32"
    objective = recipe.objective(order)
    network = recipe.make_network(
        channels=caches.channels, text_width=caches.text_width, dtype=torch.float32
    ).eval()
    stored = caches.examples[0].latents
    painter = recipe.painter(recipe, order.sample_settings(), None, stored, CPU)
    painter.network = network
    with torch.no_grad():
        found = {"base": [*painter.item_losses(caches, 0, TIMESTEPS)]}
        recipe.read_copy(network, RunFiles(order).results)
        found["adapter"] = [*painter.item_losses(caches, 0, TIMESTEPS)]

    example = caches.examples[0]
    tensors = load_file(example.latents.path)
    latents = next(
        e.float() for n, e in tensors.items() if n.startswith("latents_") and "image" not in n
    )
    first = next((e.float()[None] for n, e in tensors.items() if "latents_image" in n), None)
    clip = next((e.float()[None] for n, e in tensors.items() if n.startswith("clip")), None)
    text = next(iter(load_file(example.text.path).values())).float()
    text = torch.cat([text, torch.zeros(512 - len(text), text.shape[1])])[None]
    files = {"": order.model.dit, "high_noise_": order.model.dit_high_noise}
    networks = {
        (kind, prefix): WanTransformer3DModel.from_pretrained(path).eval()
        if kind == "base"
        else merged(path, Path(order.output, f"{prefix}pytorch_lora_weights.safetensors"))
        for kind in found
        for prefix, path in files.items()
        if path is not None
    }
    for number, timestep in enumerate(objective.spread(10)):
        hidden, target = noisy(latents[None], example.latents.key, number, float(timestep) / 1000)
        hidden = hidden if first is None else torch.cat([hidden, first], dim=1)
        high = order.boundary is not None and float(timestep) >= 875
        for kind, values in found.items():
            with torch.no_grad():
                predicted = networks[kind, "high_noise_" if high else ""](
                    hidden, timestep[None], text, clip, return_dict=False
                )[0]
            expected = float(((predicted - target) ** 2).mean())
            assert values[number] == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert found["base"] != found["adapter"]


# -- whole evaluations ----------------------------------------------------------------------------


def evaluation(root: Path, **changes: Any) -> EvaluationOrder:
    """Train, and return the order of an evaluation; the VAE is there."""
    order = trained(root, **changes)
    tiny_wan_vae(4).save_pretrained(root / "vae")
    path = root / "train.json"
    path.write_text(order.model_dump_json())
    settings = {
        "frames": 5, "width": 48, "height": 32, "fps": 8, "num_inference_steps": 1,
        "guidance_scale": 2.0, "flow_shift": 3.0,
    }  # fmt: skip
    return EvaluationOrder.model_validate(
        {
            "kind": "wan", "run": "tiny", "output": str(root / "evaluation"),
            "adapters": [f"{order.output}/pytorch_lora_weights.safetensors"],
            "manifest": order.manifest, "model": order.model, "weights": "w",
            "prompts": [], "captions": 0, "negative": text_file("", 24), "seeds": [0],
            "settings": settings, "base": True, "training": str(path), "clips": 4,
            "resolution": "48x32",
        }
    )  # fmt: skip


@pytest.mark.parametrize("task", ["t2v-1.3B", "i2v-14B"])
def test_clips_have_the_items_own_size_and_what_is_there_is_kept(task: str, tmp_path: Path) -> None:
    order = evaluation(tmp_path, task=task)
    metrics = evaluate(order)
    assert metrics is not None
    (result,) = metrics.results
    assert result.caption == "3_te"
    sizes = {(clip.frames, clip.width, clip.height) for clip in result.clips.values()}
    assert sizes == {(9, 32, 32)} and set(result.clips) == {"real", "base", "adapter"}
    assert len({clip.digest for clip in result.clips.values()}) == 3
    assert metrics.loss["base"] == pytest.approx(sum(result.losses["base"].values) / 10)
    assert evaluate(order) is None
    assert Metrics.read(tmp_path / "evaluation/metrics.json") == metrics
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "evaluation").glob("*.mp4")}
    fewer = order.model_copy(update={"clips": 0})
    assert evaluate(fewer) is not None  # no network and no VAE is needed
    assert list((tmp_path / "evaluation").glob("*")) == [tmp_path / "evaluation/metrics.json"]
    assert len(times) == 3


def test_results_of_earlier_releases_are_not_made_again(tmp_path: Path) -> None:
    order, path = evaluation(tmp_path), tmp_path / "evaluation" / METRICS
    metrics = evaluate(order)
    assert metrics is not None
    earlier = json.loads(path.read_text())
    (earlier["wanted"],) = earlier.pop("parts").values()
    (settings,) = earlier.pop("values").values()
    earlier["settings"] = {"items": earlier.pop("items"), **settings}
    path.write_text(json.dumps(earlier))
    assert Metrics.read(path) == metrics and evaluate(order) is None
    other = order.model_copy(update={"seeds": [1], "weights": "others"})
    training = read(Path(order.training), WanOrder)
    assert [*map(str, result_reasons(other, training))] == ["seed 0 -> 1"]
    other = order.model_copy(update={"clips": 2})
    (reason,) = result_reasons(other, training)
    assert reason.name == "items with clips"


def test_a_killed_evaluation_loses_the_part_in_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order, folder = evaluation(tmp_path), tmp_path / "evaluation"
    written: list[str] = []

    def until_the_adapter(path: Path, frames: Any, fps: int) -> None:
        if path.stem.endswith("adapter"):
            raise KeyboardInterrupt
        written.append(path.name)
        write_mp4(path, frames, fps)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "write_mp4", until_the_adapter)
        with pytest.raises(KeyboardInterrupt):
            evaluate(order)
        assert len(written) == 2 and len(Finished.of(folder).losses) == 2
        with pytest.raises(KeyboardInterrupt):
            evaluate(order)
        assert len(written) == 2
    metrics = evaluate(order)
    assert metrics is not None and len(metrics.results[0].clips) == 3
    assert {path.suffix for path in folder.iterdir()} == {".mp4", ".json"}
    first = metrics.results[0].clips["real"]
    (folder / first.file).write_bytes(b"damaged")
    again = evaluate(order)
    assert again is not None and again.results == metrics.results


def test_a_renamed_item_keeps_its_clips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = evaluation(tmp_path)
    before = evaluate(order)
    assert before is not None
    written, names = (tmp_path / "evaluation/metrics.json").read_text(), []
    for clip in before.clips():
        names.append(f"item3-0123abcd_{clip.file.rpartition('_')[2]}")  # as earlier releases do
        (tmp_path / "evaluation" / clip.file).rename(tmp_path / "evaluation" / names[-1])
        written = written.replace(clip.file, names[-1])
    (tmp_path / "evaluation/metrics.json").write_text(written)
    manifest = tmp_path / "manifest.jsonl"
    manifest.write_text(manifest.read_text().replace('"item3"', '"renamed"'))
    lock = tmp_path / "dataset.lock"
    lock.write_text(json.dumps({**json.loads(lock.read_text()), "digest": "other"}))

    def fail(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(WanRecipe, "make_network", fail)
    after = evaluate(order)
    assert after is not None and after.results[0].name == "shapes/renamed 48x32"
    assert [clip.digest for clip in after.clips()] == [clip.digest for clip in before.clips()]
    assert {path.name for path in (tmp_path / "evaluation").glob("*.mp4")} == {*names}


def test_results_name_the_labels_and_paths_of_today(tmp_path: Path) -> None:
    order = evaluation(tmp_path)
    before, manifest = evaluate(order), tmp_path / "manifest.jsonl"
    assert before is not None and before.results[0].group == ""
    rows = [json.loads(line) | {"row": {"label": "cat"}} for line in manifest.open()]
    manifest.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (reason,) = result_reasons(order, read(Path(order.training), WanOrder))
    assert str(reason) == "paths or labels of held-out items have changed"
    after = evaluate(order)
    assert after is not None and after.results[0].group == "cat"
    assert after.results[0].losses == before.results[0].losses
    assert evaluate(order) is None
