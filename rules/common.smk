# Needs: the command line, and the configuration that it names.
# Makes: SESSION, which holds the plan, and GRAPH, which every other file asks for inputs.

# So that a GPU has the same number for CUDA as for nvidia-smi.
os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")

import shlex

from latentmake import commandline
from latentmake.encode.gpu import visible
from latentmake.config.document import check_files
from latentmake.base.machine import usable_cores
from latentmake.plan import estimates
from latentmake.request import FOLLOWING, VARIABLE

ASKED = commandline.read()
IS_MODULE = commandline.is_module(workflow)

# A file of the user's own replaces the sample's, it does not add to it; a module is given values.
FILES = workflow.overwrite_configfiles
if not FILES and not workflow.modifier.skip_configfile:
    FILES = ["config/config.yaml"]
check_files(FILES)
if not workflow.overwrite_configfiles:

    configfile: "config/config.yaml"


# Whether jobs run on a cluster: only the user's process is told the executor.
ON_CLUSTER = workflow.remote_exec or commandline.is_remote(ASKED)

# All cores, where neither the command line nor a profile says how many.
if not (ON_CLUSTER or ASKED.cores or ASKED.jobs):
    workflow.resource_settings.cores = usable_cores()
    workflow.register_resource("_cores", usable_cores())

# On this machine as many jobs run side by side as there are GPUs; a cluster's jobs ask for theirs.
GPUS = [] if ON_CLUSTER else visible()
if GPUS and "gpu" not in workflow.global_resources:
    workflow.register_resource("gpu", len(GPUS))

REPORTS = ASKED.report is not None  # of what is there

SIDE_BY_SIDE = None if ON_CLUSTER else max(1, len(GPUS))
SESSION = commandline.session_of(workflow, ASKED, config, SIDE_BY_SIDE, FILES)
GRAPH = SESSION.graph

# Jobs on a cluster inherit it: which plan they carry out.
os.environ.setdefault(VARIABLE, "")


envvars:
    VARIABLE,


def threads_of(kind):
    """Return the cores of an encoding job or a training: all there are, or what a cluster gives."""
    if ON_CLUSTER:
        return getattr(SESSION.config.cluster, kind).cpus
    cores = workflow.resource_settings.cores
    return max(1, cores // max(1, len(GPUS))) if kind == "encode" else cores


def resources_of(kind, job=None):
    """Return what an encoding job or a training needs: its GPUs, and what it asks of a cluster."""
    if ON_CLUSTER:
        gpus = getattr(SESSION.config.cluster, kind).gpus
    else:
        gpus = min(1, len(GPUS)) if kind == "encode" else len(GPUS)
        if job and job.reuses:  # it links; where a file is not what it seemed, it waits for a GPU
            gpus = 0
    asked = estimates.resources_of(
        SESSION.config.cluster, kind, job.orders if job else (), SESSION.memo
    )
    return {**asked, "gpu": gpus}


class Inputs:
    """Inputs of a job, as the plan has them; `--filegraph` shows the words in their place."""

    def __init__(self, words, word, place="{run}"):
        self.words, self.word, self.place = words, word, place

    def __call__(self, wildcards):
        place = self.place.format(**dict(wildcards.items()))
        asked, others = GRAPH.inputs(self.word, place)
        return {**asked, **{name: ancient(found) for name, found in others.items()}}

    def __str__(self):
        return self.words


def order_of(word):
    """Return a function for the order of a job: as `params`, Snakemake keeps no record of it."""
    return lambda wildcards, input: GRAPH.run_order(wildcards.run, word)


def made(file, run, word):
    """Return what stands for a result; one that is there never makes what follows it run."""
    return file if GRAPH.run_order(run, word) else ancient(file)


def results(run, word):
    """Return the outputs of `{word}_{run}`; a report has only those that it shows."""
    files, settings = (
        GRAPH.results(run, word, present=REPORTS),
        SESSION.config.runs[run],
    )
    about = f"run {run}", f"model {settings.model}, {', '.join(settings.datasets)}"
    shown = {x: report(x, f"report/{y}.rst", *about) for x, y in files.items() if y}
    return [*shown.values()] if REPORTS else [shown.get(x, x) for x in files]


wildcard_constraints:
    dataset=r"[^/]+",
    model=r"[^/]+",
    stem=r".+",
    run=r"[^/]+",


# After Snakemake has its lock, and never for a dry run: another build may be at work beside it.
onstart:
    SESSION.begin()
    commandline.prepare_jobs(workflow, local=not ON_CLUSTER)
    # Snakemake puts this Python into shell commands as it is, where a space would end it.
    sys.executable = shlex.quote(sys.executable)


onsuccess:
    SESSION.end(succeeded=True, configfiles=ASKED.configfile or ())


onerror:
    SESSION.end(succeeded=False, failed=commandline.failed_logs(workflow))


if IS_MODULE:
    commandline.add_handlers(workflow, onstart=onstart, onsuccess=onsuccess, onerror=onerror)
