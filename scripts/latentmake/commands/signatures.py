"""Commands of `latentmake`: their arguments, options and help.

The function that does the work has the same name and lies in another module. The other module is
imported when the command is called, so help and shell completion are fast.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from inspect import Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from latentmake.commands import completion

_WEIGHTS = "a file or folder of weights, or the id of a model in the local hub cache."


def _option(text: str, *names: str, default: str | bool = True, metavar: str | None = None) -> Any:
    """Return an option; `default` is the value that the help shows for a missing option."""
    return typer.Option(*names, help=text, show_default=default, metavar=metavar)


def _argument(metavar: str, text: str, **options: Any) -> Any:
    return typer.Argument(metavar=metavar, help=text, **options)


def _configfile(default: str) -> Any:
    """Return the option `-c`; `default` says which files a command reads without it."""
    text = "Configuration; repeat it to merge several, the last one wins."
    return _option(text, "-c", "--configfile", default=default, metavar="FILE")


def _runs(metavar: str, text: str, **options: Any) -> Any:
    """Return an argument that the shell completes with the names of runs."""
    return _argument(metavar, text, autocompletion=completion.runs, **options)


ConfigFiles = Annotated[list[Path] | None, _configfile(str(completion.DEFAULT))]
Directory = Annotated[Path | None, _option("Folder of the project.", default=".", metavar="FOLDER")]
Runs = Annotated[list[str] | None, _runs("RUN", "Runs of the configuration.", show_default="all")]
Run = Annotated[str, _runs("RUN", "A run of the configuration.")]
Open = Annotated[bool, _option("Open the page in a browser.", "--open")]
Json = Annotated[bool, _option("Print JSON.", "--json")]
NewFolder = Annotated[Path, _argument("FOLDER", "Folder to make.")]
Kind = Literal["sd", "wan", "musubi", "sdscripts"]


def _options(
    as_json: Json = False, configfile: ConfigFiles = None, directory: Directory = None
) -> None:
    """Take the options of all commands about a project."""


def _in(
    module: str, *, project: bool = False, encoders: bool | None = None, outside: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command to call the function of its name in a module of the package.

    With `project`, the command also has `_options`, and the function gets the facts of the opened
    project in place of `configfile` and `directory`. For `encoders` see `project.opened`. With
    `outside`, the function `without_project` of the module is asked first.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def call(**values: Any) -> None:
            imported = import_module(f"latentmake.{module}")
            function = getattr(imported, command.__name__)
            if outside and imported.without_project(**values):
                return
            if not project:
                function(**values)
                return
            from latentmake.commands.project import opened

            place = values.pop("configfile"), values.pop("directory")
            with opened(*place, encoders=encoders) as facts:
                function(facts, **values)

        if project:
            own, more = (signature(one, eval_str=True).parameters for one in (command, _options))
            vars(call)["__signature__"] = Signature([*own.values(), *more.values()])
        return call

    return decorate


# -- commands that begin a project, and build -----------------------------------------------------


@_in("commands.build")
def build(
    context: typer.Context,
    targets: Annotated[
        list[str],
        _argument(
            "TARGET...",
            "A run to train, such as `cats`, a target such as `caches_cats`, or a file.",
            autocompletion=completion.builds,
        ),
    ],
    dry_run: Annotated[bool, _option("Print the plan only.", "--dry-run", "-n")] = False,
    configfile: Annotated[
        list[Path] | None, _configfile("the file of this folder that has the run")
    ] = None,
    profile: Annotated[
        str | None, _option("Profile of Snakemake: `slurm`, or one of yours.", metavar="NAME")
    ] = None,
    directory: Directory = None,
) -> None:
    """Bring caches and trainings up to date. Options of Snakemake follow after `--`."""


@_in("commands.new")
def new(folder: NewFolder) -> None:
    """Make a folder for a project: pictures, models, a configuration to fill.

    A project is any folder with a configuration; it needs no clone of Latentmake.
    """


@_in("commands.new")
def demo(folder: NewFolder = Path("latentmake-demo")) -> None:
    """Make a folder with the sample: 24 pictures with captions, and a small model.

    Its training takes a minute or two on a CPU.
    """


@_in("trainers.init.init")
def init(
    folders: Annotated[list[Path], _argument("FOLDER...", "Folders of images or videos.")],
    model: Annotated[
        str | None,
        _option(
            f"Model to train: {_WEIGHTS}",
            default="Stable Diffusion 1.5, with the command that downloads it",
            metavar="PLACE",
        ),
    ] = None,
    trainer: Annotated[
        Kind | None, _option("Trainer.", default="one that can train the model")
    ] = None,
    output: Annotated[
        Path | None, _option("File to write.", default="FOLDER.yaml, here", metavar="FILE")
    ] = None,
    force: Annotated[bool, _option("Replace an existing file.", "--force")] = False,
) -> None:
    """Write a first configuration for your images and model, with a comment at each setting.

    Prints what was found, what is missing, and what to run next.
    Exit status: 0 ready to build, 1 something is missing, 2 nothing was written.
    """


@_in("trainers.init.import_")
def import_(
    file: Annotated[
        Path, typer.Argument(help="Dataset file of musubi-tuner or sd-scripts (TOML).")
    ],
    name: Annotated[
        str | None, _option("Name of the run.", default="the file's", metavar="RUN")
    ] = None,
    architecture: Annotated[
        str | None, _option("Architecture of the model.", default="as the caches say")
    ] = None,
    task: Annotated[str | None, _option("Task of the model, such as t2v-14B.")] = None,
    model: Annotated[
        str | None, _option(f"Model: {_WEIGHTS}", default="paths to fill in", metavar="PLACE")
    ] = None,
    output: Annotated[Path | None, _option("File to write.", default="print it")] = None,
    directory: Directory = None,
) -> None:
    """Make a configuration of another trainer's dataset file; notes in it say what differs."""


