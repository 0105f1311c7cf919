"""Rules publish_*: put what a Wan training needs where the trainer's machine will find it."""

from pathlib import Path

from latentmake.entry import logged
from latentmake.musubi.order import MusubiOrder
from latentmake.musubi.publish import publish

with logged(snakemake.log[0]) as say:
    publish(MusubiOrder.read(Path(snakemake.input.order)), say)
