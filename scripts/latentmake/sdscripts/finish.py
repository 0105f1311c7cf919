"""The end of a plan of a run of sd-scripts: the order of its training and publication."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from latentmake import cachefile
from latentmake.config import Run, SdScriptsTrainer
from latentmake.errors import ModelError
from latentmake.orders import run_order
from latentmake.parts import RunPlan, run_folder
from latentmake.sdscripts.installation import find
from latentmake.sdscripts.network import checkpoint_digest, refuse_unreadable
from latentmake.sdscripts.order import SdScriptsOrder
from latentmake.trainers.launched import Layout, read_record
from latentmake.trainers.order import Wanted

if TYPE_CHECKING:
    from latentmake.plan import Planner

__all__ = ["finish_sdscripts"]


def finish_sdscripts(
    planner: Planner,
    plan: RunPlan,
    run: Run,
    trainer: SdScriptsTrainer,
    lock: str | None,
    *,
    train: bool = True,
) -> None:
    """Write the order of a run of sd-scripts, and decide whether it is to be trained.

    Args:
        planner: what is known of datasets and models.
        plan: of the run; gets the order.
        run: its section of the configuration.
        trainer: its trainer's section.
        lock: digest of its caches; None where they are yet to be made.
        train: whether its training is asked for.

    Raises:
        ModelError: a network that the training loads is missing, or no file.
        TrainingError: sd-scripts is not where the configuration says.
        StorageError: the disk is full or cannot be written.
    """
    config, folder = planner.config, run_folder(plan.name)
    assert config.sd_scripts is not None
    order = SdScriptsOrder(
        run=plan.name,
        manifest=str(folder / "manifest.jsonl"),
        lock=str(folder / "dataset.lock"),
        output=str(folder),
        datasets={name: config.datasets[name] for name in run.datasets},
        resolutions=[(size.width, size.height) for size in run.resolutions],
        model_name=run.model,
        model=config.models[run.model],
        trainer=trainer,
        sd_scripts=config.sd_scripts,
        publish=config.publish,
        planned=time.time_ns(),
    )
    path = run_order(plan.name, "sdscripts", order.planned)
    cachefile.write(path, order.model_dump_json().encode())
    plan.launch_order = path
    if not (lock and _is_trained(planner, order, lock)):
        plan.training_order = path
        if train:
            refuse_unreadable(order)
            find(order)


def _is_trained(planner: Planner, order: SdScriptsOrder, lock: str) -> bool:
    """Whether a run's result came from just what its order says; the network is read last."""
    layout = Layout(order.run, order.output)
    record = read_record(layout.record)
    if record is None or not (layout.lora.is_file() and (layout.output / "trained.json").is_file()):
        return False
    wanted = Wanted(data=lock, settings=order.settings_digest(), weights=record.wanted.weights)
    if record.wanted != wanted:
        return False
    try:
        return wanted.weights == checkpoint_digest(order, planner.memo.digest_of_file)
    except ModelError:
        return False  # the job says so
