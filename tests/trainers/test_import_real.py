"""Imported dataset files: our planner's items, names and sizes are those of the trainers' loaders.

Each TOML in the documentation of musubi-tuner and sd-scripts is read, with small images and videos
where it says, and some more by their own `dataset_config` code and by our import.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import sdscripts_world
import video_world
import world
from conftest import output_of, sources
from latentmake.config.root import parse
from latentmake.data.contents import read_caption
from latentmake.data.item import Item
from latentmake.data.memo import Memo
from latentmake.geometry.buckets import Size
from latentmake.layouts.layout import kind_of, resolution_of
from latentmake.plan.facts import Facts
from latentmake.plan.planner import make_plan
from latentmake.plan.run_plan import RunPlan
from latentmake.runs.rows import balanced
from latentmake.trainers.exchange.adoption import adopt
from latentmake.trainers.exchange.datasets_toml import Imported, imported

pytestmark = pytest.mark.real_trainer

IMAGES = {"ant.png": (200, 120), "bee.jpg": (64, 64), "cat.webp": (80, 180), "DOG.PNG": (130, 70)}
SEVERAL_LINES = b"a caption of \r\n\r\nseveral lines\r\n"
VIDEOS = {"one.mp4": 48, "two.mp4": 27}
GENERAL = '[general]\nresolution = [960, 544]\ncaption_extension = ".txt"\nenable_bucket = true\n'

# What musubi-tuner's caching scripts go through.
MUSUBI = """# preloaded
import argparse, json, os, sys
from musubi_tuner.dataset import config_utils
from musubi_tuner.dataset.config_utils import BlueprintGenerator, ConfigSanitizer
found = []
for file, architecture in json.loads(sys.argv[1]):
    config = config_utils.load_user_config(file)
    blueprint = BlueprintGenerator(ConfigSanitizer()).generate(
        config, argparse.Namespace(debug_dataset=False), architecture=architecture)
    group = config_utils.generate_dataset_group_by_blueprint(blueprint.dataset_group)
    items = []
    for dataset in group.datasets:
        for _, batch in dataset.retrieve_latent_cache_batches(1):
            for item in batch:
                text = dataset.get_text_encoder_output_cache_path(item)
                stem, ending = os.path.splitext(os.path.abspath(item.item_key))
                if item.frame_count:
                    stem = stem.rpartition("_")[0]
                    text = dataset.get_text_encoder_output_cache_path(
                        argparse.Namespace(item_key=f"{stem}{ending}"))
                items.append([
                    f"{stem}{ending}", os.path.basename(item.latent_cache_path),
                    os.path.basename(text), list(item.bucket_size[:2]),
                    json.dumps([item.caption]), dataset.num_repeats])
    found.append(items)
print("found", json.dumps(found))
"""

# What sd-scripts' training scripts go through before they train.
SDSCRIPTS = """# preloaded
import argparse, json, os, sys
import transformers
sys.modules["transformers"].CLIPFeatureExtractor = transformers.CLIPImageProcessor
from library import config_util, strategy_base, strategy_sd, train_util
from library.config_util import BlueprintGenerator, ConfigSanitizer
strategy = strategy_sd.SdSdxlLatentsCachingStrategy(False, True, 1, False)
strategy_base.LatentsCachingStrategy.set_strategy(strategy)
parser = argparse.ArgumentParser()
train_util.add_dataset_arguments(parser, True, True, True)
train_util.add_training_arguments(parser, True)
args = parser.parse_args(["--resolution", "512"])
train_util.prepare_dataset_args(args, True)
found = []
for file in json.loads(sys.argv[1]):
    config = config_util.load_user_config(file)
    blueprint = BlueprintGenerator(ConfigSanitizer(True, True, False, True)).generate(config, args)
    group, _ = config_util.generate_dataset_group_by_blueprint(blueprint.dataset_group)
    items = []
    for dataset in group.datasets:
        for info in dataset.image_data.values():
            path = os.path.abspath(info.absolute_path)
            subset = dataset.image_to_subset[info.image_key]
            # Whatever is drawn there, it is the same tags.
            caption = dataset.process_caption(subset, info.caption)
            tags = None if subset.caption_tag_dropout_rate else sorted(caption.split(", "))
            items.append([
                path, os.path.basename(strategy.get_latents_npz_path(path, info.image_size)),
                None, list(info.bucket_reso), json.dumps(tags), info.num_repeats])
    found.append(items)
