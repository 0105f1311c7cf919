"""Bytes of caches are foretold before anything was encoded, for all examples that we encode."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import strategies_world
import torch
import world
import yaml
from latentmake.config.architectures import ARCHITECTURES
from latentmake.config.root import parse
from latentmake.config.weights import TextWeights
from latentmake.data.memo import Memo
from latentmake.layouts.layout import row_of
from latentmake.models.cache_sizes import counted_tokens
from latentmake.pages.plan_report import estimates, to_make
from latentmake.plan.facts import Facts
from latentmake.plan.orders import Part
from latentmake.plan.planner import make_plan
from latentmake.plan.run_plan import Plan
from order_world import carry_out
from safetensors.torch import save_file
from sdscripts_world import tiny_vae
from text_world import FOLDERS, make_texts
from video_world import write_video
from wan_world import write_clip_vision, write_umt5, write_wan_vae

EXAMPLES = Path(__file__).resolve().parents[3] / "config/examples"
OURS = {
    *("sd15", "sd15-full", "sd15-lora", "sd15-sdxlvae-t5", "sdxl-lora", "sdxl-sdscripts"),
    *("flux-sdscripts", "slurm", "two-datasets", "video-sample", "wan21-1.3b-t2v"),
    *("wan22-14b-t2v", "wan22-i2v"),
}
SIZES = [(320, 256), (256, 384), (512, 256)]
CAPTIONS = [
    "a red circle",
    "two blue squares on a brown table, and one more circle",
    "a red circle",
]
FURTHER: dict[str, dict[str, Any]] = {
    "sd2": {"architecture": "sd2", "layout": "sdscripts"},
    "sd3": {"architecture": "sd3", "layout": "sdscripts", "dtype": "float16"},
    "sd3 of ours": {"architecture": "sd3"},
    "long captions": {"architecture": "sdxl", "max_token_length": "auto"},
    "first frame": {"task": "i2v-14B", "clip": "clip"},
}
"""Models that no example has."""


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny networks of each kind, whose tokenizers have a `tokenizer.json`."""
    folder = tmp_path_factory.mktemp("networks")
    make_texts(folder)
    for channels in (4, 16):
        tiny_vae(channels).save_pretrained(folder / f"vae{channels}")
    for write in (write_wan_vae, write_umt5, write_clip_vision):
        write(folder / "wan")
    (folder / "projection").mkdir()
    save_file({"weight": torch.ones(20, 16)}, folder / "projection/model.safetensors")
    return folder


def place(section: dict[str, Any], networks: Path) -> dict[str, Any]:
    """Return the section of a model with tiny networks in place of its own."""
    kept = {
        "architecture",
        "layout",
        "task",
        "dtype",
        "vae_dtype",
        "text_dtype",
        "max_token_length",
    }
    model = {key: value for key, value in section.items() if key in kept}
    if "task" in section:
        text = {"path": f"{networks}/wan/text_encoder", "tokenizer": f"{networks}/wan/tokenizer"}
        model |= {"vae": f"{networks}/wan/vae", "text": text}
        if ".pth" in str(section.get("vae")):
            text["path"] = f"{networks}/wan/models_t5_umt5-xxl-enc-bf16.safetensors"
            model["vae"] = f"{networks}/wan/Wan2.1_VAE.pth"
        if "clip" in section:
            model["clip"] = f"{networks}/wan/image_encoder"
        return model
    name = section.get("architecture")
    channels = ARCHITECTURES[name].channels if name else 4
    kinds = FOLDERS[name] if name else ("clip",)
    texts: list[Any] = [f"{networks}/{kind}/text_encoder" for kind in kinds]
    if "text_projection" in section:
        texts = [{"path": f"{networks}/t5/text_encoder", "max_length": 8}]
    return {**model, "vae": f"{networks}/vae{channels}", "text": texts}


def write_items(settings: dict[str, Any]) -> None:
    """Write the pictures or videos of a dataset, with captions."""
    folder = Path(settings["path"])
    for number, (size, caption) in enumerate(zip(SIZES, CAPTIONS, strict=True)):
        if "target_frames" in settings:
            folder.mkdir(parents=True, exist_ok=True)
            write_video(folder / f"{number}.mp4", "libx264", 30, size=size)
        else:
            world.draw(folder / f"{number}.png", number, size)
        ending = settings.get("caption_extension", ".txt")
        (folder / f"{number}{ending}").write_text(f"{caption} of {folder.name}")


