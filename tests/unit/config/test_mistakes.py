"""Each mistake in a configuration is one line with key, value and hint."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from controlled_world import MODELS
from latentmake.base.errors import ConfigError, nearest
from latentmake.config.datasets import Dataset
from latentmake.config.fields import PATTERNS
from latentmake.config.mistakes import foreign_words, sections
from latentmake.config.root import Config, parse
from refusals import refused

SECTIONS = {
    "dataset": "datasets.cats",
    "model": "models.m",
    "run": "runs.r",
    "trainer": "runs.r.trainer",
}
TEXTS = {"sd1": 1, "sd2": 1, "sdxl": 2, "sd3": 3, "flux": 2}
"""Number of text encoders of each architecture of sd-scripts."""


def model_of(kind: str) -> dict[str, Any]:
    """Return the model of a trainer, or of an architecture; `film` and `reg` are kinds of runs."""
    model: dict[str, Any] = {"vae": "vae", "text": ["text_encoder"]}
    if kind == "sd":
        return model | {"unet": "unet"}
    if kind in ("wan", "musubi", "film"):
        text = {"path": "t5.pth", "tokenizer": "t"}
        return model | {"task": "t2v-1.3B", "text": [text], "dit": "dit.safetensors"}
    if kind in MODELS:
        model |= {"architecture": kind, "dit": "dit", **MODELS[kind]}
        return {key: value for key, value in model.items() if value is not None}
    architecture = {"sdscripts": "sd1", "reg": "sdxl"}.get(kind, kind)
    model |= {"layout": "sdscripts", "architecture": architecture}
    model |= {"text": [f"text_{number}" for number in range(TEXTS[architecture])]}
    return model if kind in TEXTS else model | {"checkpoint": "sd.safetensors"}


def configuration(kind: str) -> dict[str, Any]:
    """Return a small configuration: of a trainer, or without one for an architecture.

    `film` has videos and no trainer, `reg` is for sd-scripts with regularisation images `man`.
    """
    datasets: dict[str, Any] = {"cats": {"path": "data/cats"}}
    sizes: dict[str, Any] = {"sd": [64], "film": [[480, 832]]}
    if kind == "film":
        datasets["cats"]["target_frames"] = [5]
    if kind in MODELS:
        datasets["cats"]["fit"] = "bucket"
    if kind == "reg":
        datasets["man"] = {"path": "man", "is_reg": True}
    run = {"datasets": [*datasets], "model": "m", "resolutions": sizes.get(kind, [512])}
    if kind in ("sd", "wan", "musubi", "sdscripts", "reg"):
        run["trainer"] = {"kind": "sdscripts" if kind == "reg" else kind}
    programs = {"musubi_tuner": {"path": "../tuner"}, "sd_scripts": {"path": "../sd-scripts"}}
    return {"datasets": datasets, "models": {"m": model_of(kind)}, "runs": {"r": run}, **programs}


def changed(kind: str, **changes: Any) -> dict[str, Any]:
    """Return a configuration with values put at paths, such as `model.vae`."""
    values = configuration(kind)
    for path, value in changes.items():
        first, dot, rest = path.partition(".")
        *names, key = f"{SECTIONS.get(first, first)}{dot}{rest}".split(".")
        place: Any = values
        for name in names:
            place = place.setdefault(name, {})
        place[key] = value
    return values


def line(kind: str, **changes: Any) -> str:
    return refused(lambda: parse(changed(kind, **changes)), kind=ConfigError)


# Kind of configuration: path = value & path = value -> what its line says, or `taken`.
FORM = r"""
sd: modles = {} -> did you mean `models`?
sd: dataset.num_repeat = 2 -> did you mean `num_repeats`?
sd: model.text = [{"path": "t", "tokeniser": "t"}] -> m.text.0.tokeniser | did you mean `tokenizer`?
sd: model.text_arguments = "--fp8_vl" -> write it as a list: [--fp8_vl]
sd: dataset.learning_rate = 0.1 -> `learning_rate` belongs to runs.NAME.trainer
sd: trainer.num_repeats = 2 -> `num_repeats` belongs to datasets.NAME
sd: batch.zzz = 1 -> batch.zzz | known here: items
sd: trainer.rank = "eight" -> rank | "eight" | integer
sd: datasets.cats = "data/cats" -> datasets.cats | "data/cats"
sd: dataset.fit = "stretch" -> fit | "stretch" | crop | bucket
sd: model.ai_training = {"latent": ".img_sdxl"} -> ai_training.latent | did you mean `latents`?
"""
"""What a schema refuses too."""
MEANING = r"""
sd: model.architecture = "qwen_imag_edit" -> is not known here; did you mean `qwen_image_edit`?
sd: model.architecture = "FLUX.2-klein-4B" -> did you mean `flux_2_klein_4b`?
sd: run.datasets = ["cat"] -> `cat` | did you mean `cats`?
sd: run.model = "tiny" -> `tiny` | known: m
sd: run.datasets = ["cats", "cats"] -> `cats` is named twice
sd: run.resolutions = [64, [64, 64]] -> `64` is named twice
sd: run.resolutions = [[1, 2, 3]] -> r.resolutions.0 | [1, 2, 3] | [width, height]
sd: run.resolutions = ["wide"] -> r.resolutions.0 | "wide" | [width, height]
sd: run.resolutions = [1048576] -> runs.r.resolutions.0. | use 8192 or less
sd: run.resolutions = ["1048576"] -> runs.r.resolutions.0. | use 8192 or less
sd: run.resolutions = [[512, 8193]] -> runs.r.resolutions.0. | use 8192 or less
sd: export.resolution = 8192 -> taken
sd: dataset.num_repeats = 0 -> num_repeats | 0 | 1
sd: trainer.kind = "wann" -> kind | "wann" | sd
sd: trainer.rank = true -> rank | true
sd: trainer.lr_warmup_steps = 10 -> `lr_warmup_steps` has no effect | constant_with_warmup
sd: dataset.class_tokens = true -> true is no text; put it in quotes
sd: dataset.captions = {"caption_prefix": {"folder": null}}
    -> captions.caption_prefix: {"folder": null} is no text; put it in quotes
