"""Trainers and their settings, under the names that their own documentation uses."""

from __future__ import annotations

from latentmake.config.trainers.base import Trainer
from latentmake.config.trainers.loop import LoopTrainer, Samples
from latentmake.config.trainers.musubi import MusubiTrainer
from latentmake.config.trainers.sd import SdTrainer
from latentmake.config.trainers.sdscripts import SdScriptsTrainer
from latentmake.config.trainers.wan import WanSamples, WanTrainer

__all__ = [
    "LoopTrainer",
    "MusubiTrainer",
    "Samples",
    "SdScriptsTrainer",
    "SdTrainer",
    "Trainer",
    "WanSamples",
    "WanTrainer",
]
