"""The command line that each architecture gets by default, beside that of its trainer's guide.

A value of a guide that is not passed is the script's own default, as its sources declare it, or is
left to the user by name.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import ROOT, sources
from latentmake.config.root import parse
from latentmake.trainers.launched.order import Resume
from latentmake.trainers.musubi.command import training_arguments
from latentmake.trainers.sdscripts import order as sdscripts
from latentmake.trainers.sdscripts.order import SdScriptsOrder
from rows_world import ROWS, make_row_run

pytestmark = [pytest.mark.real_trainer, pytest.mark.usefixtures("own_folder")]

# Row -> guide, and the version that its command trains.
MUSUBI = {
    "wan": ("wan", "t2v-1.3B"),
    "qwen_image": ("qwen_image", ""),
    "qwen_image_edit": ("qwen_image", "edit-2511"),
    "qwen_image_layered": ("qwen_image", ""),
    "z_image": ("zimage", ""),
    "flux_2_dev": ("flux_2", ""),
    "flux_2_klein_4b": ("flux_2", "klein-4b"),
    "flux_2_klein_9b": ("flux_2", "klein-9b"),
    "flux_kontext": ("flux_kontext", ""),
    "hunyuan_video": ("hunyuan_video", ""),
    "hunyuan_video_1_5": ("hunyuan_video_1_5", "t2v"),
    "framepack": ("framepack", "i2v"),
    "kandinsky5": ("kandinsky5", "k5-pro-t2v-5s-sd"),
    "krea2": ("krea2", ""),
    "ideogram4": ("ideogram4", ""),
    "hidream_o1": ("hidream_o1", "t2i"),
}
# Row -> guide, text encoders, module that declares its options besides its script.
SD_SCRIPTS = {
    "sd1": ("train_network", 1, "train_util"),
    "sd2": ("train_network", 1, "train_util"),
    "sdxl": ("sdxl_train_network", 2, "train_util"),
    "sd3": ("sd3_train_network", 3, "train_util"),
    "flux": ("flux_train_network", 2, "flux_train_utils"),
    "lumina": ("lumina_train_network", 1, "lumina_train_util"),
    "hunyuan_image": ("hunyuan_image_train_network", 2, "train_util"),
    "anima": ("anima_train_network", 1, "anima_train_utils"),
}

PATHS = {
    *("--dit", "--vae", "--text_encoder", "--text_encoder1", "--text_encoder2", "--byt5", "--ae"),
    *("--image_encoder", "--text_encoder_qwen", "--text_encoder_clip", "--qwen3", "--gemma2"),
    *("--clip_l", "--clip_g", "--t5xxl", "--pretrained_model_name_or_path", "--dataset_config"),
    *("--output_dir", "--output_name"),
}
LEFT = PATHS | {
    *("--fp8_base", "--blocks_to_swap", "--split_attn", "--vae_chunk_size"),  # memory
    *("--vae_disable_cache", "--optimizer_type"),  # memory; AdamW of 8 bits needs bitsandbytes too
    *("--max_train_epochs", "--save_every_n_epochs"),  # depend on the dataset
    *("--max_data_loader_n_workers", "--persistent_data_loader_workers"),  # and on the machine
    "--mixed_precision",  # bf16 in place of fp16, which overflows
    *("--model_version", "--system_prompt"),  # `task` and `text_arguments` of the model
    "--scheduler_scale",  # of sample videos only
    *("--unet_lr", "--text_encoder_lr1", "--text_encoder_lr2"),  # cached text trains no encoder
    *("--attn_mode", "--noise_scale_start", "--noise_scale_end", "--noise_clip_std"),  # defaults
}
"""Flags of a guide whose values need not be ours."""
LEFT_BY = {("sd3", "--network_module")}  # the module of SD3's transformer
OURS = {
    *("--logging_dir", "--gradient_accumulation_steps", "--t5xxl_max_token_length", "--v2"),
    *("--cache_latents", "--cache_latents_to_disk", "--network_train_unet_only", "--sdpa"),
    *("--cache_text_encoder_outputs", "--cache_text_encoder_outputs_to_disk", "--task", "--seed"),
    *("--max_data_loader_n_workers", "--optimizer_type"),
}
"""Flags of ours that a guide may lack."""
UNNAMED = {
    *("--learning_rate", "--network_dim", "--gradient_checkpointing", "--timestep_sampling"),
    "--max_train_epochs",
}
"""Flags of ours, besides those, that the guide of Ideogram 4 lacks, which names paths alone."""

Flags = Mapping[str, tuple[str, ...]]


class Row(NamedTuple):
    """An architecture: both command lines, and the default of a flag of its script, if any."""

    name: str
    ours: Flags
    guide: Flags
    declared: Mapping[str, Any]


def flags_of(words: list[str]) -> Flags:
    found: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            assert flag not in found, f"{flag} is there twice"
            found[flag] = [value] if equals else []
        elif found:
            found[next(reversed(found))].append(word)
    return {flag: tuple(values) for flag, values in found.items()}


def recommended(guide: Path, script: str) -> Flags:
    """Return the flags of the first command of a guide that launches a script."""
    text = guide.read_text(encoding="utf-8")
    for block in re.findall(r"^ *```\w*\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE):
        command = re.sub(r"[\\`]? *\n", " ", block)
        if re.search(rf"accelerate launch .*\b{script}\b", command):
            words = shlex.split(command)
            start = next(i for i, word in enumerate(words) if Path(word).name == script)
            return flags_of(words[start + 1 :])
    raise AssertionError(f"{guide} launches no {script}")


def defaults(*files: Path) -> dict[str, Any]:
    """Return flag -> default of the parsers in some sources; the first file wins."""
    found: dict[str, Any] = {}
    for file in files:
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                flag = node.args[0].value if isinstance(node.args[0], ast.Constant) else ""
                for keyword in node.keywords:
                    if keyword.arg == "default" and isinstance(keyword.value, ast.Constant):
                        found.setdefault(str(flag), keyword.value.value)
    return found


def rows_of_musubi(root: Path) -> Iterator[Row]:
    folder = sources("musubi-tuner")
    package = folder / "src/musubi_tuner"
    for name, (guide, task) in MUSUBI.items():
        (root / name).mkdir()
        order = make_row_run(root / name, name, task, max_train_epochs=16)
        script = order.scripts.training.name
        yield Row(
            name,
            flags_of(training_arguments(order, order.places, "sdpa", Resume())),
            recommended(folder / f"docs/{guide}.md", script),
            defaults(package / script, package / "training/parser_common.py"),
        )


def rows_of_sd_scripts() -> Iterator[Row]:
    folder = sources("sd-scripts")
    for name, (guide, encoders, module) in SD_SCRIPTS.items():
        model: dict[str, Any] = {"architecture": name, "layout": "sdscripts", "vae": "vae"}
        model |= {"text": [f"text_{each}" for each in range(encoders)], "checkpoint": "m.sft"}
        trainer: dict[str, Any] = {"kind": "sdscripts"}
        if name == "sd2":  # a single file of which does not tell it
            trainer["v_parameterization"] = False
        run = {"datasets": "d", "model": "m", "resolutions": 1024, "trainer": trainer}
        values = {"datasets": {"d": {"path": "d"}}, "models": {"m": model}, "runs": {"r": run}}
        order = SdScriptsOrder.of_run(parse({**values, "sd_scripts": {"path": "s"}}), "r")
        script = f"{order.script}.py"
        library = folder / "library"
        yield Row(
            name,
            flags_of(sdscripts.training_arguments(order, order.places, "sdpa", Resume())),
            recommended(folder / f"docs/{guide}.md", script),
            defaults(
                folder / script,
                library / f"{module}.py",
                library / "train_util.py",
                folder / "train_network.py",
            ),
        )


def number(value: object) -> object:
    try:
        return float(str(value))
    except ValueError:
        return str(value).lower()


def same(ours: tuple[str, ...] | None, guide: tuple[str, ...]) -> bool:
    return ours is not None and [*map(number, ours)] == [*map(number, guide)]


def is_kept(row: Row, flag: str) -> bool:
    """Whether a value of a guide is ours, or the script's own default, or left to the user."""
    values = row.guide[flag]
    if flag not in row.ours and [number(row.declared.get(flag))] == [*map(number, values)]:
        return True
    return same(row.ours.get(flag), values) or flag in LEFT or (row.name, flag) in LEFT_BY