sd: dataset.captions = {"replacements": {"old": false}}
    -> captions.replacements.old: false should be text | put them in quotes
sd: dataset.captions = {"caption_dropout_rate": 0.1} -> `caption_dropout_rate` needs `variants: 2`
sd: models.m = "runwayml/sd15"
    -> models.m | section with keys | run `hf download runwayml/sd15 --local-dir models/sd15`
sd: run.model = "runwayml/sd15"
    -> there is no model | known: m; run `hf download runwayml/sd15 --local-dir models/sd15`
sd: model.vae = {"hub": "someone/vae"} -> `revision` | huggingface.co/someone/vae/commits/main
sd: model.vae = {"hub": "someone/vae", "revision": "fp16"} -> 40 hexadecimal | commits/fp16 lists
sd: model.vae = {"config": "c"} -> either `path` or `hub`
sd: model.vae = {"path": "p", "hub": "h", "revision": "r"} -> either `path` or `hub`
sd: model.unet = null -> runs.r.model | `unet` | models.m
sd: datasets.a/b = {"path": "x"} -> "a/b"
sd: dataset.caption_extension = "txt" -> caption_extension: "txt"
sd: dataset.background = "whit" -> background: "whit"
sd: model.ai_training = {"text": [".txt_t5cache", ".txt_clipl"]} -> 2 endings for 1 text encoders
sd: model.ai_training = {} -> `latents`
sd: batch.items = 0 -> batch.items: 0 should be 1 or more, or auto; see config/README.md
sd: trainer.seed = 18446744073709551616 -> seed | is too large a number
sd: trainer.samples = {"seed": -1} -> samples.seed | use 0 or more
sd: trainer.learning_rate = 1e5 -> learning_rate: 100000.0 | use 1000 or less
sd: trainer.learning_rate = "1e308" -> learning_rate | is too large
sd: trainer.learning_rate = "inf" -> learning_rate: "inf" | finite
sd: trainer.optimizer_arguments = {"eps": 1e308} -> optimizer_arguments.eps: 1e+308 should be a num
sd: trainer.optimizer_arguments = {"\u0000": 1} -> holds a NUL character
sd: trainer.optimizer_arguments = {"betas": ["a"]}
    -> optimizer_arguments.betas: ["a"] should be a number, true, false, or a list of numbers
