"""Keys and facts that several trainers share."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from latentmake.config.fields import Closed, DiskPath, Real, Resolution
from latentmake.config.shapes import MACHINE, WEIGHTS, Shapes

Kind = Literal["sd", "wan", "musubi", "sdscripts"]
_NO = BeforeValidator(lambda value: "no" if value is False else value)  # YAML's `no`
Precision = Annotated[Literal["no", "bf16", "fp16"], _NO]
AutoPrecision = Annotated[Literal["auto", "no", "bf16", "fp16"], _NO]
LoraAlpha = Annotated[
    Real | None, Field(gt=0, description="Scale of the LoRA; by default its rank.")
]
LauncherAlpha = Annotated[
    Real | None,
    Field(gt=0, description="Scale of the LoRA; by default that of the guide, or its rank."),
]
Logging = Annotated[
    bool,
    Field(json_schema_extra=MACHINE, description="Write TensorBoard scalars to runs/{run}/logs."),
]
AccelerateConfig = Annotated[
    DiskPath | None,
    Field(json_schema_extra=MACHINE, description="Configuration file for `accelerate launch`."),
]
ACCUMULATION = Field(1, description="Micro-batches accumulated per optimizer step.")
WORKERS = Field(2, ge=0, json_schema_extra=MACHINE, description="Processes that read caches.")


class Trainer(Closed):
    """A trainer's section; the defaults are the answers of one that draws no sample pictures.

    Attributes:
        layout: the layout whose caches it reads.
        network: the model's key that names what is trained.
        alternatives: further keys, one of which may be set in its place.
        generates: whether `generate_{run}` makes clips by what it trained.
        evaluates: whether it leaves items out of training, by which `evaluate_{run}` compares what
            it trained with the base.
    """

    shapes: ClassVar[Shapes] = WEIGHTS
    layout: ClassVar[str]
    network: ClassVar[str]
    alternatives: ClassVar[tuple[str, ...]] = ()
    generates: ClassVar[bool] = False
    evaluates: ClassVar[bool] = False

    @property
    def prompts(self) -> list[str]:
        """Texts whose embeddings it needs besides those of the captions, none twice."""
        return []

    @property
    def sample_resolution(self) -> Resolution | None:
        """Size of its sample pictures, where it sets one."""
        return None
