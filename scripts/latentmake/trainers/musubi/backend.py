"""Backend of the trainer `musubi`, with checks for faults that would stop musubi-tuner.

Planning runs these checks, too. So this module must not import torch, load weights or read tensors.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from pathlib import Path

from latentmake.models.inspection import ModelFile
from latentmake.runs.findings import Finding, image_findings, of_faults
from latentmake.runs.rows import rows_of
from latentmake.trainers.launched.backend import Launched
from latentmake.trainers.launched.installation import Installation
from latentmake.trainers.launched.order import absolute
from latentmake.trainers.musubi.checks import model_files, networks, precision, samples
from latentmake.trainers.musubi.command import MODULES, PREFERRED, training_arguments
from latentmake.trainers.musubi.deploy import deploy, folders_of, strays_of
from latentmake.trainers.musubi.order import MusubiOrder
from latentmake.trainers.musubi.publish import MusubiPublication


class Musubi(Launched[MusubiOrder]):
    """Backend of the trainer `musubi`."""

    order_type = MusubiOrder
    publication = MusubiPublication
    arguments = staticmethod(training_arguments)
    deploy = staticmethod(deploy)

    def models(self, order: MusubiOrder, *, quick: bool) -> Sequence[ModelFile]:
        """Return the inspected files of the model; with `quick` without the encoders.

        Planning inspects the encoders already, for their recipes.
        """
        return [*(networks(order.model) if quick else model_files(order.model))]

    def data_findings(self, order: MusubiOrder) -> Iterator[Finding]:
        rows = list(rows_of(Path(order.manifest)))
        without = sum(row.caption is None and row.texts is None for row in rows)
        sound = f"{without} of them without a caption file" if without else "each with its caption"
        faults = [] if rows else ["no item is left to train on"]
        yield of_faults("images and captions", faults, f"{len(rows)} items, {sound}")
        layers = {path for row in rows if row.layers for path in (row.source, *row.layers)}
        images = (path for row in rows for path in (row.source, *row.control_files, *row.layers))
        yield from image_findings(images, layers)
        strays = strays_of(order, rows)
        faults = [f"{path} is not in the manifest, but would be trained on" for path in strays]
        yield of_faults("foreign caches", faults, "none in the cache folders")

    def program_findings(
        self, order: MusubiOrder, program: Installation, models: Sequence[ModelFile]
    ) -> Iterator[Finding]:
        yield precision(order, models)
        yield from samples(order)
        attention = self.attention(order, program)
        missing = program.lacking([MODULES[attention]]) if attention in MODULES else []
        hint = "install it there, or set `attention: auto`"
        faults = [f"{program.python} lacks {package}: {hint}" for package in missing]
        yield of_faults("attention", faults, attention)
        folders = [absolute(folder) for folder in folders_of(order)]
        faults = [
            f"{folder} has one of [ ] * ? in it, with which musubi-tuner finds nothing: rename it"
            for folder in folders
            if folder != glob.escape(folder)
        ]
        many = f"{len(folders)} folders, one a dataset and resolution"
        yield of_faults("cache folders", faults, many if folders[1:] else "1 folder")

    def attention(self, order: MusubiOrder, program: Installation) -> str:
        """Return the attention to train with.

        `auto` chooses the first of flash-attn and xformers that the network supports, the script
        accepts and the environment has, otherwise torch's own attention (sdpa).
        """
        if order.trainer.attention != "auto":
            return order.trainer.attention
        flags, _, _ = program.sources_of()
        names = [name for name in PREFERRED if name in order.attentions]
        names = [name for name in names if flags is None or f"--{name}" in flags]
        missing = program.lacking(MODULES[name] for name in names) if names else ()
        return next((name for name in names if MODULES[name] not in missing), "sdpa")