sd: dataset.path = "data/\u0000" -> datasets.cats.path: holds a NUL character; remove it
sd: trainer.samples = {"prompts": []} -> samples.prompts: is an empty list; write a prompt, or leav
sd: trainer = null & run.validation = {"items": 2} -> runs.r.validation: the run has no trainer
"""
CLIPS_AND_SCRIPTS = r"""
film: dataset.path = "s3://bucket/list.jsonl" -> read from a disk
film: dataset.path = "l.json" & dataset.metadata_file = "m" -> `metadata_file` is not for a list
film: dataset.source_fps = "fast" -> source_fps: "fast" should be a number of frames
film: dataset.source_fps = 0 -> source_fps: 0 should be a number of frames
film: dataset.source_fps = NaN -> or auto
film: dataset.sample_stride = 0 -> sample_stride
film: dataset.bucket_no_upscale = true -> bucket_no_upscale
film: dataset.target_frames = null & dataset.sample_stride = 2 -> `sample_stride` is about videos
film: dataset.target_frames = null & dataset.source_fps = "auto" -> `source_fps` is about videos
film: dataset.target_frames = null & dataset.display_rotation = true -> `display_rotation` is about
film: model.encoder = "musubi" -> taken
film: dataset.path = "l.jsonl" & model.encoder = "musubi" -> taken
film: dataset.fit = "crop" -> taken
film: dataset.fit = "crop" & model.encoder = "musubi" -> datasets.cats.fit: | leave out `encoder`
film: dataset.sample_stride = 2 -> taken
film: dataset.sample_stride = 2 & model.encoder = "musubi" -> cats.sample_stride: | out `encoder`
film: dataset.source_fps = "auto" -> taken
film: dataset.source_fps = "auto" & model.encoder = "musubi" -> cats.source_fps: | out `encoder`
film: dataset.display_rotation = true & model.encoder = "musubi" -> display_rotation: | `encoder`
film: dataset.control_directory = "c" & dataset.no_resize_control = true -> is about images
musubi: run.resolutions = [500] -> resolutions: 500 | use 496 or 512
musubi: model.task = "i2v-14B" -> i2v-14B needs `clip`
musubi: musubi_tuner = null -> this key is missing | set musubi_tuner.path
sdxl: run.resolutions = [512, [768, 1024]] -> taken
sdxl: run.resolutions = [64, 512] & dataset.fit = "bucket" & dataset.min_bucket_reso = 64 -> taken
sdxl: run.resolutions = [500] -> runs.r.resolutions: 500 pixels | use 496 or 504
flux: run.resolutions = [520] -> runs.r.resolutions: 520 pixels | use 512 or 528
sdxl: run.resolutions = [128] & dataset.fit = "bucket" -> min_bucket_reso: 256 | 128 or less
sdxl: run.resolutions = [[512, 1536]] & dataset.fit = "bucket"
    -> datasets.cats.max_bucket_reso: 1024 | 1536 or more
sdxl: dataset.fit = "bucket" & dataset.min_bucket_reso = 16
    -> datasets.cats.min_bucket_reso: is less than the steps of 32 pixels | use 32 or more
sdxl: dataset.fit = "bucket" & dataset.min_bucket_reso = 16 & dataset.bucket_no_upscale = true
    -> taken
sd1: dataset.fit = "bucket" & dataset.bucket_reso_steps = 32
    -> bucket_reso_steps: 32 is not a multiple of 64 | use a multiple of 64
flux: dataset.fit = "bucket" & dataset.bucket_reso_steps = 32 -> taken
flux: dataset.fit = "bucket" & dataset.bucket_reso_steps = 32 & model.checkpoint = "f.safetensors" &
    trainer = {"kind": "sdscripts"} -> bucket_reso_steps: 32 is not a multiple of 64
