"""Import of a dataset file: read it, compose a configuration of ours, check and write it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from latentmake import digest
from latentmake.config import parse
from latentmake.errors import ConfigError
from latentmake.exchange.datasets_toml import musubi, sdscripts
from latentmake.exchange.datasets_toml.document import read, tables
from latentmake.exchange.datasets_toml.folders import Places
from latentmake.exchange.datasets_toml.models import (
    Chosen,
    choose,
    model_of,
    tasks_of,
    trainer_of,
)
from latentmake.exchange.datasets_toml.order import ImportOrder
from latentmake.exchange.datasets_toml.reader import Reader
from latentmake.exchange.datasets_toml.resolutions import fit
from latentmake.exchange.datasets_toml.sections import Run, datasets_of, runs_of
from latentmake.files import atomic
from latentmake.plan.parts import run_folder

__all__ = ["Imported", "import_file", "made_of"]

_MARK = "# content "
_TITLES = {True: "musubi-tuner", False: "sd-scripts"}


class Imported:
    """A configuration of ours, made of a dataset file.

    Attributes:
        text: of the configuration, with notes as comments.
        values: the same without them.
        notes: what could not be taken over as it is.
        written: further files: path -> content.
    """

    def __init__(
        self, order: ImportOrder, values: dict[str, Any], reader: Reader, title: str
    ) -> None:
        self.values = values
        self.notes = reader.notes
        self.written = reader.written
        head = [
            f"Made of {order.dataset_toml} ({title}) by import_{order.run}.",
            "Weights and folders of programs are placeholders: name yours under models.",
            *(["", "Not taken over as it is:"] if reader.notes else []),
            *(f"- {note.line}" for note in reader.notes),
        ]
        dumped = yaml.safe_dump(
            values, sort_keys=False, default_flow_style=None, width=100, allow_unicode=True
        )
        self.text = "".join(f"# {line}".rstrip() + "\n" for line in head) + f"\n{dumped}"


def made_of(order: ImportOrder) -> Imported:
    """Return the configuration that a dataset file stands for.

    Raises:
        ConfigError: the file is damaged, or nothing of it can be taken over.
    """
    path = Path(order.dataset_toml)
    values = read(path)
    is_musubi = not _has_subsets(values, path)
    reader = Reader(path, order.run, Places(path))
    blocks = (musubi if is_musubi else sdscripts).blocks_of(values, reader)
    if not blocks:
        what = "names no dataset that can be taken over"
        if reader.notes:
            what += f" ({reader.notes[0].line})"
        hint = "name a dataset file of musubi-tuner or sd-scripts"
        raise ConfigError(what, where=order.dataset_toml, hint=hint)
    folders = [folder for block in blocks for folder in block.caches]
    chosen = choose(order.architecture, folders, musubi=is_musubi)
    fit(blocks, chosen.spec, reader)
    reader.missing()
    runs, notes = runs_of(order.run, datasets_of(blocks))
    reader.notes += notes
    if chosen.why:
        what = f"the architecture is {chosen.spec.name}, {chosen.why}"
        reader.note("models", what, "say another by --config architecture=NAME")
    return Imported(order, _loaded(order, runs, chosen, reader), reader, _TITLES[is_musubi])


def _has_subsets(values: Mapping[str, Any], path: Path) -> bool:
    found = [table for _, table in tables(values, "datasets", f"{path}: ")]
    return any(sdscripts.SUBSETS in table for table in found)


def _loaded(
    order: ImportOrder, runs: Sequence[Run], chosen: Chosen, reader: Reader
) -> dict[str, Any]:
    """Return the values of the first configuration that loads, over the tasks of the model.

    Raises:
        ConfigError: none does.
    """
    first: ConfigError | None = None
    tasks = tasks_of(chosen, order.task)
    for task in tasks:
        values = _values(runs, chosen, task)
        try:
            parse(values)
        except ConfigError as error:
            first = first or error
            continue
        if len(tasks) > 1:
            what = f"the task is {task}, which no dataset file says"
            hint = f"say another by --config task=..., one of {', '.join(filter(None, tasks))}"
            reader.note("models", what, hint)
        return values
    assert first is not None
    raise ConfigError(
        f"does not fit {chosen.spec.name}: {first}",
        where=order.dataset_toml,
        hint="say another model by --config architecture=NAME task=TASK",
    )


def _values(runs: Sequence[Run], chosen: Chosen, task: str | None) -> dict[str, Any]:
    name = chosen.spec.name
    sizes = {run.name: [w if w == h else [w, h] for w, h in run.resolutions] for run in runs}
    return {
        "datasets": {each.name: each.values for run in runs for each in run.datasets},
        "models": {name: model_of(chosen, task)},
        "runs": {
            run.name: {
                "datasets": [each.name for each in run.datasets],
                "model": name,
                "resolutions": sizes[run.name],
                "trainer": trainer_of(chosen, run.batch_sizes[0]),
            }
            for run in runs
        },
        chosen.program: {"path": f"../{chosen.program.replace('_', '-')}"},
    }


def import_file(order: ImportOrder, say: Callable[[str], None]) -> Imported:
    """Write `runs/{run}/import.yaml` and the lists that it names.

    Raises:
        ConfigError: the file is damaged or cannot be taken over, or a former result was edited.
    """
    made = made_of(order)
    path = run_folder(order.run) / "import.yaml"
    files = {path: _marked(made.text.encode())}
    files |= {Path(name): data for name, data in made.written.items()}
    for file, data in files.items():
        _refuse_edited(file, data, path)
    for file, data in files.items():
        if not file.is_file() or file.read_bytes() != data:
            atomic.write(file, data)
    runs = ", ".join(made.values["runs"])
    count = len(made.notes)
    say(
        f"{path}: {len(made.values['datasets'])} datasets, runs: {runs}; "
        f"{count} note{'s' * (count != 1)} in its first lines"
    )
    return made


def _marked(data: bytes) -> bytes:
    """Return a text with its digest in the last line, by which an edit is noticed."""
    return data + f"{_MARK}{digest.of_bytes(data)[:20]}\n".encode()


def _refuse_edited(file: Path, data: bytes, marked: Path) -> None:
    """Refuse to write over a file that its user edited."""
    try:
        there = file.read_bytes()
    except FileNotFoundError:
        return
    body, mark, _ = there.rpartition(_MARK.encode())
    if there == data or (file == marked and mark and _marked(body) == there):
        return
    what = "is another than this import makes, and may have been edited"
    raise ConfigError(what, where=file, hint="rename or remove it, and give the command again")
