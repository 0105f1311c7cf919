"""Rules publish_*: put what a Wan training needs where the trainer's machine will find it."""

from pathlib import Path

from latentmake.entry import logged
from latentmake.musubi.order import MusubiOrder
from latentmake.musubi.publish import publish
from latentmake.trainers.order import read_order

with logged(snakemake.log[0]) as say:
    publish(read_order(Path(snakemake.input.order), MusubiOrder), say)