print("found", json.dumps(found))
"""


class Found(NamedTuple):
    """An item at one resolution, as a loader finds it."""

    source: str
    latents: str
    text: str | None
    size: tuple[int, int]
    tags: str
    repeats: int


def loaded(script: str, asked: Any, python: Path, *folders: Path) -> list[Counter[Found]]:
    """Return what a trainer's loaders find in some dataset files."""
    said = output_of(python / "bin/python", "-c", script, json.dumps(asked), paths=folders)
    line = next(each for each in said.splitlines() if each.startswith("found "))
    return [
        Counter(Found(*item[:3], tuple(item[3]), *item[4:]) for item in items)  # type: ignore[arg-type]
        for items in json.loads(line.removeprefix("found "))
    ]


def planned(made: Imported) -> Counter[Found]:
    """Return what our planner finds in an imported configuration."""
    config = parse(made.values)
    facts = Facts(config, Memo(Path(".latentmake/memo.sqlite")))
    found: Counter[Found] = Counter()
    for run in config.runs.values():
        layout, others = facts.layout(run.model), Counter[str]()
        named = {name: config.datasets[name] for name in run.datasets}
        listed = {name: facts.items(name, run.model)[0] for name in named}
        regular: dict[str, list[tuple[str, Item]]] = {}
        repeats: dict[tuple[str, str], int] = {}
        for name, settings in named.items():
            repeats |= dict.fromkeys(((name, x.stem) for x in listed[name]), settings.num_repeats)
            block = str(settings.sdscripts_buckets(config.models[run.model].spec))
            if settings.is_reg:
                pairs = ((name, x) for x in sorted(listed[name], key=lambda each: each.image))
                regular.setdefault(block, []).extend(pairs)
            else:
                others[block] += settings.num_repeats * len(listed[name])
        for block, pairs in regular.items():
            counts = balanced([named[name].num_repeats for name, _ in pairs], others[block])
            repeats |= {(name, x.stem): n for (name, x), n in zip(pairs, counts, strict=True)}
        for name, settings in named.items():
            for size in run.resolutions:
                for item in listed[name]:
                    if count := repeats[name, item.stem]:
                        found.update(_targets(layout, settings, item, size.name, count))
    return found


def _targets(layout: Any, settings: Any, item: Any, part: str, repeats: int) -> Iterator[Found]:
    text = None
    if layout.name == "musubi" or layout.name.startswith("musubi-"):
        ((path, _),) = layout.named("", f"text@{part}", item.stem, None, settings)
        text = path.rpartition("/")[2]
    caption = read_caption(item.caption) if item.caption else ""
    tags: list[str] | None = [caption if item.texts is None else item.texts[0]]
    if item.texts is not None and settings.captions is not None:
        drops = settings.captions.caption_tag_dropout_rate
        tags = None if drops else sorted(item.texts[0].split(", "))
    size = resolution_of(part)
    assert size is not None
    for path, clip in layout.named("", part, item.stem, item.media, settings, item.span):
        assert kind_of(part) == "latents"
        image = Size(item.media.width, item.media.height)
        placed, _ = layout.view(image, size, settings, clip=clip, span=item.span)
        sizes = re.findall(r"(?:^|:)(\d+)x(\d+)", placed)
        width, height = sizes[0] if clip else sizes[-1]
        yield Found(
            str(Path(item.image).absolute()),
            path.rpartition("/")[2],
            text,
            (int(width), int(height)),
            json.dumps(tags),
            repeats,
        )


def put_images(folder: Path, caption: str = ".txt") -> None:
    for number, (name, size) in enumerate(IMAGES.items()):
        world.draw(folder / name, number, size)
        (folder / name).with_suffix(caption).write_text(f"a {name} here\n")


