# Latentmake: a make-style build system for the caches that diffusion trainers read.
#
#   snakemake train_michael_gove                 brings every cache up to date, then trains
#   snakemake -n train_michael_gove              says what is stale, and does nothing
#
# Planning is the package's work (scripts/latentmake); what it finds stale becomes the jobs of
# rules/caches.smk, where each cache file has a rule.

import os
import sys
from pathlib import Path

from snakemake.utils import min_version

min_version("9.27")
SCRIPTS = Path(str(workflow.current_basedir)) / "scripts"
sys.path.insert(0, str(SCRIPTS))

import latentmake

LOADED = Path(latentmake.__file__).resolve().parents[1]
if SCRIPTS.is_dir() and LOADED != SCRIPTS.resolve():
    sys.exit(
        f"error: {LOADED} and {SCRIPTS}: one workflow cannot use two copies of Latentmake; name the "
        "Snakefile of one of them only"
    )


include: "rules/common.smk"


if REPORTS:
    config |= SESSION.described()


report: "rules/report/workflow.rst"


rule all:
    input:
        [next(map(str, results(run, "train")), GRAPH.final(run)) for run in SESSION.config.runs],


include: "rules/caches.smk"
include: "rules/manifest.smk"
include: "rules/products.smk"


commandline.check_targets(workflow, SESSION)