def values_of(example: str, networks: Path) -> dict[str, Any]:
    """Return the configuration of an example with tiny networks and small resolutions."""
    if example in FURTHER:
        video = {"target_frames": [5]} if "task" in FURTHER[example] else {}
        values: dict[str, Any] = {
            "datasets": {"data": {"path": "data", "alpha_mask": False, **video}},
            "models": {"own": FURTHER[example]},
            "runs": {"run": {"datasets": ["data"], "model": "own", "resolutions": [256]}},
        }
        if "sdscripts" not in str(FURTHER[example]):
            del values["datasets"]["data"]["alpha_mask"]
        elif example == "sd3":
            values["datasets"]["data"]["alpha_mask"] = True
    else:
        values = yaml.safe_load((EXAMPLES / f"{example}.yaml").read_text())
    for settings in values["datasets"].values():
        if "target_frames" in settings:
            settings["target_frames"] = [min(each, 9) for each in settings["target_frames"]]
    models = values["models"].items()
    values["models"] = {name: place(section, networks) for name, section in models}
    for run in values["runs"].values():
        run.pop("trainer", None)
        run.pop("generate", None)
        run.pop("validation", None)
        # sd-scripts refuses buckets with sides of less than 256 pixels.
        side = 256 if "sd_scripts" in values else 96
        run["resolutions"] = [[side, side + 64], side] if len(run["resolutions"]) > 1 else [side]
    kept = ("datasets", "models", "runs")
    return {key: values[key] for key in kept}


def foretold(facts: Facts, plan: Plan) -> dict[Part, float]:
    """Return part -> foretold bytes of the cache files that a build would write."""
    parts = {part: state for run in plan.runs.values() for part, state in run.parts.items()}
    return {part: past.size for part, past in estimates(facts, to_make(parts), lambda x: x).items()}


def compared(example: str, networks: Path) -> Iterator[tuple[Part, float, int]]:
    """Yield each part of an example with its foretold and its written bytes."""
    values = values_of(example, networks)
    for settings in values["datasets"].values():
        write_items(settings)
    facts = Facts(parse(values), Memo(None))
    plan = make_plan(facts, facts.config.runs)
    sizes, counted = foretold(facts, plan), set[int]()
    for order in plan.orders:
        carry_out(order)
    for part, size in sizes.items():
        paths = [
            target.path
            for order in plan.orders
            if (order.dataset, order.model) == part[:2]
            for target in order.targets
            if target.part == part.name
        ]
        stats = {stat.st_ino: stat.st_size for stat in map(os.stat, paths)}
        own = sum(each for inode, each in stats.items() if inode not in counted)
        counted |= stats.keys()
        yield part, size, own


@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize("example", [*sorted(OURS), *FURTHER])
def test_bytes_are_foretold_within_2_percent(example: str, networks: Path) -> None:
    rows = [*compared(example, networks)]
    assert {"text", "latents"} >= {row_of(part.name).split()[0] for part, *_ in rows}
    for part, size, own in rows:
        assert size == pytest.approx(own, rel=0.02), part


@pytest.mark.usefixtures("own_folder")
def test_files_of_sd_scripts_own_classes_are_foretold() -> None:
    facts = strategies_world.facts(strategies_world.make())
    plan = make_plan(facts, facts.config.runs)
    sizes = foretold(facts, plan)
    for order in plan.orders:
        strategies_world.encode(order)
    for part, size in sizes.items():
        written = sum(
            path.stat().st_size for path in Path(f"cache/shapes/tiny/{part.name}").iterdir()
        )
        if row_of(part.name) == "text":  # their stand-ins have fewer tokens
            assert size > 6 * 256 * 2304 * 4
        else:
            assert size == pytest.approx(written, rel=0.02)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"model": {"type": "BPE"}}'])
def test_a_damaged_tokenizer_leaves_the_tokens_unknown(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    weights = TextWeights(path=str(tmp_path), tokenizer=str(tmp_path))
    with pytest.raises(ValueError, match="the tokenizer is damaged: "):
        counted_tokens(weights, ["a cat"])
