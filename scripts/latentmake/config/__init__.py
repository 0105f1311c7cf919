"""The configuration: typed, closed against typing errors, each error in one line.

Everything that a user may write in `config/config.yaml` is a field here, with its description;
`config/schema.json` and `docs/reference/` are generated from these types (`python -m reference`).
Nothing here touches a file: whether a path exists is for the planner to find out.
"""

from __future__ import annotations

from latentmake.config.captions import Captions
from latentmake.config.cluster import Batch, Cluster, ClusterJob, TrainingJob
from latentmake.config.datasets import Dataset
from latentmake.config.fields import Dtype, Resolution, resolution_name
from latentmake.config.generation import Generation
from latentmake.config.machines import (
    Export,
    ExternalProgram,
    MusubiTuner,
    PathMap,
    Publish,
)
from latentmake.config.mistakes import nearest
from latentmake.config.models import Model
from latentmake.config.root import Config, parse
from latentmake.config.runs import Run
from latentmake.config.schema import json_schema
from latentmake.config.trainers import (
    LoopTrainer,
    MusubiTrainer,
    Samples,
    SdScriptsTrainer,
    SdTrainer,
    WanTrainer,
)
from latentmake.config.weights import Adopt, Location, TextWeights, Weights

__all__ = [
    "Adopt",
    "Batch",
    "Captions",
    "Cluster",
    "ClusterJob",
    "Config",
    "Dataset",
    "Dtype",
    "Export",
    "ExternalProgram",
    "Generation",
    "Location",
    "LoopTrainer",
    "Model",
    "MusubiTrainer",
    "MusubiTuner",
    "PathMap",
    "Publish",
    "Resolution",
    "Run",
    "Samples",
    "SdScriptsTrainer",
    "SdTrainer",
    "TextWeights",
    "TrainingJob",
    "WanTrainer",
    "Weights",
    "json_schema",
    "nearest",
    "parse",
    "resolution_name",
]
