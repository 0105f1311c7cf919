"""Starts the trainer `sd` under DeepSpeed in several processes without a GPU.

Where there is no GPU, accelerate lets DeepSpeed bring the processes together but takes itself for
the only one; here it is told how many there are.
"""

from __future__ import annotations

import sys

import torch
from accelerate.state import PartialState
from latentmake.training.sd import train

state = PartialState()
state.num_processes = torch.distributed.get_world_size()
state.process_index = state.local_process_index = torch.distributed.get_rank()
sys.exit(train.main(sys.argv[1:]))
