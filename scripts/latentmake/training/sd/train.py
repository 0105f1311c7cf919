"""The trainer `sd`: Stable Diffusion 1.x and 2.x, a LoRA, parts or the full UNet, from caches.

`accelerate launch -m latentmake.training.sd.train ORDER`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from latentmake.training.loop.command import carry_out
from latentmake.training.sd.order import SdOrder
from latentmake.training.sd.recipe import SdRecipe


def main(arguments: Sequence[str]) -> int:
    """Carry out `python -m latentmake.training.sd.train ORDER`; return the exit status."""
    return carry_out(arguments, SdOrder, SdRecipe)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
