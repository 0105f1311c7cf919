"""The end of a plan of a run of sd-scripts: the order of its training and publication."""

from __future__ import annotations

import time

from latentmake.config import Config, SdScriptsTrainer
from latentmake.files import atomic
from latentmake.plan.facts import Facts
from latentmake.plan.orders import run_order
from latentmake.plan.parts import RunPlan, run_folder
from latentmake.training.checks import refuse_failed
from latentmake.training.external.result import is_trained
from latentmake.training.external.sdscripts.checkpoint import checkpoint_digest
from latentmake.training.external.sdscripts.order import SdScriptsOrder
from latentmake.training.external.sdscripts.preflight import preflight

__all__ = ["finish_sdscripts", "sdscripts_order"]


def finish_sdscripts(
    facts: Facts,
    plan: RunPlan,
    trainer: SdScriptsTrainer,
    *,
    train: bool = True,
) -> None:
    """Write the order of a run of sd-scripts, and decide whether it is to be trained.

    Args:
        facts: of its model.
        plan: of the run; gets the order.
        trainer: its trainer's section.
        train: whether its training is asked for.

    Raises:
        TrainingError: a network, sd-scripts, its environment or the settings do not fit.
        StorageError: the disk is full or cannot be written.
    """
    order = sdscripts_order(facts.config, plan.name, trainer)
    path = run_order(plan.name, "sdscripts", order.planned)
    atomic.write(path, order.model_dump_json().encode())
    plan.launch_order = path

    def weights() -> str:
        return checkpoint_digest(order, facts.memo.digest_of_file)

    if not (plan.lock and is_trained(order, plan.lock, weights)):
        plan.training_order = path
        if train:
            refuse_failed(preflight(order, facts.memo))


def sdscripts_order(config: Config, name: str, trainer: SdScriptsTrainer) -> SdScriptsOrder:
    """Return the order of a run of sd-scripts."""
    run, folder = config.runs[name], run_folder(name)
    assert config.sd_scripts is not None
    return SdScriptsOrder(
        run=name,
        manifest=str(folder / "manifest.jsonl"),
        lock=str(folder / "dataset.lock"),
        output=str(folder),
        datasets={dataset: config.datasets[dataset] for dataset in run.datasets},
        resolutions=[(size.width, size.height) for size in run.resolutions],
        model_name=run.model,
        model=config.models[run.model],
        trainer=trainer,
        sd_scripts=config.sd_scripts,
        publish=config.publish,
        planned=time.time_ns(),
    )