# -- commands that show something -----------------------------------------------------------------


@_in("commands.status", project=True)
def status(
    runs: Runs = None,
    verbose: Annotated[
        bool, _option("List each file that is not up to date.", "--verbose", "-v")
    ] = False,
) -> None:
    """Count fresh and stale caches of runs, and what is left to encode and train."""


@_in("commands.explain", project=True, encoders=True, outside=True)
def explain(
    path: Annotated[
        str,
        _argument(
            "PATH",
            "A cache file, an image or caption of a dataset, a file below runs/ or clips/, "
            "trained weights (.safetensors) anywhere, a run, or a target such as generate_cats.",
        ),
    ],
    open_page: Annotated[
        bool, _option("Open a page with the items of trained weights.", "--open")
    ] = False,
) -> None:
    """Say where a file comes from, and why it is fresh or stale; why a run is trained again."""


@_in("commands.check", project=True)
def check(runs: Runs = None) -> None:
    """Check all that a run needs: caches, items, disk, models, the trainer and its settings."""


@_in("commands.verify", project=True)
def verify(
    context: typer.Context,
    runs: Runs = None,
    repair: Annotated[
        bool,
        _option(
            "Delete damaged files and move others that are wrong to the store; the next build "
            "makes them.",
            "--repair",
        ),
    ] = False,
) -> None:
    """Read every cache file of runs and their trained weights, and name those that are damaged."""


@_in("commands.captions", project=True)
def captions(
    run: Run,
    stems: Annotated[
        list[str] | None,
        _argument("STEM...", "Further items of --accept, or items of --undo.", show_default=""),
    ] = None,
    accept: Annotated[
        list[str] | None,
        _option(
            "Copy the made captions of items, or of `all`, beside their pictures. They are yours "
            "from then on.",
            "--accept",
            default="",
            metavar="STEM...",
        ),
    ] = None,
    undo: Annotated[
        bool, _option("Remove accepted captions that were not edited since.", "--undo")
    ] = False,
    edit: Annotated[
        bool, _option("Serve a page on this machine to edit captions, until Ctrl-C.", "--edit")
    ] = False,
    open_page: Open = False,
) -> None:
    """Write a page with every text of a run as it is encoded, its tokens, and what is cut off.

    With --edit, --accept and --undo, write caption files beside pictures.
    """


