"""Caches of musubi-tuner and sd-scripts, for adoption: bytes are kept, and stamped with our key.

A file must have the name, the tensors and the shapes that a target is to have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from latentmake.caches.inputs import Reading
from latentmake.config.root import Config, Run
from latentmake.data.item import Item
from latentmake.errors import CacheError, ConfigError
from latentmake.exchange import arrays, tensors
from latentmake.exchange.adoption import File
from latentmake.plan.orders import Order
from latentmake.plan.target import Target


class TrainerCaches:
    """Files in some folders of datasets; see `adoption.Format`."""

    careful = True

    def __init__(self, folders: Mapping[str, Sequence[str]]) -> None:
        self._folders = folders

    @classmethod
    def of(cls, config: Config, name: str, run: Run) -> TrainerCaches:
        """Return those of a run's datasets.

        Raises:
            ConfigError: no folder of caches is named, or one is missing.
        """
        named = {dataset: config.datasets[dataset].adopt_from for dataset in run.datasets}
        folders = {dataset: paths for dataset, paths in named.items() if paths}
        if not folders:
            what = "no dataset of the run says where its caches are"
            hint = f"set datasets.{run.datasets[0]}.adopt_from to their folder"
            raise ConfigError(what, where=f"run {name}", hint=hint)
        for dataset, paths in folders.items():
            for path in paths:
                if not Path(path).is_dir():
                    there = Path(path).exists()
                    what = f"{path} is no folder" if there else f"{path} does not exist"
                    where, hint = f"datasets.{dataset}.adopt_from", "name the folder of the caches"
                    raise ConfigError(what, where=where, hint=hint)
        return cls(folders)

    def takes(self, work: Order) -> bool:
        """Whether a dataset names folders."""
        return work.dataset in self._folders

    def candidates(self, work: Order, item: Item, target: Target) -> Iterator[tuple[Path, ...]]:
        """Yield the files of the folders that may be a target."""
        names = arrays.names if work.layout.npz else tensors.names
        for folder in self._folders[work.dataset]:
            for name in names(work, item, target):
                if (path := Path(folder, name)).is_file():
                    yield (path,)

    def name(self, work: Order, path: Path) -> str:
        """Return the path as it is."""
        return str(path)

    def check(
        self, files: Sequence[File], work: Order, source: Reading, target: Target, key: str
    ) -> bool:
        """Check a file; return whether it tells what it was made of: a caption does."""
        (file,) = files
        check = arrays.check if work.layout.npz else tensors.check
        try:
            return check(file.data, work, source, target, file.path.name)
        except CacheError as error:
            raise type(error)(error.what, where=file.path, hint=error.hint) from None

    def made(
        self, files: Sequence[File], work: Order, source: Reading, stamp: dict[str, str]
    ) -> bytes:
        """Return the file with our stamp."""
        stamped = arrays.stamped if work.layout.npz else tensors.stamped
        return stamped(files[0].data, stamp)
