"""Pages of a training: its section of a report, the clips of `generate`, and `evaluate`.

The page of `generate` links to clip files beside it, so browsers play them without a server.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BytesIO
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from tabulate import tabulate

from latentmake.base import atomic, digest
from latentmake.base.errors import ConfigError
from latentmake.base.machine import counted, duration
from latentmake.config.root import Config
from latentmake.formats.media import drawn_picture
from latentmake.pages.page import (
    clip_addresses,
    embedded,
    state_in,
    table,
    template_digest,
    write_page,
)
from latentmake.plan.manifest import PREVIOUS, run_folder
from latentmake.plan.product import Difference, Made, Product, judge, some
from latentmake.runs.order import Record
from latentmake.runs.results import (
    EVALUATED,
    FOLDER,
    METRICS,
    GenerationIndex,
    Metrics,
    Result,
    evaluation_folder,
)

PAGE = "index.html"
_LABELS = {"real": "real", "base": "base", "adapter": "with the adapter"}
_LOSS = (
    "How far the network's prediction is from the truth on items that did not train, at the same "
    "noise for both. Lower is better. Timestep 1000 is noise alone, 0 the item itself."
)
_SHOWN = "results and template"  # part of a page
_WIDTH = 2400  # largest width of a picture of the training, in pixels


def _state(results: bytes) -> str:
    """Return the digest of a file of results and the page's templates."""
    return digest.of_value([template_digest("gallery"), digest.of_bytes(results)])


def write_generated(folder: Path, receipt: Path, say: Callable[[str], object]) -> None:
    """Write the page of the clips in a folder's index, and the receipt; raises StorageError."""
    content = (folder / GenerationIndex.file).read_bytes()
    index = GenerationIndex.model_validate_json(content)
    noun = "clips" if "frames" in index.settings else "pictures"
    size = {key: index.settings[key] for key in ("width", "height")}
    rows = [
        {
            "title": prompt,
            "note": f"seed {seed}",
            "clips": [
                {"label": _LABELS["adapter" if clip.adapter else "base"], "source": clip.file}
                | size
                for clip in clips
            ],
        }
        for (prompt, seed), clips in groupby(index.clips, lambda clip: (clip.prompt, clip.seed))
    ]
    settings = [[key, str(value)] for key, value in index.settings.items()]
    data = {
        "fps": index.settings.get("fps", 1),
        "summary": "",
        "rows": rows,
        "tables": [table("settings", "Settings", "", ["setting", "value"], settings)],
    }
    title, page = f"{noun.title()} of {index.run}", folder / PAGE
    write_page(page, "gallery", title, data, _state(content))
    say(f"{page}: {len(index.clips)} {noun}")
    atomic.write(receipt, json.dumps({"clips": len(index.clips), "page": str(page)}).encode())


def write_evaluation(folder: Path, path: Path, say: Callable[[str], object]) -> None:
    """Write the page of the results in a folder, which must exist; raises StorageError."""
    content = (folder / METRICS).read_bytes()
    metrics = Metrics.model_validate_json(content)
    files = [clip.file for clip in metrics.clips()]
    data = _data(metrics, folder, clip_addresses(path, [folder / file for file in files]))
    title = f"Evaluation of {metrics.run}"
    size = write_page(path, "gallery", title, data, _state(content))
    noun = "pictures" if files and files[0].endswith(".png") else "clips"
    say(f"{path}: {len(files)} {noun}, {size}; {_summary(metrics)}")


def _data(metrics: Metrics, folder: Path, address: Callable[[Path], str]) -> dict[str, Any]:
    lines = [
        {"kind": kind, "name": _LABELS[kind], "values": metrics.loss_by_timestep[kind]}
        for kind in ("base", "adapter")
    ]
    return {
        "fps": metrics.fps,
        "summary": _summary(metrics),
        "rows": [
            {
                "title": result.name,
                "note": result.group,
                "caption": result.caption,
                "clips": [
                    {"label": _LABELS[kind], "source": address(folder / clip.file)}
                    | {"width": clip.width, "height": clip.height}
                    for kind, clip in result.clips.items()
                ],
            }
            for result in metrics.results
            if result.clips
        ],
        "chart": {"timesteps": metrics.timesteps, "lines": lines},
        "tables": [*_tables(metrics)],
    }


def _tables(metrics: Metrics) -> Iterator[dict[str, Any]]:
    losses = {"mean of all": metrics.loss}
    for number, timestep in enumerate(metrics.timesteps):
        by_kind = metrics.loss_by_timestep.items()
        losses[f"{timestep:.4g}"] = {kind: values[number] for kind, values in by_kind}
    heads = [_LABELS["base"], _LABELS["adapter"], "change"]
    yield table("loss", "Loss by timestep", _LOSS, ["timestep", *heads], _loss_rows(losses))
    groups: dict[str, list[Result]] = {}
    for result in metrics.results:
        groups.setdefault(result.group or "others", []).append(result)
    if any(result.group for result in metrics.results):
        means = {
            f"{name} ({len(several)})": {
                kind: fmean(loss for result in several for loss in result.losses[kind].values)
                for kind in metrics.loss
            }
            for name, several in sorted(groups.items())
        }
        words = "The mean over the items of each label or folder, with their number."
        yield table("groups", "Loss by group", words, ["group", *heads], _loss_rows(means))
    settings = {"items": metrics.items, **metrics.values.get(EVALUATED, {})}
    rows = [[name, str(value)] for name, value in settings.items()]
    yield table("settings", "Settings", "", ["setting", "value"], rows)