sdxl: dataset.path = "s3://bucket/cats" -> runs.r.datasets: | copy it
sdxl: dataset.path = "data/list.jsonl" -> datasets.cats.path: sd-scripts reads folders
sdxl: dataset.target_frames = 5 -> datasets.cats.target_frames: | leave it out
sdxl: dataset.control_directory = "x" -> datasets.cats.control_directory: | leave it
sdxl: dataset.flip_aug = true -> taken
sd: dataset.flip_aug = true -> cats.flip_aug: | only caches of the layout sdscripts | leave it out
sdxl: dataset.alpha_mask = true -> taken
sd: dataset.alpha_mask = true -> datasets.cats.alpha_mask:
sd: dataset.min_bucket_reso = 256 -> datasets.cats.min_bucket_reso:
sd: dataset.max_bucket_reso = 1024 -> datasets.cats.max_bucket_reso:
sdxl: model.max_token_length = "auto" -> one length
sd1: trainer = {"kind": "sd"} -> runs.r.trainer.kind:
sd1: model.unet = "unet" -> `unet` is only for `layout: plain`: leave it out
reg: trainer.prior_loss_weight = 0.5 -> taken
reg: trainer.script = "sdxl_train" -> taken
reg: trainer.arguments = ["--prior_loss_weight", "0.5"] -> taken
reg: dataset.is_reg = true -> runs.r.datasets: all of its datasets are regular
reg: dataset.fit = "bucket" -> datasets.man.fit: sd-scripts shows regularisation images
reg: model.architecture = "sd1" & model.text = ["t"] & trainer.script = "fine_tune"
    -> datasets.man.is_reg: fine_tune knows no regular
reg: trainer.script = "sdxl_train" & trainer.prior_loss_weight = 0.5
    -> runs.r.trainer.prior_loss_weight: sdxl_train does not weight the loss
reg: trainer.prior_loss_weight = 0.5 & datasets.man.is_reg = false -> loss_weight: no dataset of the
reg: run.validation = {"items": 2} -> taken
reg: run.validation = {"items": 2} & trainer.script = "sdxl_train"
    -> runs.r.validation: sdxl_train has no held-out loss
reg: run.validation = {"items": 2} & trainer.logging = false
    -> runs.r.validation: the loss of held-out items is seen in
reg: run.validation = {"items": 2, "clips": 2}
    -> runs.r.validation.clips: sdscripts draws no held-out items
reg: trainer.network_module = "lycoris.kohya" & trainer.network_args = "algo=loha" -> taken
reg: trainer.script = "sdxl_train" & trainer.network_args = "conv_dim=4"
    -> runs.r.trainer.network_args: sdxl_train trains the complete network
wan: datasets.man = {"path": "man", "is_reg": true} & run.datasets = ["cats", "man"]
    -> datasets.man.is_reg: Wan | is trained without regularisation images | ; leave it out
musubi: datasets.man = {"path": "man", "is_reg": true} & run.datasets = ["cats", "man"]
    -> datasets.man.is_reg: Wan | is trained without regularisation images | ; leave it out
"""
ROWS_OF_MUSUBI = r"""
qwen_image: run.model = "m" -> taken
qwen_image_edit: dataset.control_directory = "c" & dataset.no_resize_control = true &
    dataset.control_resolution = 1024 -> taken
qwen_image_edit: dataset.path = "list.jsonl" -> taken
qwen_image_layered: dataset.multiple_target = true -> taken
flux_kontext: dataset.control_directory = "c" & dataset.control_resolution = [512, 768] -> taken
flux_2_dev: dataset.no_resize_control = true & dataset.control_directory = "c" -> taken
framepack: dataset.control_directory = "c" & dataset.fp_1f_target_index = 9 &
    dataset.fp_1f_clean_indices = [0, 10] & dataset.fp_1f_no_post = true -> taken
framepack: dataset.control_directory = "c" & dataset.fp_1f_target_index = 9 &
    dataset.fp_latent_window_size = 8 -> taken
hidream_o1: dataset.control_directory = "c" & dataset.control_resolution = 512 -> taken
film: dataset.control_directory = "c" -> taken
framepack: model.task = "f1" & dataset.target_frames = [37, 33] & dataset.fp_latent_window_size = 8
    -> taken
framepack: model.task = "f1" & dataset.target_frames = [37, 33] & dataset.frame_extraction = "full"
    -> taken
framepack: model.task = "f1" & dataset.target_frames = [37, 33]
    -> target_frames: | 33 frames are too few for a section of FramePack
framepack: model.task = "i2v" -> cats.target_frames: | (i2v) needs this key; set the lengths
framepack: model.task = "f1" & dataset.target_frames = [37] & dataset.fit = "crop"
    -> datasets.cats.fit: | cut to buckets, as stored
qwen_image: dataset.target_frames = [5] -> cats.target_frames: | Qwen-Image takes no videos
qwen_image: dataset.control_directory = "c" -> directory: | Qwen-Image takes no control images
qwen_image_edit: run.model = "m" -> control_directory: | (edit-2509) needs this key; name the folder
qwen_image_layered: run.model = "m" -> cats.multiple_target: | needs this key; set it to true
qwen_image_layered: dataset.multiple_target = true & dataset.missing_caption = "empty"
    -> datasets.cats: | `missing_caption` | layers