@_in("commands.pages", project=True)
def report(run: Run, open_page: Open = False) -> None:
    """Write a page with the caches of a run, its training, its buckets and its items."""


@_in("commands.pages", project=True)
def compare(
    runs: Annotated[
        list[str],
        _runs(
            "RUN...",
            "Runs with sample pictures; a single one is compared with its previous result.",
        ),
    ],
    open_page: Open = False,
) -> None:
    """Write a page with the sample pictures and clips of runs; nothing is trained."""


@_in("commands.uses", project=True)
def uses(
    paths: Annotated[
        list[str] | None,
        _argument("PATH...", "Pictures, captions or folders, also deleted ones.", show_default=""),
    ] = None,
    digests: Annotated[
        list[str] | None,
        _option("SHA-256 of a picture, in place of a path; repeatable.", "--digest"),
    ] = None,
) -> None:
    """Name all caches, trainings, publications and exports that contain a picture or caption."""


@_in("commands.cost", project=True)
def cost(
    runs: Annotated[list[str], _runs("RUN...", "Runs of the configuration.")],
    changes: Annotated[
        list[str] | None,
        _option(
            "Setting that is not written yet, such as runs.cats.resolutions=[1024]; repeat it "
            "for several.",
            "--set",
            default="the configuration as it is",
            metavar="KEY=VALUE",
        ),
    ] = None,
    trial: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Measure the time: encode N items of each size, which the next build uses, and "
            "train 5 steps. No build may run meanwhile.",
            show_default="no trial",
            metavar="N",
        ),
    ] = None,
    price: Annotated[
        str | None, _option("Price of an hour, such as 1.2/h.", default="none", metavar="PRICE")
    ] = None,
) -> None:
    """Say what a run costs before you build it: files and bytes, now and then, and the time."""


@_in("commands.diff", project=True)
def diff(
    old: Annotated[
        str,
        _runs(
            "OLD",
            "A run (its last training), `cats@2` (two trainings before that) or a weights file.",
        ),
    ],
    new: Annotated[
        str | None, _runs("NEW", "The training to compare it with.", show_default="today's data")
    ] = None,
    open_page: Open = False,
) -> None:
    """Say what differs between two trainings: pictures, captions, settings and losses.

    With one training, compare it with today's data: the next training learns these differences.
    """


@_in("commands.runs", project=True)
def runs(
    runs: Annotated[list[str] | None, _runs("RUN", "Runs to list.", show_default="all")] = None,
    sort: Annotated[
        str, _option("Column of --csv to sort by.", default="newest first", metavar="COLUMN")
    ] = "began",
    as_csv: Annotated[bool, _option("Print CSV.", "--csv")] = False,
    open_page: Open = False,
) -> None:
    """List all trainings: when, data, device, speed, losses and weights; also those that failed."""


@_in("commands.doctor")
def doctor(
    as_json: Json = False, configfile: ConfigFiles = None, directory: Directory = None
) -> None:
    """Print what a bug report needs: versions, GPU, trainers, disk room, the last error."""


# -- commands that clean up and take over caches --------------------------------------------------


@_in("commands.prune", project=True, encoders=True)
def prune(
    datasets: Annotated[
        list[str] | None,
        _argument(
            "DATASET",
            "Folders of cache/.",
            show_default="the datasets of the configuration",
            autocompletion=completion.datasets,
        ),
    ] = None,
    everything: Annotated[
        bool, _option("Also list folders that the configuration does not name.", "--all")
    ] = False,
    yes: Annotated[bool, _option("Remove what is listed.", "--yes")] = False,
    verbose: Annotated[bool, _option("List each file.", "--verbose", "-v")] = False,
) -> None:
    """List caches that the configuration does not need any more, or remove them with --yes."""


@_in("trainers.exchange.adopt", project=True, encoders=True)
def adopt(runs: Annotated[list[str], _runs("RUN...", "Runs of the configuration.")]) -> None:
    """Take over caches that musubi-tuner, sd-scripts or ai-training made of a run."""
