"""Orders of Wan runs, with and without the files that they speak of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from latentmake.config.datasets import Dataset
from latentmake.config.external_trainers import MusubiTrainer
from latentmake.config.machines import ExternalProgram, Publish
from latentmake.config.models import Model
from latentmake.trainers.musubi.order import MusubiOrder

# What formats.md, section 1, says that each script takes, and the flags that go beyond its table:
# an optimiser is always needed; saving and resuming.
CACHING = {"--dataset_config", "--device", "--batch_size", "--num_workers", "--skip_existing"}
CACHING |= {"--keep_cache"}
FLAGS = {
    "wan_cache_latents.py": CACHING
    | {"--vae", "--vae_dtype", "--vae_cache_cpu", "--i2v", "--clip", "--one_frame"},
    "wan_cache_text_encoder_outputs.py": CACHING | {"--t5", "--fp8_t5"},
    "wan_train_network.py": {
        *("--dataset_config", "--dit", "--sdpa", "--flash_attn", "--flash3", "--xformers"),
        *("--sage_attn", "--network_module", "--output_dir", "--output_name"),
        *("--mixed_precision", "--task", "--dit_high_noise", "--timestep_boundary"),
        *("--network_dim", "--network_alpha", "--learning_rate", "--max_train_epochs"),
        *("--gradient_accumulation_steps", "--max_data_loader_n_workers", "--logging_dir"),
        *("--fp8_base", "--fp8_scaled", "--timestep_sampling", "--discrete_flow_shift"),
        *("--vae", "--t5", "--vae_cache_cpu", "--optimizer_type", "--resume"),
        *("--save_every_n_epochs", "--save_state"),
    },
}
NEEDED = {
    "wan_cache_latents.py": {"--dataset_config", "--vae"},
    "wan_cache_text_encoder_outputs.py": {"--dataset_config", "--t5"},
    "wan_train_network.py": {
        *("--dataset_config", "--dit", "--network_module", "--output_dir", "--output_name"),
        *("--mixed_precision", "--optimizer_type", "--task"),
    },
}
ATTENTION = {"--sdpa", "--flash_attn", "--flash3", "--xformers", "--sage_attn"}
TASKS = ["t2v-14B", "t2v-1.3B", "i2v-14B", "t2i-14B", "flf2v-14B", "t2v-14B-FC", "t2v-1.3B-FC"]
TASKS += ["i2v-14B-FC", "i2v-A14B", "t2v-A14B"]


def check_flags(script: str, arguments: list[str]) -> None:
    """Fail where a script would refuse its arguments, or miss one."""
    flags = {each for each in arguments if each.startswith("--")}
    assert flags <= FLAGS[script], flags - FLAGS[script]
    assert flags >= NEEDED[script]
    assert len(flags & ATTENTION) == (1 if script == "wan_train_network.py" else 0)


def value(arguments: list[str], flag: str) -> str | None:
    """Return what follows a flag; None where it is not given."""
    return arguments[arguments.index(flag) + 1] if flag in arguments else None


def needs_clip(task: str) -> bool:
    return task.startswith(("i2v-14B", "flf2v"))


def order_of(**changes: Any) -> MusubiOrder:
    """Return an order; `model` and `trainer` add to their sections."""
    model = {
        "task": "t2v-A14B",
        "vae": "models/vae.safetensors",
        "text": "models/t5.pth",
        "dit": "models/low.safetensors",
        **changes.pop("model", {}),
    }
    if needs_clip(model["task"]):
        model.setdefault("clip", "models/clip.pth")
    trainer = {"kind": "musubi", **changes.pop("trainer", {})}
    return MusubiOrder(
        **{
            "run": "gove-1.0",
            "manifest": "runs/gove-1.0/manifest.jsonl",
            "lock": "",
            "output": "runs/gove-1.0",
            "datasets": {"gove": Dataset(path="data/gove")},
            "resolutions": [(256, 256), (480, 832)],
            "model_name": "wan",
            "model": Model.model_validate(model),
            "trainer": MusubiTrainer.model_validate(trainer),
            "program": ExternalProgram(path="musubi tuner"),
            "publish": Publish(),
            **changes,
        }
    )


def fill(order: MusubiOrder, stems: dict[str, list[str]], *, control: bool = False) -> None:
    """Write a dataset's files, their caches and the manifest below the working directory.

    Args:
        order: says what lies where.
        stems: dataset -> stems of its items; one that ends in `!` has no caption file.
        control: each item has a control image.
    """
    rows: list[dict[str, Any]] = []
    for name, items in stems.items():
        dataset = order.datasets[name]
        for each in items:
            captioned, stem = not each.endswith("!"), each.rstrip("!")
            source = f"{dataset.folder}/{stem}{'.mp4' if dataset.video else '.png'}"
            put(source, f"picture {stem}")
            caption = f"{dataset.folder}/{stem}{dataset.caption_extension}"
            if captioned:
                put(caption, f"caption of {stem}")
            beside = f"{dataset.control_directory}/{stem}.png" if control else None
            if beside is not None:
                put(beside, f"control {stem}")
            latents: dict[str, list[str]] = {}
            text: dict[str, str] = {}
            base = Path(stem).name
            for resolution in order.resolutions:
                folder = order.cache_folder(name, resolution)
                size = folder.rpartition("/")[2]
                clips = ["_00000-005", "_00005-005"] if dataset.video else [""]
                latents[size] = [
                    put(f"{folder}/{base}{clip}_0064x0064_wan.safetensors", f"{size}{clip}{stem}")
                    for clip in clips
                ]
                text[size] = put(f"{folder}/{base}_wan_te.safetensors", f"embedding of {stem}")
            row: dict[str, Any] = {"dataset": name, "stem": stem, "source": source}
            row |= {"caption": caption if captioned else None, "control": beside}
            row |= {"repeats": dataset.num_repeats, "latents": latents, "text": text}
            rows.append(row)
    rows.append({"dataset": "gove", "stem": "bad", "source": "bad.png", "aside": "is damaged"})
    put(order.manifest, "".join(f"{json.dumps(row)}\n" for row in rows))


def put(path: str | Path, content: str) -> str:
    """Write a file with its folders, unless it holds this already; return its path."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.is_file() or file.read_text() != content:
        file.unlink(missing_ok=True)
        file.write_text(content)
    return str(path)