def test_each_default_command_holds_what_the_guide_recommends(tmp_path: Path) -> None:
    assert MUSUBI.keys() == ROWS.keys()
    rows = [*rows_of_musubi(tmp_path), *rows_of_sd_scripts()]
    missing = [(row.name, flag) for row in rows for flag in row.guide if not is_kept(row, flag)]
    assert not missing
    for row in rows:
        further = row.ours.keys() - row.guide.keys() - OURS
        if "--network_alpha" in further:
            assert number(row.ours["--network_alpha"][0]) == row.declared["--network_alpha"]
        further = further - PATHS - {"--network_alpha"}
        assert further == (UNNAMED if row.name == "ideogram4" else set()), row.name


@pytest.mark.parametrize("program", ["musubi-tuner", "sd-scripts"])
def test_the_page_on_other_trainers_names_files_and_words_of_their_sources(program: str) -> None:
    page = (ROOT / "docs/how-it-works/peers.md").read_text()
    section = page.partition(f"\n## {program}\n")[2].partition("\n## ")[0]
    named = re.findall(r"`([^`]+)`", section)
    folder = sources(program) / {"musubi-tuner": "src/musubi_tuner"}.get(program, "")
    files = {name for name in named if name.endswith(".py")}
    text = "".join((folder / name).read_text(encoding="utf-8") for name in files)
    assert files and all(name in text for name in named if name not in files)
