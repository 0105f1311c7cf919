"""The trainer `wan`: LoRAs of Wan 2.1 and 2.2, from caches.

`accelerate launch -m latentmake.training.wan.train ORDER`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from latentmake.training.loop.command import carry_out
from latentmake.training.wan.order import WanOrder
from latentmake.training.wan.recipe import WanRecipe


def main(arguments: Sequence[str]) -> int:
    """Carry out `python -m latentmake.training.wan.train ORDER`; return the exit status."""
    return carry_out(arguments, WanOrder, WanRecipe)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
