"""Checks of a run that span several sections: datasets, model, trainer, external programs.

Where a trainer would stop with an assertion, or round in silence, the configuration is refused.
Sources: sd-scripts' `adjust_min_max_bucket_reso_by_steps` (library/train_util.py) and the calls of
`verify_bucket_reso_steps` in its training scripts; musubi-tuner's `BucketSelector`
(dataset/bucket.py), and `handle_model_specific_args` and `main` of its *_train_network.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from latentmake.config.datasets import Dataset
from latentmake.config.external_trainers import MusubiTrainer, SdScriptsTrainer
from latentmake.config.fields import MACHINE, Resolution, declared
from latentmake.config.machines import ExternalProgram
from latentmake.config.models import Model
from latentmake.config.runs import Run
from latentmake.config.trainers import WanTrainer
from latentmake.errors import ConfigError

if TYPE_CHECKING:
    from latentmake.config.rows import Rule, Scripts


def control_counts(model: Model, settings: Dataset) -> tuple[int, int | None]:
    """Return the fewest and most control images of an item; None for any number.

    Where a model is trained on one frame they are as many as `fp_1f_clean_indices`, by default one.
    Source: musubi-tuner, `ImageDataset.__init__` (dataset/image_video_dataset.py).
    """
    if model.version.one_frame:
        count = len(settings.fp_1f_clean_indices or [0])
        return count, count
    return model.version.controls


def check_row(run: str, dataset: str, settings: Dataset, name: str, model: Model) -> None:
    """Check a dataset of a run against the row of its model.

    Args:
        run: name of the run.
        dataset: name of the dataset.
        settings: its section.
        name: of the model.
        model: its section.

    Raises:
        ConfigError: the first mistake.
    """
    version, where = model.version, f"datasets.{dataset}"
    title = f"{model.title} ({model.task})" if model.task else model.title
    holds = "videos" if settings.video else "images"
    if not (version.videos if settings.video else version.images):
        others = "images" if settings.video else "videos"
        hint = "leave out its `target_frames`" if settings.video else "give it `target_frames`"
        raise ConfigError(
            f"the dataset {dataset} holds {holds}, and {title} takes {others} alone",
            where=f"runs.{run}.datasets",
            hint=f"{hint}, or use another model than {name}",
        )
    least, most = control_counts(model, settings)
    if most == 0 and settings.control_directory is not None:
        what = f"{title} takes no control images"
        raise ConfigError(what, where=f"{where}.control_directory", hint="leave it out")
    listed = settings.is_list and not model.spec.encodes  # by columns of the list
    if least and settings.control_directory is None and not listed:
        what = f"{title} needs control images"
        raise ConfigError(what, where=f"{where}.control_directory", hint="name their folder")
    for keys, counts, what in _rules(model):
        if not counts and (key := settings.first_set(*keys)):
            what = f"{title} {what}"
            raise ConfigError(what, where=f"{where}.{key}", hint="leave it out")
    if model.spec.scripts is not None and model.spec.scripts.layers != settings.multiple_target:
        what = f"{title} needs the layers of each image"
        raise ConfigError(what, where=f"{where}.multiple_target", hint="set it to true")
    _check_sections(settings, model, title, where)
    if version.one_frame and settings.fp_1f_target_index is None:
        what = f"{title} needs the index of the frame that is trained"
        raise ConfigError(what, where=f"{where}.fp_1f_target_index", hint="set it, usually to 9")


def _check_sections(settings: Dataset, model: Model, title: str, where: str) -> None:
    """Refuse lengths of clips below that of a section, of which the script of latents would die."""
    scripts, window = model.spec.scripts, settings.fp_latent_window_size
    assert scripts is not None
    if not scripts.sections or not settings.video or settings.frame_extraction == "full":
        return
    least = scripts.frames * window + 1
    short = [frames for frames in settings.target_frames or () if frames < least]
    if short:
        what = f"{short[0]} frames are too few for a section of {title}, which has {window} latents"
        raise ConfigError(what, where=f"{where}.target_frames", hint=f"use {least} or more")


def _rules(model: Model) -> Iterator[tuple[tuple[str, ...], bool, str]]:
    """Yield keys of a dataset, whether they have an effect, and the reason where they have not."""
    scripts = model.spec.scripts
    assert scripts is not None
    own_sizes = ("no_resize_control", "control_resolution")
    yield own_sizes, scripts.sized_controls, "takes control images of the item's own size alone"
    yield ("multiple_target",), scripts.layers, "has one target image"
    yield ("fp_latent_window_size",), scripts.sections, "has no sections"
    one_frame = ("fp_1f_clean_indices", "fp_1f_target_index", "fp_1f_no_post")
    yield one_frame, model.version.one_frame, "is not trained on one frame"


_FP8 = ("fp8_base", "fp8_scaled")


def check_training(name: str, trainer: MusubiTrainer, model: Model) -> None:
    """Refuse settings that the architecture's training script would refuse, or ignore.

    Raises:
        ConfigError: the first mistake.
    """
    scripts, where = model.spec.scripts, f"runs.{name}.trainer"
    assert scripts is not None
    if trainer.timestep_boundary and not model.has_two_networks:
        what = f"{model.task or model.title} has one network, and no boundary between two"
        raise ConfigError(what, where=f"{where}.timestep_boundary", hint="leave it out")
    if trainer.mixed_precision not in scripts.precisions:
        known = " or ".join(scripts.precisions)
        what = f"{scripts.title} is not trained in {trainer.mixed_precision}"
        raise ConfigError(what, where=f"{where}.mixed_precision", hint=f"use {known}")
    if scripts.batch is not None and trainer.batch_size > scripts.batch:
        what = f"{scripts.title} is trained on at most {scripts.batch} item at a time"
        hint = f"use {scripts.batch}, and `gradient_accumulation_steps`"
        raise ConfigError(what, where=f"{where}.batch_size", hint=hint)
    _check_attention(trainer, scripts, where)
    _check_fp8(trainer, scripts, where)
    for rule in scripts.rules:
        if fault := _fault(rule, trainer.arguments, scripts.title):
            what, hint = fault
            raise ConfigError(what, where=f"{where}.arguments", hint=hint)


def _check_attention(trainer: MusubiTrainer, scripts: Scripts, where: str) -> None:
    chosen = trainer.attention
    name = "sdpa" if chosen == "auto" else chosen  # which every machine has
    if name not in scripts.attentions:
        known = ", ".join(scripts.attentions)
        what = f"{scripts.title} is not trained with {name}"
        raise ConfigError(what, where=f"{where}.attention", hint=f"use one of auto, {known}")
    most = scripts.attentions[name]
    if most is not None and trainer.batch_size > most and not trainer.splits_attention:
        beyond = f"batches of more than {most}" if most else "any batch"
        what = f"{scripts.title} needs --split_attn for {beyond} with {name}"
        raise ConfigError(what, where=f"{where}.arguments", hint="add --split_attn")


def _check_fp8(trainer: MusubiTrainer, scripts: Scripts, where: str) -> None:
    asked = tuple(key for key in _FP8 if getattr(trainer, key))
    if not asked or asked in scripts.fp8:
        return
    for known in scripts.fp8:
        if more := [key for key in known if key not in asked]:
            what = f"{scripts.title} takes {' and '.join(known)} together alone"
            hint = f"set `{more[0]}: true` too"
            raise ConfigError(what, where=f"{where}.{asked[0]}", hint=hint)
    what = f"the training script of {scripts.title} does not take it"
    raise ConfigError(what, where=f"{where}.{asked[-1]}", hint="leave it out")


def _fault(rule: Rule, arguments: Sequence[str], title: str) -> tuple[str, str] | None:
    """Return what is wrong with a flag among arguments, and the hint."""
    given = _values(arguments)
    if rule.flag not in given:
        return None
    value = given[rule.flag]
    if rule.values is not None and value not in rule.values:
        if not rule.values:
            return f"{title} refuses {rule.flag}", "leave it out"
        known = " or ".join(rule.values)
        return f"{title} refuses {rule.flag} {value}", f"use {known}, or leave it out"
    if rule.most is not None and value.isdecimal() and int(value) > rule.most:
        return f"{title} refuses {rule.flag} {value}", f"use {rule.most} or less"
    if missing := [each for each in rule.needs if each not in given]:
        return f"{title} needs {' and '.join(missing)} beside {rule.flag}", "add it"
    if beside := [each for each in rule.without if each in given]:
        return f"{title} refuses {rule.flag} beside {beside[0]}", "leave out one of them"
    return None


def _values(arguments: Sequence[str]) -> dict[str, str]:
    """Return the flags among arguments with what stands behind each; "" where nothing does."""
    found: dict[str, str] = {}
    for argument, following in zip(arguments, (*arguments[1:], ""), strict=False):
        if argument.startswith("--"):
            flag, equals, value = argument.partition("=")
            found[flag] = value if equals else following
    return found


def check_wan(name: str, trainer: WanTrainer, model: Model) -> None:
    """Refuse a model that the trainer does not train, and sample clips that it cannot draw.

    Raises:
        ConfigError: the first mistake.
    """
    task = str(model.task)
    if not model.spec.encodes or task.endswith("-FC") or task.startswith("flf2v"):
        what = f"the trainer wan does not train {model.task or model.title}"
        hint = "use kind: musubi"
        raise ConfigError(what, where=f"runs.{name}.trainer.kind", hint=hint)
    _check_boundary(f"runs.{name}.trainer.timestep_boundary", trainer, model)
    if trainer.samples.prompts and model.image_to_video:
        what = f"{task} draws from a picture, and sample clips are drawn from prompts alone"
        raise ConfigError(what, where=f"runs.{name}.trainer.samples", hint="leave them out")
    size = trainer.samples.resolution
    side = model.spec.side
    if size is not None and (size.width % side or size.height % side):
        what = f"{size.name} is not made of multiples of {side}, as Wan needs"
        where = f"runs.{name}.trainer.samples.resolution"
        raise ConfigError(what, where=where, hint="use [832, 480] or the like")


def _check_boundary(where: str, trainer: WanTrainer, model: Model) -> None:
    boundary = trainer.timestep_boundary
    if boundary is None:
        return
    if not model.has_two_networks:
        what = f"{model.task} has one network, and no boundary between two"
        raise ConfigError(what, where=where, hint="leave it out")
    for key, path, none in (
        ("dit", model.dit, 0),
        ("dit_high_noise", model.dit_high_noise, 1000),
    ):
        if path is not None and boundary == none:
            what = f"{boundary} leaves no timesteps to train `{key}` on"
            raise ConfigError(what, where=where, hint=f"leave it out, or the model's `{key}`")


_KINDS = {"plain": "sd", "musubi": "wan", "sdscripts": "sdscripts"}  # of trainers, by layout


def check_run(
    name: str,
    run: Run,
    model: Model,
    datasets: Mapping[str, Dataset],
    program: ExternalProgram | None,
) -> None:
    """Check a run against its datasets, model and trainer, and the program for its model's layout.

    Raises:
        ConfigError: the first mistake.
    """
    _check_trainer(name, run, model)
    _check_validation(name, run)
    if model.layout == "sdscripts":
        _check_sdscripts(name, run, model, datasets, program)
    if model.layout == "musubi":
        if isinstance(run.trainer, WanTrainer):
            check_wan(name, run.trainer, model)
        _check_musubi(name, run, model, datasets, program)
        return
    where = f"runs.{name}.datasets"
    for dataset, settings in datasets.items():
        if settings.video:
            what = f"the dataset {dataset} holds videos, which {run.model} cannot encode"
            hint = f"set the `task` or `architecture` of models.{run.model} if it can"
            raise ConfigError(what, where=where, hint=hint)
        if settings.control_directory:
            what = f"the dataset {dataset} has control images, which only musubi-tuner's models use"
            raise ConfigError(what, where=where, hint="leave out its `control_directory`")


def check_sides(sizes: Iterable[Resolution], step: int, where: str, reason: str) -> None:
    """Refuse resolutions whose sides are not multiples of `step` pixels.

    `reason` ends the message: `... pixels are not a multiple of {reason}`.

    Raises:
        ConfigError: the first mistake.
    """
    for side in (side for size in sizes for side in (size.width, size.height)):
        if side % step:
            below = side // step * step
            near = " or ".join(str(each) for each in (below, below + step) if each > 0)
            what = f"{side} pixels are not a multiple of {reason}"
            raise ConfigError(what, where=where, hint=f"use {near}")


def check_steps(sizes: Iterable[Resolution], steps: int, dataset: str) -> None:
    """Refuse bucket steps that are larger than a resolution.

    Raises:
        ConfigError: the first mistake.
    """
    where = f"datasets.{dataset}.bucket_reso_steps"
    for size in sizes:
        if size.width * size.height < steps**2:
            what = f"{steps} is more than the resolution {size.name} has"
            raise ConfigError(what, where=where, hint="use smaller steps or a larger resolution")


def refuse_ineffective(name: str, dataset: Dataset, models: Mapping[str, Model]) -> None:
    """Refuse a key of a dataset that has no effect on the caches of any of its models.

    Raises:
        ConfigError: the first such key.
    """
    layouts = {model.layout for model in models.values()}
    for key in Dataset.model_fields if layouts else ():
        effective = declared(Dataset, key, MACHINE).layouts
        if effective and not layouts & {*effective} and dataset.first_set(key):
            what = f"only caches of the layout {' or '.join(effective)} depend on this, and "
            what += f"{', '.join(sorted(models))} has others"
            raise ConfigError(what, where=f"datasets.{name}.{key}", hint="leave it out")


def _check_trainer(name: str, run: Run, model: Model) -> None:
    trainer = run.trainer
    if trainer is None:
        return
    if trainer.layout != model.layout:
        what = f"this trainer reads caches of the layout {trainer.layout}, and {run.model} has "
        what += model.layout
        kind = _KINDS[model.layout]
        if model.spec.scripts is not None and not model.spec.encodes:
            kind = "musubi"
        hint = f"use kind: {kind}, or set `layout` or `task` of models.{run.model}"
        raise ConfigError(what, where=f"runs.{name}.trainer.kind", hint=hint)
    key = trainer.network
    if all(getattr(model, each) is None for each in (key, *trainer.alternatives)):
        what = f"the model {run.model} has no `{key}` to train"
        hint = f"add `{key}` to models.{run.model}, or leave out the run's `trainer`"
        raise ConfigError(what, where=f"runs.{name}.model", hint=hint)


def _check_validation(name: str, run: Run) -> None:
    if run.validation is None or (run.trainer is not None and run.trainer.evaluates):
        return
    what = "the run has no trainer that could leave items out"
    if run.trainer is not None:
        what = f"the trainer {run.trainer.kind} evaluates no items that are held out; only wan does"
    hint = "leave it out, or hold images or videos out by a dataset of their own"
    raise ConfigError(what, where=f"runs.{name}.validation", hint=hint)


def _refuse_remote(name: str, datasets: Mapping[str, Dataset], program: str) -> None:
    for dataset, settings in datasets.items():
        if settings.remote:
            what = f"the dataset {dataset} lies on S3; {program} reads folders on disk alone"
            hint = "copy it to a folder, or mount the bucket"
            raise ConfigError(what, where=f"runs.{name}.datasets", hint=hint)


def _refuse_choosing(dataset: str, settings: Dataset, program: str) -> None:
    keys = ("caption_dropout_every_n_epochs", "token_warmup_step")
    if settings.captions and (key := settings.captions.first_set(*keys)):
        what = f"{program} cannot choose among the texts of an item by step or epoch"
        where = f"datasets.{dataset}.captions.{key}"
        raise ConfigError(what, where=where, hint="leave it out")


def _require(name: str, program: ExternalProgram | None, key: str, title: str) -> None:
    if program is None:
        hint = f"the run {name} needs {title}: set {key}.path to its folder"
        raise ConfigError("this key is missing", where=key, hint=hint)


def _check_musubi(
    name: str,
    run: Run,
    model: Model,
    datasets: Mapping[str, Dataset],
    program: ExternalProgram | None,
) -> None:
    trainer = run.trainer
    ours = isinstance(trainer, WanTrainer) and not model.scripted
    reader = "this trainer" if isinstance(trainer, WanTrainer) else "musubi-tuner"
    if isinstance(trainer, MusubiTrainer) or model.scripted:
        _require(name, program, "musubi_tuner", "musubi-tuner")
    if isinstance(trainer, MusubiTrainer):
        check_training(name, trainer, model)
    step, sizes = model.spec.side, f"runs.{name}.resolutions"
    check_sides(
        run.resolutions,
        step,
        sizes,
        f"{step}, as Wan needs" if ours else f"{step}: musubi-tuner would round them",
    )
    _refuse_remote(name, datasets, reader)
    buckets = "Wan's" if ours else "musubi-tuner's"
    least = 2 * step  # pixels: below, the smallest bucket would have no width
    small = [size for size in run.resolutions if size.width * size.height < least**2]
    for dataset, settings in datasets.items():
        where = f"datasets.{dataset}"
        if not isinstance(trainer, WanTrainer):
            _refuse_choosing(dataset, settings, "musubi-tuner")
        if settings.fit == "bucket" and small:
            what = f"{small[0].name} is too small for {buckets} buckets"
            raise ConfigError(what, where=sizes, hint=f"use {least} or more")
        keys = [key for key in settings.own_clips if key != "path"]  # a list is given to them
        if model.scripted and keys:
            what = "musubi-tuner's own scripts read videos cut to buckets, as stored"
            hint = "leave it out"
            if model.spec.encodes:
                hint += f", or leave out `encoder` of models.{run.model}"
            raise ConfigError(what, where=f"{where}.{keys[0]}", hint=hint)
        if settings.bucket_reso_steps not in (None, step):
            what = f"{buckets} buckets go in steps of {step}"
            raise ConfigError(what, where=f"{where}.bucket_reso_steps", hint="leave it out")
        check_row(name, dataset, settings, run.model, model)


def _check_sdscripts(
    name: str,
    run: Run,
    model: Model,
    datasets: Mapping[str, Dataset],
    program: ExternalProgram | None,
) -> None:
    strategies = model.spec.strategies
    if strategies is None:
        what = f"sd-scripts does not train {model.title}"
        raise ConfigError(what, where=f"models.{run.model}.layout", hint="leave it out")
    side, trainer = model.spec.side, run.trainer
    reason = f"{side}, as {model.architecture} needs"
    check_sides(run.resolutions, side, f"runs.{name}.resolutions", reason)
    _refuse_remote(name, datasets, "sd-scripts")
    for dataset, settings in datasets.items():
        _refuse_choosing(dataset, settings, "sd-scripts")
        if settings.is_list:
            what = "sd-scripts reads folders of images, and this is a list"
            hint = "name the folder, and the list as its `metadata_file`"
            raise ConfigError(what, where=f"datasets.{dataset}.path", hint=hint)
        if settings.fit == "bucket":
            _check_buckets(dataset, settings, run, model)
    if not model.spec.encodes:
        _require(name, program, "sd_scripts", "sd-scripts")
    if not isinstance(trainer, SdScriptsTrainer):
        return
    known = strategies.scripts
    if trainer.script not in (None, *known):
        what, where = f"{trainer.script} does not train {model.architecture}", "trainer.script"
        raise ConfigError(what, where=f"runs.{name}.{where}", hint=f"use {' or '.join(known)}")
    if model.spec.caches_text and (flag := trainer.forbidden()):
        what, where = f"{flag} does not go with cached text", f"runs.{name}.trainer.arguments"
        raise ConfigError(what, where=where, hint="leave it out, and see the dataset's `captions`")
    _require(name, program, "sd_scripts", "sd-scripts")


def _check_buckets(name: str, dataset: Dataset, run: Run, model: Model) -> None:
    where, divisor = f"datasets.{name}", model.spec.bucket_divisor
    if run.trainer is not None and model.spec.strategies is not None:
        divisor = model.spec.strategies.divisor or divisor
    steps, _, least, most = dataset.bucketing(model.spec)
    if steps % divisor:
        what = (
            f"{steps} is not a multiple of {divisor}, as sd-scripts asks for {model.architecture}"
        )
        hint = f"use a multiple of {divisor}"
        raise ConfigError(what, where=f"{where}.bucket_reso_steps", hint=hint)
    if not least:
        what = f"{dataset.min_bucket_reso} is smaller than a step of {steps}"
        raise ConfigError(what, where=f"{where}.min_bucket_reso", hint=f"use {steps} or more")
    for size in run.resolutions:
        shorter, longer = sorted((size.width, size.height))
        refused = f"than the resolution {size.name} has, which sd-scripts refuses"
        if shorter < least:
            what, hint = f"{least} is more {refused}", f"set it to {shorter} or less"
            raise ConfigError(what, where=f"{where}.min_bucket_reso", hint=hint)
        if longer > most:
            what, hint = f"{most} is less {refused}", f"set it to {longer} or more"
            raise ConfigError(what, where=f"{where}.max_bucket_reso", hint=hint)
    check_steps(run.resolutions, steps, name)


def check_generation(name: str, run: Run, model: Model) -> None:
    """Refuse clips that the run's trainer or model cannot make.

    Raises:
        ConfigError: the first mistake.
    """
    settings, where = run.generate, f"runs.{name}.generate"
    if settings is None:
        return
    if run.trainer is None or not run.trainer.generates:
        what = "the run has no trainer" if run.trainer is None else "its trainer generates no clips"
        raise ConfigError(what, where=where, hint="leave it out, or set the trainer's `kind: wan`")
    if settings.resolution is not None:
        side = model.spec.side
        check_sides([settings.resolution], side, f"{where}.resolution", f"{side}, as Wan needs")
    if settings.image is not None and not model.image_to_video:
        what = f"{model.task} draws from text alone"
        hint = "leave it out, or use an image-to-video model"
        raise ConfigError(what, where=f"{where}.image", hint=hint)