qwen_image: dataset.multiple_target = true -> cats.multiple_target: | has one target image
qwen_image: dataset.no_resize_control = true -> cats.no_resize_control: | own size only
framepack: dataset.control_directory = "c" & dataset.fp_1f_target_index = 9 &
    dataset.control_resolution = 64 -> cats.control_resolution: | own size
framepack: dataset.control_directory = "c" -> fp_1f_target_index: | needs this key; set it, usually
qwen_image: dataset.fp_1f_no_post = true -> cats.fp_1f_no_post: | is not trained on one frame
flux_2_dev: dataset.fp_latent_window_size = 5 -> cats.fp_latent_window_size: | has no sections
film: dataset.target_frames = null & dataset.control_directory = "c" &
    dataset.control_resolution = 64 -> cats.control_resolution: | Wan (t2v-1.3B)
kandinsky5: model.task = "k5-pro-t2v-5s-sd" & dataset.target_frames = [5] &
    trainer = {"kind": "musubi", "batch_size": 2}
    -> Kandinsky 5 is trained on at most 1 item at a time
"""
WORDS_OF_OTHERS = r"""
musubi: model.t5 = 1 -> did you mean `text`?
musubi: dataset.image_directory = 1 -> did you mean `path`?
musubi: dataset.cache_directory = 1 -> leave it out: latents and text are always cached
sdscripts: dataset.enable_bucket = 1 -> write `fit: bucket`
sd: trainer.enable_bucket = 1 -> write `fit: bucket` in datasets.NAME
musubi: dataset.resolution = 1 -> write `resolutions` in runs.NAME
musubi: dataset.batch_size = 1 -> `batch_size` belongs to runs.NAME.trainer
sd: trainer.batch_size = 1 -> did you mean `train_batch_size`?
sd: trainer.max_train_steps = 1 -> did you mean `steps`?
musubi: trainer.max_steps = 1 -> did you mean `max_train_steps`?
sd: trainer.save_steps = 1 -> did you mean `save_every_n_steps`?
sdscripts: trainer.min_snr_gamma = 1 -> `arguments: [--min_snr_gamma, ...]`
musubi: trainer.sage_attn = 1 -> leave it out: SageAttention has no backward pass
sd: trainer.attention = 1 -> leave it out: torch chooses the fastest kernel
sd: model.pretrained_model_name_or_path = 1 -> name its parts in models.NAME
sdscripts: pretrained_model_name_or_path = 1 -> `dit` or `checkpoint`
sd: rank = 1 -> `rank` belongs to runs.NAME.trainer
sd: run.exif_rotation = 1 -> `exif_rotation` belongs to datasets.NAME
sd: trainer.guidance_scale = 1 -> belongs to runs.NAME.trainer.samples
sd: dataset.shuffle_caption = 1 -> `shuffle_caption` belongs to datasets.NAME.captions
sdscripts: trainer.masked_loss = 1 -> `alpha_mask: true` in datasets.NAME and `arg
sd: trainer.network_module = 1 -> sd and wan train LoRAs only
musubi: trainer.network_weights = 1 -> arguments: [--network_weights, ...]
wan: run.lora_scale = 1 -> write `lora_strength` in runs.NAME.generate
musubi: trainer.prediction_type = 1 -> belongs to a trainer of kind sd
musubi: cluster.num_gpus = 1 -> known here: partition, account
musubi: export.output_dir = 1 -> known here: folder
sdscripts: sd_scripts.batch_size = 1 -> `batch_size` belongs to musubi_tuner
sd: model.vae = {"path": "vae", "folder": "vae"} -> did you mean `path`?
"""


def rows(*tables: str) -> Iterator[tuple[str, dict[str, Any], list[str]]]:
    """Yield the kind, the changes and the words of each row of tables."""
    for row in re.split(r"\n+(?! )", "".join(tables).strip()):
        found = re.fullmatch(r"(\w+): (.*) -> (.*)", " ".join(row.split()))
        assert found, row
        pairs = (change.split(" = ") for change in found[2].split(" & "))
        changes = {path: json.loads(value) for path, value in pairs}
        yield found[1], changes, found[3].split(" | ")


ROWS = [*rows(FORM, MEANING, CLIPS_AND_SCRIPTS, ROWS_OF_MUSUBI, WORDS_OF_OTHERS)]
NAMES = [f"{kind}: {', '.join(changes)}" for kind, changes, _ in ROWS]


@pytest.mark.parametrize(("kind", "changes", "words"), ROWS, ids=NAMES)
def test_a_mistake_is_one_line_with_key_value_and_mend(
    kind: str, changes: dict[str, Any], words: list[str]
) -> None:
    if words == ["taken"]:
        assert isinstance(parse(changed(kind, **changes)), Config)
        return
    said = line(kind, **changes)
    assert [word for word in words if word not in said] == []
    assert "Traceback" not in said and "https://" not in said


@pytest.mark.parametrize("architecture", TEXTS)
def test_every_architecture_of_sd_scripts_is_taken_with_and_without_buckets(
    architecture: str,
) -> None:
    buckets = {"dataset.fit": "bucket", "dataset.min_bucket_reso": 64}
    assert parse(configuration(architecture))
    assert parse(changed(architecture, **buckets))


@pytest.mark.parametrize("change", ["task", "posterior", "architecture"])
def test_a_model_whose_caches_are_of_another_kind_adopts_none(change: str) -> None:
    kind = {"task": "film", "posterior": "sd", "architecture": "sdxl"}[change]
    changes = {"model.posterior": "sample"} if change == "posterior" else {}
    adopted = {"model.ai_training": {"latents": ".img_sdxl"}, "trainer": None}
    assert "ai_training" in line(kind, **adopted, **changes)


def test_every_key_that_is_advised_exists_and_every_answer_says_what_to_do() -> None:
    known = {key for section in sections(Config) for key in section.model.model_fields}
    keys, answers = foreign_words()
    assert {key for advised in keys.values() for key in advised} <= known
    assert all(text.startswith(("leave it out", "write ", "name ")) for text in answers.values())


def test_neither_names_nor_values_are_answered_with_a_regular_expression() -> None:
    said = line("sd", **{"datasets.schöne Katzen": {"path": "x"}})
    assert said.startswith('datasets.schöne Katzen: "schöne Katzen" is not allowed here')
    assert "use letters (A-Z, a-z), digits, `.`, `_` and `-`" in said
    for key, value in (("caption_extension", "txt"), ("background", "whit")):
        said = line("sd", **{f"dataset.{key}": value})
        assert "; use " in said and not any(pattern in said for pattern in PATTERNS)


def test_a_misspelt_key_is_not_reported_missing_as_well() -> None:
    values = configuration("sd")
    values["modles"] = values.pop("models")
    said = refused(lambda: parse(values), kind=ConfigError)
    assert said == "modles: unknown key; did you mean `models`?"


@pytest.mark.parametrize("section", ["datasets", "models", "runs"])
def test_a_name_is_at_most_as_long_as_names_of_files_allow(section: str) -> None:
    section_of = next(iter(configuration("sd")[section].values()))
    said = line("sd", **{f"{section}.{'c' * 201}": section_of})
    assert "is not allowed here; use letters" in said
    found = parse(changed("sd", **{f"{section}.{'c' * 200}": section_of}))
    assert "c" * 200 in getattr(found, section)


def test_a_message_is_short_however_long_a_value_is_and_many_mistakes_are() -> None:
    said = line("sd", **{f"trainer.rank{number}": 8 for number in range(50)})
    assert "rank0: unknown key" in said and said.endswith("more") and len(said) <= 500
    said = refused(lambda: parse({}), kind=ConfigError)
    assert all(f"{section}: this key is missing" in said for section in ("datasets", "models"))
    long = "x" * 10_000
    keys = ("run.model", "trainer.kind", "trainer.target_modules")
    values = {**dict.fromkeys(keys, long), "dataset.path": f"${long}"}
    for key, value in {**values, "run.datasets": [long], "dataset.fit": [long]}.items():
        assert "x" * 81 not in line("sd", **{key: value})


@pytest.mark.parametrize(
    ("word", "expected"), [("num_repeat", "num_repeats"), ("FIT", "fit"), ("zzzz", None)]
)
def test_nearest_finds_what_was_meant_or_nothing(word: str, expected: str | None) -> None:
    assert nearest(word, Dataset.model_fields) == expected
