"""Root of `config.yaml`, its runs, and the checks of several sections together.

A configuration is refused if a trainer would stop with an assertion, or would silently round a
value. Sources: sd-scripts' `adjust_min_max_bucket_reso_by_steps` (library/train_util.py) and the
calls of `verify_bucket_reso_steps` in its training scripts; musubi-tuner's `BucketSelector`
(dataset/bucket.py), and `handle_model_specific_args` and `main` of its *_train_network.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, Self, TypeAlias, Union, get_args

from pydantic import Field, ValidationError, create_model, model_validator

from latentmake.base.errors import ConfigError, SeveralMistakesError, first_line, refuse_unknown
from latentmake.config.captioners import Captioner, fill_in
from latentmake.config.datasets import Dataset
from latentmake.config.external_trainers import (
    OF_CAPTIONS,
    MusubiTrainer,
    SdScriptsTrainer,
    flags_of,
)
from latentmake.config.fields import (
    CLIPS,
    MACHINE,
    MANIFEST,
    Closed,
    Listed,
    Name,
    Number,
    Resolution,
    ResolutionField,
    Shapes,
    shaped,
)
from latentmake.config.machines import (
    PROGRAMS,
    Batch,
    Cluster,
    Export,
    ExternalProgram,
    History,
    MusubiTuner,
    Publish,
    Store,
)
from latentmake.config.models import Model
from latentmake.config.trainers import (
    Generation,
    Kind,
    Prompt,
    SdTrainer,
    Trainer,
    WanTrainer,
    installed,
)
from latentmake.config.weights import fetching


class Validation(Closed, shapes=Shapes("manifest", "weights")):
    """Items held out of the training."""

    items: Number = Field(ge=1)
    """Number of sources (images or videos) to hold out, at most half of those of the run."""
    clips: Number = shaped(8, CLIPS, ge=0)
    """Number of held-out items for which `evaluate_{run}` draws clips or pictures: videos first,
    then images, in the order of datasets and names. With `0` it only computes losses."""
    every: Number | None = shaped(None, MACHINE, ge=1)
    """Steps between two losses of the held-out items along a training, from its start to its end:
    `validation_loss` in TensorBoard and `curves.png`, and `validation_loss/cats` of the items in a
    folder `cats` of their dataset, or with the `label` cats in their list. By default it computes
    none. With the trainer `sdscripts`: `loss/validation/step_average`, and a last one at the end of
    the training; by default `loss/validation/epoch_average` after each epoch."""


_OwnTrainer = SdTrainer | MusubiTrainer | SdScriptsTrainer | WanTrainer


class Run(Closed):
    """Datasets, a model, resolutions and a trainer."""

    datasets: Listed[str] = Field(min_length=1, json_schema_extra=MANIFEST)
    """Names of `datasets` to train on."""
    model: str = Field(json_schema_extra=Shapes("latents", "text", "weights"))
    """Name of the model in `models`. After a change, only latents and embeddings that the other
    model lacks are made."""
    resolutions: Listed[ResolutionField] = Field(
        min_length=1, json_schema_extra=Shapes("latents", "manifest")
    )
    """Sizes at which every item is encoded: `512` for a square, `[512, 768]` or `512x768` for
    width and height, at most 8192 a side. With `fit: bucket` a size stands for its area. Sides are
    multiples of the VAE's factor (8 for Stable Diffusion, 16 for Wan; see
    [architectures](architectures.md)). Latents lie in `cache/{dataset}/{model}/512/` or
    `.../512x768/`."""
    trainer: Annotated[_OwnTrainer, Field(discriminator="kind")] | None = None
    """Trainer and its settings. `kind` is [`sd`](trainer-sd.md), [`wan`](trainer-wan.md),
    [`musubi`](trainer-musubi.md), [`sdscripts`](trainer-sdscripts.md), or that of a trainer which
    [another package](../how-it-works/architecture.md#to-add-a-trainer) brings. Without a trainer,
    the run consists of its caches, `manifest.jsonl` and `dataset.lock`."""
    generate: Generation | None = None
    """[Clips or pictures](generate.md) that `generate_{run}` draws, with the trainers `sd` and
    `wan`."""
    validation: Validation | None = None
    """[Items held out](validation.md) of the training, with the trainers `sd`, `wan` and
    `sdscripts`."""


Fault: TypeAlias = tuple[str, str, str]
"""Location, predicate and hint of a mistake."""
_LEAVE = "leave it out"


def _faults_of_section(section: Closed, where: str, model: Model) -> Iterator[Fault]:
    """Yield a fault for the first key of a section that has no effect with a model."""
    if refused := section.refused(model):
        yield f"{where}.{refused[0]}", f"{_title_of(model)} {refused[1]}", _LEAVE


def _title_of(model: Model) -> str:
    title = model.title or "a model without `task` or `architecture`"
    return f"{title} ({model.task})" if model.task else title


def _faults_of_trainer(where: str, run: Run, model: Model) -> Iterator[Fault]:
    trainer = run.trainer
    if trainer is not None and trainer.layout != model.layout:
        what = f"this trainer reads caches of the layout {trainer.layout}, and {run.model} has "
        kind = model.spec.trainers[model.layout]
        hint = f"use kind: {kind}, or set `layout` or `task` of models.{run.model}"
        yield f"{where}.trainer.kind", what + model.layout, hint
    if trainer is not None:
        keys = (trainer.network, *trainer.alternatives)
        if all(getattr(model, key) is None for key in keys):
            hint = f"add `{keys[0]}` to models.{run.model}, or leave out the run's `trainer`"
            yield f"{where}.model", f"the model {run.model} has no `{keys[0]}` to train", hint
    if run.validation is None:
        return
    if trainer is None or not trainer.holds_out:
        what = "the run has no trainer that could leave items out"
        if trainer is not None:
            what = f"the trainer {trainer.kind} has no held-out loss; sd, wan and sdscripts do"
        hint = "leave it out, or hold images or videos out by a dataset of their own"
        yield f"{where}.validation", what, hint
    elif not trainer.ours and run.validation.first_set("clips"):
        yield f"{where}.validation.clips", f"{trainer.kind} draws no held-out items", _LEAVE


def _faults_of_regularisation(
    where: str, run: Run, model: Model, datasets: Mapping[str, Dataset]
) -> Iterator[Fault]:
    """Yield faults by which regularisation images or `prior_loss_weight` would have no effect."""
    key, trainer = f"{where}.trainer.prior_loss_weight", run.trainer
    regular = {name: dataset for name, dataset in datasets.items() if dataset.is_reg}
    weight = getattr(trainer, "prior_loss_weight", 1.0)
    if not regular and weight != 1:
        yield key, "no dataset of the run has `is_reg: true`", _LEAVE
    if not regular:
        return
    if len(regular) == len(datasets):
        what = "all of its datasets are regularisation images, which are shown beside others only"
        yield f"{where}.datasets", what, "add the dataset to learn, or leave out `is_reg`"
    if not isinstance(trainer, SdScriptsTrainer):
        return
    strategies = model.spec.strategies
    if trainer.script in strategies.unregularised:
        what = f"{trainer.script} knows no regularisation images"
        yield f"datasets.{next(iter(regular))}.is_reg", what, _LEAVE
    if trainer.script in strategies.unweighted and weight != 1:
        yield key, f"{trainer.script} does not weight the loss of images", _LEAVE
    others = [dataset for dataset in datasets.values() if not dataset.is_reg]
    fits = [dataset.sdscripts_buckets(strategies) for dataset in others]
    for name, dataset in regular.items():
        if dataset.sdscripts_buckets(strategies) not in fits:
            what = "sd-scripts shows regularisation images beside images of the same buckets only"
            hint = "use the `fit` and bucket keys of another dataset of the run"
            yield f"datasets.{name}.fit", what, hint


def _not_remote(run: str, dataset: str, settings: Dataset, program: str) -> Iterator[Fault]:
    """Yield a fault for a dataset at a URL, which external programs cannot read."""
    if settings.remote:
        what = f"the dataset {dataset} lies at a URL; {program} reads folders on disk only"
        yield f"{run}.datasets", what, "copy it to a folder, or mount the bucket"


# -- musubi-tuner ----------------------------------------------------------------------------------


def _faults_of_musubi(
    run_key: str, run: Run, model: Model, datasets: Mapping[str, Dataset]
) -> Iterator[Fault]:
    trainer, step = run.trainer, model.spec.side
    if isinstance(trainer, MusubiTrainer):
        yield from training_faults(f"{run_key}.trainer", trainer, model)
    if isinstance(trainer, WanTrainer):
        yield from _faults_of_wan(f"{run_key}.trainer", trainer, model)
    trains_here = trainer is not None and trainer.ours
    program = "this trainer" if trains_here else "musubi-tuner"
    ours = trains_here and not model.scripted
    reason = ", as Wan needs" if ours else ": musubi-tuner would round them"
    check_sides(run.resolutions, step, f"{run_key}.resolutions", f"{step}{reason}")
    buckets = "Wan's" if ours else "musubi-tuner's"
    least = 2 * step  # pixels; in a smaller one, the smallest bucket would have no width
    small = [size for size in run.resolutions if size.width * size.height < least**2]
    for dataset, settings in datasets.items():
        where = f"datasets.{dataset}"
        yield from _not_remote(run_key, dataset, settings, program)
        if settings.fit == "bucket" and small:
            what = f"{small[0].name} is too small for {buckets} buckets"
            yield f"{run_key}.resolutions", what, f"use {least} or more"
        # Without `path`: the scripts can be given a list.
        keys = [key for key in settings.own_clips if key != "path"]
        if model.scripted and keys:
            what = "musubi-tuner's own scripts read videos cut to buckets, as stored"
            hint = _LEAVE
            if model.spec.encodes:
                hint += f", or leave out `encoder` of models.{run.model}"
            yield f"{where}.{keys[0]}", what, hint
        if settings.bucket_reso_steps not in (None, step):
            yield f"{where}.bucket_reso_steps", f"{buckets} buckets go in steps of {step}", _LEAVE
        yield from _faults_of_row(dataset, settings, model)


def control_counts(model: Model, settings: Dataset) -> tuple[int, int | None]:
    """Return the fewest and the most control images of an item; None for any number.

    A model that is trained on one frame has one control for each of `fp_1f_clean_indices`, by
    default one.
    Source: musubi-tuner, `ImageDataset.__init__` (dataset/image_video_dataset.py).
    """
    if model.version.one_frame:
        count = len(settings.fp_1f_clean_indices or [0])
        return count, count
    return model.version.controls


def _faults_of_row(dataset: str, settings: Dataset, model: Model) -> Iterator[Fault]:
    """Yield faults of a dataset that the architecture of a model cannot use."""
    version, scripts, title = model.version, model.spec.scripts, _title_of(model)
    where = f"datasets.{dataset}"
    listed = settings.is_list and not model.spec.encodes  # the list has columns for controls
    needs = {
        "target_frames": (not version.images, "set the lengths of its clips"),
        "control_directory": (
            control_counts(model, settings)[0] and not listed,
            "name the folder of its control images",
        ),
        "multiple_target": (scripts.layers, "set it to true"),
        "fp_1f_target_index": (version.one_frame, "set it, usually to 9"),
    }
    for key, (is_needed, hint) in needs.items():
        if is_needed and not settings.first_set(key):
            yield f"{where}.{key}", f"{title} needs this key", hint
    if scripts.sections and settings.frame_extraction != "full":
        window = settings.fp_latent_window_size
        least = scripts.frames * window + 1  # the latents script fails on shorter clips
        for frames in (frames for frames in settings.target_frames or () if frames < least):
            what = f"{frames} frames are too few for a section of {title}, which has {window} "
            yield f"{where}.target_frames", f"{what}latents", f"use {least} or more"


def training_faults(where: str, trainer: MusubiTrainer, model: Model) -> Iterator[Fault]:
    """Yield settings that the architecture's training script would refuse or ignore."""
    scripts = model.spec.scripts
    title = scripts.title
    yield from _faults_of_section(trainer, where, model)
    if trainer.mixed_precision not in scripts.precisions:
        what = f"{title} is not trained in {trainer.mixed_precision}"
        yield f"{where}.mixed_precision", what, f"use {' or '.join(scripts.precisions)}"
    if scripts.batch is not None and trainer.batch_size > scripts.batch:
        what = f"{title} is trained on at most {scripts.batch} item at a time"
        yield f"{where}.batch_size", what, f"use {scripts.batch}, and `gradient_accumulation_steps`"
    if trainer.network_module in scripts.unknown_to:
        what = f"{trainer.network_module} does not know the layers of {title}"
        yield f"{where}.network_module", what, _LEAVE
    # `auto` counts as sdpa, because every machine has that.
    name = "sdpa" if trainer.attention == "auto" else trainer.attention
    if name not in scripts.attentions:
        hint = f"use one of auto, {', '.join(scripts.attentions)}"
        yield f"{where}.attention", f"{title} is not trained with {name}", hint
    most = scripts.attentions.get(name)
    if most is not None and trainer.batch_size > most and "--split_attn" not in trainer.arguments:
        beyond = f"batches of more than {most}" if most else "any batch"
        what = f"{title} needs --split_attn for {beyond} with {name}"
        yield f"{where}.arguments", what, "add --split_attn"
    flags = tuple(key for key in ("fp8_base", "fp8_scaled") if getattr(trainer, key))
    if flags and flags not in scripts.fp8:
        more = [key for keys in scripts.fp8 if {*flags} < {*keys} for key in {*keys} - {*flags}]
        what = f"the training script of {title} does not take it"
        if more:
            what += " alone"
        yield f"{where}.{flags[-1]}", what, f"set `{more[0]}: true` too" if more else _LEAVE


# -- Wan, by our own trainer -----------------------------------------------------------------------


def _faults_of_wan(where: str, trainer: WanTrainer, model: Model) -> Iterator[Fault]:
    """Yield faults of models that the trainer `wan` cannot train, and of its sample clips."""
    task, side, samples = str(model.task), model.spec.side, trainer.samples
    if not model.spec.encodes or (model.spec.has_tasks and not model.version.ours):
        what = f"the trainer wan does not train {model.task or model.title}"
        yield f"{where}.kind", what, "use kind: musubi"
    yield from _faults_of_section(trainer, where, model)
    if samples.prompts and model.image_to_video:
        what = f"{task} draws from a picture, and sample clips are drawn from prompts only"
        yield f"{where}.samples", what, "leave them out"
    size = samples.resolution
    if size is not None and (size.width % side or size.height % side):
        what = f"{size.name} is not made of multiples of {side}, as Wan needs"
        yield f"{where}.samples.resolution", what, "use [832, 480] or the like"


def _faults_of_generation(
    where: str, run: Run, settings: Generation, model: Model
) -> Iterator[Fault]:
    """Yield faults of `generate` that the run's trainer or model cannot satisfy."""
    if run.trainer is None or not run.trainer.ours:
        what = "the run has no trainer" if run.trainer is None else "its trainer generates nothing"
        yield where, what, "leave it out, or set the trainer's `kind` to sd or wan"
    if settings.resolution is not None:
        side, place = model.spec.side, f"{where}.resolution"
        check_sides([settings.resolution], side, place, f"{side}, as the model needs")
    yield from _faults_of_section(settings, where, model)


# -- sd-scripts ------------------------------------------------------------------------------------


def _faults_of_sdscripts(
    run_key: str, run: Run, model: Model, datasets: Mapping[str, Dataset]
) -> Iterator[Fault]:
    strategies, trainer, side = model.spec.strategies, run.trainer, model.spec.side
    reason = f"{side}, as {model.architecture} needs"
    check_sides(run.resolutions, side, f"{run_key}.resolutions", reason)
    for dataset, settings in datasets.items():
        yield from _not_remote(run_key, dataset, settings, "sd-scripts")
        if settings.is_list:
            what = "sd-scripts reads folders of images, and this is a list"
            hint = "name the folder, and the list as its `metadata_file`"
            yield f"datasets.{dataset}.path", what, hint
        if settings.fit == "bucket":
            yield from _faults_of_buckets(dataset, settings, run, model)
    if not isinstance(trainer, SdScriptsTrainer):
        return
    scripts, where = strategies.training_scripts, f"{run_key}.trainer"
    if trainer.script not in (None, *scripts):
        what = f"{trainer.script} does not train {model.architecture}"
        yield f"{where}.script", what, f"use {' or '.join(scripts)}"
    script = trainer.script or scripts[0]
    key = trainer.first_set("network_module", "network_args")
    if key and script in strategies.complete:
        yield f"{where}.{key}", f"{script} trains the complete network", _LEAVE
    if run.validation is not None and script in strategies.complete:
        yield f"{run_key}.validation", f"{script} has no held-out loss", _LEAVE
    if run.validation is not None and not trainer.logging:
        what = "the loss of held-out items is seen in TensorBoard's files only"
        yield f"{run_key}.validation", what, "leave it out, or `logging: false`"
    for flag in flags_of(trainer.arguments):
        if model.spec.caches_text and flag in OF_CAPTIONS:
            hint = "leave it out, and see the dataset's `captions`"
            yield f"{where}.arguments", f"{flag} does not go with cached text", hint


def _faults_of_buckets(name: str, dataset: Dataset, run: Run, model: Model) -> Iterator[Fault]:
    where, divisor = f"datasets.{name}", model.spec.bucket_divisor
    if run.trainer is not None:
        divisor = model.spec.strategies.divisor or divisor
    steps, no_upscale, least, most = dataset.bucketing(model.spec)
    if steps % divisor:
        what = f"{steps} is not a multiple of {divisor}, as sd-scripts needs for "
        hint = f"use a multiple of {divisor}"
        yield f"{where}.bucket_reso_steps", what + str(model.architecture), hint
    if not (least or no_upscale):
        what = f"is less than the steps of {steps} pixels between sides of buckets"
        yield f"{where}.min_bucket_reso", what, f"use {steps} or more"
    for size in run.resolutions:
        shorter, longer = sorted((size.width, size.height))
        than = f"than the resolution {size.name} has, which sd-scripts refuses"
        if shorter < least:
            yield f"{where}.min_bucket_reso", f"{least} is more {than}", f"use {shorter} or less"
        if longer > most:
            yield f"{where}.max_bucket_reso", f"{most} is less {than}", f"use {longer} or more"


# -- Sizes and keys --------------------------------------------------------------------------------


def check_sides(sizes: Iterable[Resolution], step: int, where: str, reason: str) -> None:
    """Refuse resolutions whose sides are not multiples of `step` pixels.

    Args:
        sizes: resolutions to check.
        step: divisor of the sides in pixels.
        where: key of the resolutions, for the message.
        reason: end of the message `... pixels are not a multiple of {reason}`.

    Raises:
        ConfigError: a side is not a multiple; only the first is reported.
    """
    for side in (side for size in sizes for side in (size.width, size.height)):
        if side % step:
            below = side // step * step
            near = " or ".join(str(multiple) for multiple in (below, below + step) if multiple > 0)
            what = f"{side} pixels are not a multiple of {reason}"
            raise ConfigError(what, where=where, hint=f"use {near}")


class Config(Closed):
    """The root of `config.yaml`."""

    datasets: dict[Name, Dataset] = Field(min_length=1)
    """[Datasets](datasets.md): folders of captioned images or videos, by their names."""
    models: dict[Name, Model] = Field(min_length=1)
    """[Models](models.md): encoders and the network to train, by their names."""
    runs: dict[Name, Run] = Field(min_length=1)
    """[Runs](runs.md): datasets, a model, resolutions and a trainer, by their names."""
    captioners: dict[Name, Captioner] = Field({})
    """[Captioners](captioners.md): networks that write captions, by their names."""
    batch: Batch = Batch()
    """[Size of encoding jobs](batch.md)."""
    graph: Literal["auto", "whole", "batches"] = shaped("auto", MACHINE)
    """Whether Snakemake knows each cache file (`whole`), as an output of its rule that is made from
    an image or a caption, or only jobs that encode many (`batches`). With `auto` it knows each of
    up to 1000 files; 3000 cost it over a second, even if there is nothing to do."""
    cluster: Cluster = Cluster()
    """[Resources of SLURM jobs](cluster.md); ignored without a profile for a cluster."""
    musubi_tuner: MusubiTuner | None = None
    """[Installation of musubi-tuner](musubi_tuner.md), which encodes and trains Wan and other
    models."""
    sd_scripts: ExternalProgram | None = None
    """[Installation of sd-scripts](sd_scripts.md), which trains models with `layout: sdscripts`."""
    history: History = History()
    """[Memory of trainings](history.md), for `latentmake explain`, `uses`, `diff` and `runs`."""
    publish: Publish = Publish()
    """[Content and place](publish.md) of the folders that `publish_{run}` makes."""
    export: Export = Export()
    """[Place](export.md) of the caches that `export_{run}` writes for ai-training."""
    store: Store = Store()
    """[Size limit](store.md) for replaced and removed cache files that are kept."""
    prompt: Prompt | None = shaped(None, CLIPS)
    """A prompt for `generate_{run}`, meant for the command line: `snakemake generate_cats --config
    prompt="a boat on a lake"` draws this prompt instead of those of
    [`generate`](generate.md). Clips and pictures of other prompts stay in the folder and on its
    page, if their weights and settings are still the same."""

    @model_validator(mode="after")
    def _names_exist(self) -> Self:
        fill_in(self.captioners, self.datasets, self.models)
        for name, run in self.runs.items():
            self.check(name, run)
        for name, dataset in self.datasets.items():
            models = {run.model for run in self.runs.values() if name in run.datasets}
            layouts = {self.models[model].layout for model in models}
            shapes = Dataset.declarations
            idle = [key for key in shapes if layouts.isdisjoint(shapes[key].layouts or layouts)]
            if models and (key := dataset.first_set(*idle)):
                what = f"only caches of the layout {' or '.join(shapes[key].layouts)} depend on "
                what += f"this, and {', '.join(sorted(models))} has others"
                raise ConfigError(what, where=f"datasets.{name}.{key}", hint="leave it out")
        return self

    def check(self, name: str, run: Run) -> None:
        """Raise a ConfigError if a run does not fit its datasets, its model or its trainer."""
        for where, what, hint in self._faults(name, run):
            raise ConfigError(what, where=where, hint=hint)

    def program(self, name: str) -> ExternalProgram | None:
        """Return the external program that a model's `encoder` or `layout` names, if it is set."""
        return {"musubi": self.musubi_tuner, "sdscripts": self.sd_scripts}.get(name)

    def generation(self, run: Run) -> Generation:
        """Return the `generate` settings of a run, with the prompt of the command line, if any."""
        settings = run.generate or Generation()
        if self.prompt is None:
            return settings
        return settings.model_copy(update={"prompts": [self.prompt]})

    def _faults(self, name: str, run: Run) -> Iterator[Fault]:
        """Yield mistakes of a run with its datasets, its model and its trainer.

        Raises:
            ConfigError: there is no such dataset or model, or the model takes no such resolution.
        """
        where, trainer = f"runs.{name}", run.trainer
        for dataset in run.datasets:
            refuse_unknown("dataset", dataset, self.datasets, f"{where}.datasets")
        more = fetching(run.model)
        refuse_unknown("model", run.model, self.models, f"{where}.model", more=more)
        sizes = [resolution.name for resolution in run.resolutions]
        for key, words in (("datasets", run.datasets), ("resolutions", sizes)):
            if twice := [word for word in words if words.count(word) > 1]:
                yield f"{where}.{key}", f"`{twice[0]}` is named twice", "name it once"
        model = self.models[run.model]
        datasets = {dataset: self.datasets[dataset] for dataset in run.datasets}
        yield from _faults_of_trainer(where, run, model)
        yield from _faults_of_regularisation(where, run, model, datasets)
        if model.is_for_sdscripts:
            yield from _faults_of_sdscripts(where, run, model, datasets)
        title = PROGRAMS.get(model.layout)
        needed = model.is_external or (trainer is not None and trainer.kind in PROGRAMS)
        if title and needed and not self.program(model.layout):
            key = title.replace("-", "_")
            hint = f"the run {name} needs {title}: set {key}.path to its folder"
            yield key, "this key is missing", hint
        if model.spec.has_tasks:
            yield from _faults_of_musubi(where, run, model, datasets)
        for dataset, settings in datasets.items():
            yield from _faults_of_section(settings, f"datasets.{dataset}", model)
        samples = getattr(trainer, "samples", None)
        for key, section in (("trainer.samples", samples), ("generate", run.generate)):
            if section and "prompts" in section.model_fields_set and not section.prompts:
                hint = "write a prompt, or leave the key out"
                yield f"{where}.{key}.prompts", "is an empty list", hint
        if run.generate is not None:
            yield from _faults_of_generation(f"{where}.generate", run, run.generate, model)


def _texts(value: object, where: str) -> Iterator[tuple[str, str]]:
    """Yield location and text of all texts in a value of a configuration file, also of keys."""
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, Mapping | list):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in pairs:
            place = f"{where}.{key}".removeprefix(".")
            yield from _texts(key, where)
            yield from _texts(item, place)


