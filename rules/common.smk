# Needs: the configuration, and what the user asked for.
# Makes: SESSION, which holds the plan; every other file asks it for the inputs of its rules.

# Jobs inherit it: threads that wait actively halve the speed of everything beside them.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(workflow.basedir) / "scripts"))

from functools import partial

from latentmake.session import Session
from snakemake.cli import get_argument_parser

SAMPLE_MODEL = "models/tiny-sd"
SAMPLE_MODEL_MARKER = f"{SAMPLE_MODEL}/model_index.json"


def read_session():
    """Plan what was asked for; processes that Snakemake starts read the orders on disk."""
    called = Path(sys.argv[0]).stem in ("snakemake", "__main__")
    asked, _ = get_argument_parser().parse_known_args(sys.argv[1:] if called else [])
    return Session(
        config,
        targets=asked.targets or [],
        main=workflow.is_main_process and not (asked.lint or asked.unlock),
        force=bool(asked.forceall or asked.force or asked.forcerun),
        dry=bool(asked.dryrun),
        buildable={SAMPLE_MODEL: SAMPLE_MODEL_MARKER},
    )


SESSION = read_session()


def final_target(run):
    """Return the file that stands for all of a run: its training's receipt, or its lock."""
    trained = SESSION.runs[run].trainer is not None
    return f"runs/{run}/trained.json" if trained else f"runs/{run}/dataset.lock"


def single_inputs(pattern, wildcards):
    """Return the inputs of one cache file's job; a fresh file's never make it run."""
    inputs, stale = SESSION.single(pattern.format(**dict(wildcards.items())))
    return (
        inputs
        if stale
        else {name: ancient(each) for name, each in inputs.items() if each}
    )


def training_inputs(wildcards):
    """Return the inputs of a training; a lock that was copied or touched never makes it run."""
    order, models = SESSION.training_inputs(wildcards.run)
    lock = f"runs/{wildcards.run}/dataset.lock"
    return (
        {"lock": lock, "order": order, "model": models}
        if order
        else {"lock": ancient(lock)}
    )


wildcard_constraints:
    dataset=r"[^/]+",
    model=r"[^/]+",
    resolution=r"\d+(x\d+)?",
    stem=r".+",
    run=r"[^/]+",