def put_videos(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, frames in VIDEOS.items():
        video_world.write_video(folder / name, "libx264", frames)
        (folder / name).with_suffix(".txt").write_text(f"the video {name}")


def put_files_of_musubi(root: Path) -> None:
    """Put images and videos where musubi-tuner's documentation has them, and what it ignores."""
    put_images(root / "image_dir")
    world.draw(root / "image_dir/without.png", 7, (64, 64))
    world.draw(root / "image_dir/sub/deep.png", 8, (64, 64))
    (root / "image_dir/sub/deep.txt").write_text("in a sub-folder")
    (root / "image_dir/readme.txt").write_text("of no image")
    (root / "image_dir/bee.txt").write_text("")
    for each in ("video_dir", "video_dir2"):
        put_videos(root / each)
    put_videos(root / "control_dir")
    for number, name in enumerate((*IMAGES, "without.png")):
        for folder, endings in (("control_dir", ["."]), ("two_controls", ["_0.", "_1."])):
            for ending in endings:
                world.draw(root / f"{folder}/{Path(name).stem}{ending}png", number, (70, 70))
    put_images(root / "listed")
    (root / "image_dir/ant.txt").write_bytes(SEVERAL_LINES)


def documented(page: Path) -> list[str]:
    """Return the TOML blocks of a page that have datasets."""
    blocks = re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return list(dict.fromkeys(block for block in blocks if "[[datasets]]" in block))


def of_musubi(text: str, number: int, root: Path) -> str:
    """Return a block of musubi-tuner's documentation that its own code reads.

    Fragments get what they leave out; no two blocks may share a folder of caches.
    """
    folder = root / f"{number}"
    folder.mkdir()
    if "_directory =" not in text and "_jsonl_file =" not in text:
        more = f'[[datasets]]\nimage_directory = "{root}/image_dir"\n'
        controls = "two_controls" if "indices = [0, " in text else "control_dir"
        text = text.replace("[[datasets]]", f'{more}control_directory = "{root}/{controls}"')
    if "[general]" not in text:
        text = f"{GENERAL}{text}"
    caches = iter(range(99))
    text = re.sub(
        r'^cache_directory = ".*?"',
        lambda _: f'cache_directory = "{folder}/cache{next(caches)}"',
        text,
        flags=re.MULTILINE,
    )
    for kind, names in (("image", IMAGES), ("video", VIDEOS)):
        place = root / ("listed" if kind == "image" else "video_dir")
        rows = [
            {f"{kind}_path": str(place / name), "caption": f"{name} as listed"} for name in names
        ]
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        (folder / f"{kind}s.jsonl").write_text(lines)
        text = re.sub(rf'({kind}_jsonl_file = )".*?"', rf'\1"{folder}/{kind}s.jsonl"', text)
    return text.replace("/path/to/", f"{root}/")


MORE_OF_MUSUBI = (
    # [general], several blocks with a cache directory each, one folder at three resolutions.
    GENERAL
    + """
[[datasets]]
image_directory = "ROOT/image_dir"
cache_directory = "ROOT/caches/a"
[[datasets]]
image_directory = "ROOT/image_dir"
cache_directory = "ROOT/caches/b"
resolution = 512
batch_size = 4
[[datasets]]
image_directory = "ROOT/image_dir"
cache_directory = "ROOT/caches/c"
resolution = 480
[[datasets]]
image_directory = "ROOT/listed"
cache_directory = "ROOT/caches/d"
resolution = [256, 128]
enable_bucket = false
num_repeats = 3
[[datasets]]
image_directory = "ROOT/listed"
cache_directory = "ROOT/caches/e"
resolution = [256, 256]
bucket_no_upscale = true
[[datasets]]
video_directory = "ROOT/video_dir"
cache_directory = "ROOT/caches/f"
resolution = [256, 256]
target_frames = [1, 7, 25]
frame_extraction = "uniform"
frame_sample = 3
source_fps = 24.0
[[datasets]]
video_directory = "ROOT/video_dir"
cache_directory = "ROOT/caches/g"
resolution = [256, 256]
target_frames = [9]
frame_extraction = "slide"
frame_stride = 8
""",
    # Defaults: no bucket, 960 x 544; a list with paths relative to where its scripts start.
    """
[[datasets]]
image_directory = "listed"
caption_extension = ".txt"
cache_directory = "ROOT/caches/h"
[[datasets]]
image_jsonl_file = "relative.jsonl"
cache_directory = "ROOT/caches/i"
""",
)


def test_items_of_musubi_tuners_dataset_files_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_venv: Path
) -> None:
    trainer, root = sources("musubi-tuner"), tmp_path / "root"
    put_files_of_musubi(root)
    rows = [{"image_path": f"listed/{name}", "caption": "relative"} for name in IMAGES]
    (root / "relative.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    monkeypatch.chdir(root)
    blocks = documented(trainer / "docs/dataset_config.md")
    assert len(blocks) > 8
    files = []
    for number, block in enumerate([*blocks, *MORE_OF_MUSUBI]):
        text = of_musubi(block, number, root) if number < len(blocks) else block
        path = root / f"{number}.toml"
        path.write_text(text.replace("ROOT", str(root)), encoding="utf-8")
        edit = "control_resolution" in text or "no_resize_control" in text
        files.append((path, "qie" if edit else "fp" if "fp_1f" in text else "wan"))
    names = {"qie": "qwen_image_edit", "fp": "framepack", "wan": "wan"}
    asked = [(str(path), suffix) for path, suffix in files]
    theirs = loaded(MUSUBI, asked, forked_venv, trainer / "src")
    for (path, suffix), wanted in zip(files, theirs, strict=True):
        task = "edit-2509" if suffix == "qie" else None  # the first takes one control alone
        made = imported(path, "cats", names[suffix], task)
        assert planned(made) == wanted, path.read_text(encoding="utf-8")
        assert sum(wanted.values()) >= 4


def put_files_of_sdscripts(root: Path) -> None:
    """Put images where sd-scripts' documentation has them; C: is a folder's name here."""
    for name in ("C:\\hoge", "C:\\fuga", "C:\\piyo", "C:\\reg"):
        put_images(root / name)
    world.draw(root / "C:\\hoge/without.png", 7, (64, 64))
    world.draw(root / "C:\\hoge/sub/deep.png", 8, (64, 64))
    world.draw(root / "C:\\one/only.png", 9, (64, 64))
    for path in (root / "C:\\fuga").glob("*.txt"):
        path.unlink()
    (root / "C:\\reg/ant.txt").write_text("two\nlines")
    tags = {"caption": "a list says", "tags": "one, two"}
    entries = {name: tags for name in IMAGES if name != "bee.jpg"}
    (root / "C:\\piyo\\piyo_md.json").write_text(json.dumps(entries))
    entries["ant.png"] = {"caption": "listed in\nseveral lines", "tags": "three"}
    (root / "C:\\piyo\\piyo_md.json").write_text(json.dumps(entries))
    put_images(root / "path/to/image_dir")
    (root / "path/to/image_dir/ant.txt").write_bytes(SEVERAL_LINES)
    put_images(root / "path/to/image/directory")
    put_images(root / "full")
    rows = [{"image_path": str(root / f"full/{name}"), "caption": name} for name in IMAGES]
    (root / "full.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


MORE_OF_SDSCRIPTS = (
    """
[general]
enable_bucket = true
caption_extension = "txt"
min_bucket_reso = 128
[[datasets]]
resolution = 512
[[datasets.subsets]]
image_dir = "path/to/image_dir"
num_repeats = 5
[[datasets.subsets]]
image_dir = "path/to/image_dir"
num_repeats = 7
[[datasets]]
resolution = [640, 384]
bucket_no_upscale = true
bucket_reso_steps = 32
[[datasets.subsets]]
image_dir = "path/to/image_dir"
flip_aug = true
[[datasets]]
resolution = 480
[[datasets.subsets]]
image_dir = "path/to/image/directory"
[[datasets]]
resolution = [256, 320]
enable_bucket = false
[[datasets.subsets]]
image_dir = "full"
metadata_file = "full.jsonl"
""",
    # Regularisation images: too few, too many, of two folders, and without others in their block.
    """
[general]
caption_extension = "txt"
[[datasets]]
resolution = 256
[[datasets.subsets]]
image_dir = "path/to/image_dir"
num_repeats = 7
[[datasets.subsets]]
image_dir = "path/to/image/directory"
is_reg = true
num_repeats = 2
[[datasets.subsets]]
image_dir = "C:\\\\reg"
is_reg = true
[[datasets]]
resolution = 320
[[datasets.subsets]]
image_dir = "C:\\\\one"
num_repeats = 3
[[datasets.subsets]]
image_dir = "full"
is_reg = true
num_repeats = 2
[[datasets]]
resolution = 384
[[datasets.subsets]]
image_dir = "full"
is_reg = true
""",
)


def test_items_of_sdscripts_dataset_files_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_venv: Path
) -> None:
    trainer, root = sources("sd-scripts"), tmp_path / "root"
    put_files_of_sdscripts(root)
    monkeypatch.chdir(root)
    blocks = [
        block.replace('"/path/to', '"path/to')
        for page in ("config_README-en.md", "flux_train_network.md")
        for block in documented(trainer / f"docs/{page}")
        if "image_dir =" in block
        and "validation_split" not in block  # which takes images away at random
    ]
    assert len(blocks) == 4
    files = []
    for number, block in enumerate([*blocks, *MORE_OF_SDSCRIPTS]):
        path = root / f"{number}.toml"
        path.write_text(block, encoding="utf-8")
        files.append(str(path))
    theirs = loaded(SDSCRIPTS, files, forked_venv, trainer)
    for path, wanted in zip(files, theirs, strict=True):
        assert planned(imported(Path(path), "cats")) == wanted, path
        assert sum(wanted.values()) >= 4


# -- caches ---------------------------------------------------------------------------------------

# Caches latents beside the images, as sd-scripts' training scripts do before they train.
CACHING = (
    SDSCRIPTS.partition("found = []")[0]
    + """
import torch
from accelerate import Accelerator
from diffusers import AutoencoderKL
vae = AutoencoderKL.from_pretrained(sys.argv[2]).eval()
config = config_util.load_user_config(sys.argv[1])
blueprint = BlueprintGenerator(ConfigSanitizer(True, True, False, True)).generate(config, args)
group, _ = config_util.generate_dataset_group_by_blueprint(blueprint.dataset_group)
group.new_cache_latents(vae, Accelerator(cpu=True))
"""
)


def test_latents_that_sdscripts_own_code_cached_are_adopted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_venv: Path
) -> None:
    trainer, root = sources("sd-scripts"), tmp_path / "root"
    put_images(root / "images")
    monkeypatch.chdir(root)
    sdscripts_world.tiny_vae().save_pretrained("models/sdxl/vae")
    for place in ("text_encoder", "text_encoder_2"):  # nothing reads them but for a digest
        folder = Path("models/sdxl", place)
        folder.mkdir()
        for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
            (folder / name).write_text("{}")
        (folder / "config.json").write_text('{"model_type": "clip_text_model", "hidden_size": 16}')
        (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    text = """
    [general]
    enable_bucket = true
    min_bucket_reso = 64
    caption_extension = ".txt"
    [[datasets]]
    resolution = 128
    [[datasets.subsets]]
    image_dir = "images"
    flip_aug = true
    """
    Path("dataset.toml").write_text(text)
    command = [forked_venv / "bin/python", "-c", CACHING, "dataset.toml", "models/sdxl/vae"]
    output_of(*command, paths=[trainer])
    assert len([*Path("images").glob("*_sdxl.npz")]) == len(IMAGES)
    made = imported(Path("dataset.toml"), "cats")
    assert made.values["datasets"]["images"]["adopt_from"] == ["images"]
    del made.values["runs"]["cats"]["trainer"]

    def planned() -> tuple[Facts, RunPlan]:
        facts = Facts(parse(made.values), Memo(None))
        return facts, make_plan(facts, ["cats"]).runs["cats"]

    facts, plan = planned()
    said: list[str] = []
    folders = {"images": facts.config.datasets["images"].adopt_from}
    counts = adopt(plan, folders, say=said.append)
    assert counts["adopted"] == len(IMAGES), said
    latents = [state for part, state in planned()[1].parts.items() if kind_of(part.name) != "text"]
    assert [(state.fresh, state.stale) for state in latents] == [(len(IMAGES), [])]
