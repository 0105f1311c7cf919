"""The end of a Wan run's plan: the order of its training, checklist and publication."""

from __future__ import annotations

import time

from latentmake.config import Config, MusubiTrainer, Run
from latentmake.errors import ModelError
from latentmake.files import atomic
from latentmake.index.remembered import Memory
from latentmake.models.wan_files import networks
from latentmake.plan.facts import Facts
from latentmake.plan.orders import run_order
from latentmake.plan.parts import RunPlan, run_folder
from latentmake.training.checks import refuse_failed
from latentmake.training.external.musubi.networks import networks_digest
from latentmake.training.external.musubi.order import MusubiOrder
from latentmake.training.external.musubi.preflight import preflight
from latentmake.training.external.result import is_trained

__all__ = ["finish_wan", "wan_order"]


def finish_wan(facts: Facts, plan: RunPlan, run: Run, *, train: bool = True) -> None:
    """Write the order of a Wan run, and decide whether it is to be trained.

    Args:
        facts: of its model.
        plan: of the run; gets the order.
        run: its section of the configuration.
        train: whether its training is asked for.

    Raises:
        ModelError: a network to be trained is missing, or another.
        TrainingError: musubi-tuner, its environment or the settings do not fit.
        StorageError: the disk is full or cannot be written.
    """
    trained = isinstance(run.trainer, MusubiTrainer)
    order = wan_order(facts.config, plan.name)
    path = run_order(plan.name, "wan", order.planned)
    atomic.write(path, order.model_dump_json().encode())
    plan.launch_order = path

    def weights() -> str:
        return networks_digest(order.model, facts.memo.digest_of_file)

    if trained and not (plan.lock and is_trained(order, plan.lock, weights)):
        plan.training_order = path
        if train:
            _refuse_untrainable(order, facts.memo)


def wan_order(config: Config, name: str) -> MusubiOrder:
    """Return the order of a Wan run."""
    run, folder = config.runs[name], run_folder(name)
    return MusubiOrder(
        run=name,
        manifest=str(folder / "manifest.jsonl"),
        lock=str(folder / "dataset.lock"),
        output=str(folder),
        datasets={dataset: config.datasets[dataset] for dataset in run.datasets},
        resolutions=[(size.width, size.height) for size in run.resolutions],
        model_name=run.model,
        model=config.models[run.model],
        trainer=run.trainer
        if isinstance(run.trainer, MusubiTrainer)
        else MusubiTrainer(kind="musubi"),
        musubi_tuner=config.musubi_tuner,
        publish=config.publish,
        planned=time.time_ns(),
    )


def _refuse_untrainable(order: MusubiOrder, memory: Memory) -> None:
    """Name what a training lacks before its caches are made, which may take days.

    The encoders have been looked at for their recipes.
    """
    models = list(networks(order.model))
    for file in models:
        if file.fault:
            where = f"models.{order.model_name}.{file.key}"
            fault = f"{file.place} {file.fault}" if file.place else file.fault
            raise ModelError(fault, where=where, mend="name the right file")
    refuse_failed(preflight(order, memory, quick=True, models=models))
