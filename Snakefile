# Latentmake: a make-style build system for the caches that diffusion trainers read.
#
#   snakemake train_michael_gove                 brings every cache up to date, then trains
#   snakemake -n train_michael_gove              says what is stale, and does nothing
#
# Planning is the package's work (scripts/latentmake); what it finds stale becomes the rules of
# rules/caches.smk. Everything that is fresh stays out of the graph.

import os
import sys
from pathlib import Path

from snakemake.utils import min_version

min_version("9.27")
sys.path.insert(0, str(Path(workflow.basedir) / "scripts"))


include: "rules/arguments.smk"
include: "rules/common.smk"


rule all:
    input:
        [final_target(run) for run in SESSION.config.runs],


include: "rules/caches.smk"
include: "rules/manifest.smk"
include: "rules/train.smk"
include: "rules/following.smk"
include: "rules/exchange.smk"


check_targets()