def _with_trainers_of_others(values: Mapping[str, object]) -> type[Config]:
    """Return the root with the trainers of other packages that its runs name.

    Raises:
        ConfigError: such a trainer cannot be loaded.
    """
    runs, further = values.get("runs"), dict[str, type[Trainer]]()
    for name, run in runs.items() if isinstance(runs, Mapping) else ():
        trainer = run.get("trainer") if isinstance(run, Mapping) else None
        kind = trainer.get("kind") if isinstance(trainer, Mapping) else None
        if not isinstance(kind, str) or kind in get_args(Kind) or kind not in installed():
            continue
        try:
            further[kind] = installed()[kind].load().settings
        except Exception as error:  # code of another package
            what = f"the trainer {kind} cannot be loaded: {first_line(error)}"
            hint = "install another version of its package"
            raise ConfigError(what, where=f"runs.{name}.trainer.kind", hint=hint) from error
    if not further:
        return Config
    every: Any = Union[_OwnTrainer, *further.values()]
    trainers = Annotated[every, Field(discriminator="kind")]
    extended = create_model("Run", __base__=Run, trainer=(trainers | None, None))
    runs_field = (dict[Name, extended], Field(min_length=1))
    return create_model("Config", __base__=Config, runs=runs_field)


def parse(values: Mapping[str, object]) -> Config:
    """Check the values of a configuration file.

    Raises:
        ConfigError: one line for each mistake, with key, value and hint.
    """
    for where, text in _texts(values, ""):
        if "\0" in text:  # impossible in paths and in arguments of programs
            raise ConfigError("holds a NUL character", where=where, hint="remove it")
    root = _with_trainers_of_others(values)
    try:
        return root.model_validate(dict(values))
    except ConfigError:
        raise
    except ValidationError as error:
        from latentmake.config.mistakes import mistake_of

        details = error.errors(include_url=False)
        mistakes = [mistake_of(detail, root) for detail in details]
        if any(detail["type"] == "extra_forbidden" for detail in details):
            # A misspelt key is also missing under its right name. One line about it is enough.
            lines = " ".join(map(str, mistakes))
            mistakes = [
                mistake
                for mistake, detail in zip(mistakes, details, strict=True)
                if detail["type"] != "missing" or f"`{detail['loc'][-1]}`" not in lines
            ]
        raise SeveralMistakesError(mistakes) from None
