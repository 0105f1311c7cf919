"""A trainer of the loop whose networks draw clips or pictures, and are evaluated.

What follows a training is imported when it is asked for: most plans have nothing of it.
"""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentmake.plan.facts import Facts
from latentmake.plan.run_plan import RunPlan
from latentmake.plan.state import Difference
from latentmake.training.loop.plan import LoopBackend

if TYPE_CHECKING:
    from latentmake.training.loop.draw import Painter


class FollowedBackend(LoopBackend):
    """A trainer whose networks draw clips or pictures, and are evaluated on held-out items."""

    @abstractmethod
    def clip_settings(self, facts: Facts, training: Any, word: str) -> tuple[str, dict[str, Any]]:
        """Return the digest of all networks that draw, and settings that not all trainers have.

        They are settings of clips (`generate`), or of those of an evaluation (`evaluate`).

        Raises:
            UserError: the model draws no clips, or a file is missing.
        """

    @abstractmethod
    def painter(self, order: Any, recipe: Any) -> Painter:
        """Return what draws clips by the networks of a training's recipe."""

    def plan_following(
        self, facts: Facts, plan: RunPlan, word: str
    ) -> tuple[Path, list[Difference]]:
        """Write the order of clips or of an evaluation; see `Backend.plan_following`."""
        from latentmake.training.loop.following import plan_following

        return plan_following(facts, plan, word, self.clip_settings)

    def follow(self, order: Path, word: str, *, log: Path, threads: int = 2) -> Path:
        """Bring clips or the results of an evaluation up to date; return their folder."""
        from latentmake.training.loop.following import follow

        return follow(order, word, log=log, threads=threads)

    def follow_here(self, order: Path, word: str) -> None:
        """Draw clips or evaluate in this process.

        Raises:
            UserError: a file is damaged or gone, memory does not suffice, the disk is full.
        """
        from latentmake.training.loop import draw
        from latentmake.training.loop.following import order_of

        draw.follow(order_of(order, word), self.order_type, self.recipe, self.painter)
