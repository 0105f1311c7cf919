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
SCRIPTS = Path(str(workflow.current_basedir)) / "scripts"
sys.path.insert(0, str(SCRIPTS))

# The working folder's profile, of another clone, may have imported that clone's package already.
# Jobs run this one, so the plan is made by it as well.
LOADED = Path(
    getattr(sys.modules.get("latentmake"), "__file__", SCRIPTS / "latentmake/-")
)
if SCRIPTS.is_dir() and LOADED.resolve().parents[1] != SCRIPTS.resolve():
    if "latentmake.session" in sys.modules:
        sys.exit(
            f"error: {LOADED.parents[1]} and {SCRIPTS}: one workflow cannot use two copies of "
            "Latentmake; name the Snakefile of one of them only"
        )
    for name in [each for each in sys.modules if each.split(".")[0] == "latentmake"]:
        del sys.modules[name]


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