def _loss_rows(losses: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    """Return the rows of a table of losses: name, loss of the base, of the adapter, and change."""
    rows = []
    for name, by_kind in losses.items():
        base, adapter = by_kind["base"], by_kind["adapter"]
        change = f"{(adapter - base) / base * 100:+.2f} %" if base else "–"
        rows.append([name, f"{base:#.4g}", f"{adapter:#.4g}", change])
    return rows


def _summary(metrics: Metrics) -> str:
    base, adapter = metrics.loss["base"], metrics.loss["adapter"]
    change = (adapter - base) / base * 100 if base else 0.0
    begin = f"On {counted(len(metrics.results), 'held-out item')} the adapter"
    if abs(change) < 0.05:
        return f"{begin} changes the loss by less than 0.05 %."
    word = "lowers" if change < 0 else "raises"
    return f"{begin} {word} the loss by {abs(change):.1f} %, from {base:.4g} to {adapter:.4g}."


def refuse_following(config: Config, run: str, word: str) -> None:
    """Raise ConfigError if a run has no trainer or no items for the target `{word}_{run}`."""
    trainer, where = config.runs[run].trainer, f"{word}_{run}"
    if trainer is None or not trainer.ours:
        does = "draws nothing" if word == "generate" else "evaluates nothing"
        what = f"the run {run} has no trainer" if trainer is None else f"its trainer {does}"
        hint = "only the trainers sd and wan do; set the trainer's `kind`"
        raise ConfigError(what, where=where, hint=hint)
    if word == "evaluate" and config.runs[run].validation is None:
        what = f"all items of the run {run} train, so there is none to evaluate it by"
        hint = "hold some out: `validation: {items: 4}`; it is trained again without them"
        raise ConfigError(what, where=f"runs.{run}.validation", hint=hint)


def reason_line(run: str, word: str, reasons: Sequence[Difference], *, forced: bool) -> str:
    """Return a line that says why the target `{word}_{run}` is made; "" if it is up to date."""
    words = some(reasons or outdated(run, word)) or ("forced" if forced else "")
    return f"{word}_{run}: {words}" if words else ""


def outdated(run: str, word: str) -> list[Difference]:
    """Return the reasons why a run's page of `generate` or `evaluate` is outdated."""
    folder = run_folder(run) / FOLDER
    results, page, files = (
        folder / GenerationIndex.file,
        folder / PAGE,
        [run_folder(run) / "generated.json"],
    )
    if word == "evaluate":
        results, files = evaluation_folder(run) / METRICS, []
        page = Path(f"reports/evaluate_{run}.html")
    absent, shown = f"{page} does not show these results", state_in(page)
    state = _state(_file(results) or b"")
    product = Product(absent, {_SHOWN: state}, {}, {_SHOWN: str(results)}, files)
    made = Made(parts={_SHOWN: shown}, places={_SHOWN: str(page)}) if shown else None
    return judge(product, made)


# -- the section of a report ----------------------------------------------------------------------


def training_section(run: str) -> dict[str, Any]:
    """Return a line of figures of a run's training, its curves and its sample pictures."""
    folder = run_folder(run)
    record, words = Record.read(folder / "training.json"), list[str]()
    if record and record.steps:
        words.append(f"{record.steps} steps")
    if record and record.seconds:
        words.append(duration(record.seconds / 60))
    losses = [record.loss_start, record.loss_end] if record else []
    if losses := [loss for loss in losses if loss is not None]:
        words.append("loss " + " → ".join(f"{loss:.4g}" for loss in losses))
    pictures = {"Sample pictures": _file(folder / "samples.png"), "Curves": _curves(folder, run)}
    shown = [[name, _scaled(data)] for name, data in pictures.items() if data]
    words += [f"{name}: the file is damaged" for name, source in shown if not source]
    shown = [pair for pair in shown if pair[1]]
    if not words and not shown:
        words = ["Not trained yet."]
    return {"words": " · ".join(words), "pictures": shown}


def provenance(run: str) -> str:
    """Return a table of the network, data and settings of a run's training; "" if untrained."""
    record = Record.read(run_folder(run) / "training.json")
    if record is None:
        return ""
    rows = {f"run {run}": "", **record.places}
    for values in record.values.values():
        rows |= values
    return tabulate(rows.items(), tablefmt="plain", disable_numparse=True)


def _file(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _curves(folder: Path, run: str) -> bytes | None:
    """Return the curves that the training drew, or curves of its newest TensorBoard files."""
    if (drawn := _file(folder / "curves.png")) is not None:
        return drawn
    from latentmake.pages.curves import curves_png

    events = folder.rglob("events.out.tfevents*")
    current = (path for path in events if not path.is_relative_to(folder / PREVIOUS))
    files = sorted(current, key=lambda path: path.stat().st_mtime)
    places = dict.fromkeys(path.parent for path in reversed(files))
    return next((data for place in places if (data := curves_png(place, title=run))), None)


def _scaled(data: bytes) -> str:
    """Return a picture as a data URI, scaled down if it is large; "" if it is damaged."""
    if (image := drawn_picture(BytesIO(data))) is None:
        return ""
    image.thumbnail((_WIDTH, 2 * _WIDTH))
    return embedded(image, "webp", quality=85)
