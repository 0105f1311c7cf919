"""Settings of the caption pipeline."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from latentmake.config.fields import Closed, Number, Real
from latentmake.config.shapes import TEXT, Shapes


class Captions(Closed):
    """Changes to captions before they are encoded, under the names that sd-scripts uses."""

    shapes: ClassVar[Shapes] = TEXT

    variants: Number = Field(1, ge=1, le=1000)
    """Texts of each item; training picks one of them each time."""
    seed: Number = Field(0, ge=0)
    """Seed of all that is random here."""
    caption_and_tags: Literal["join", "tags_first", "pick", "lines", "wildcard"] = "join"
    """Text of an item with a caption and tags: the caption, then the tags; the tags, then
    the caption; one of the two; each a line of its own, of which one is taken; or the wildcard
    {caption|tags}."""
    caption_separator: str = Field(",", min_length=1)
    """Text between two tags, and between caption and tags."""
    caption_prefix: str | None = Field(None, min_length=1)
    """Put before the caption, with a space. `{folder}` stands for the name of the image's folder,
    without the repeats of a name such as `10_sks man`."""
    caption_suffix: str | None = Field(None, min_length=1)
    """Put behind the caption, with a space."""
    caption_dropout_rate: Real = Field(0.0, ge=0, lt=1)
    """Share of the variants that are the empty caption."""
    caption_dropout_every_n_epochs: Number = Field(
        0, ge=0, json_schema_extra=Shapes("text", "weights")
    )
    """Epochs between two in which all captions are empty; 0: never."""
    enable_wildcard: bool = False
    """One line of several, and one alternative of each {a|b}; {{ and }} are braces."""
    shuffle_caption: bool = False
    """Put the tags in any order."""
    keep_tokens: Number = Field(0, ge=0)
    """Tags at the beginning that are neither shuffled nor dropped."""
    keep_tokens_separator: str | None = Field(None, min_length=1)
    """Divides the tags that are kept from the others, and those from tags kept at the end; used
    instead of keep_tokens where it occurs."""
    token_warmup_min: Number = Field(1, ge=0)
    """Tags of a caption in the first step, besides those that are kept."""
    token_warmup_step: Real = Field(0.0, ge=0, json_schema_extra=Shapes("text", "weights"))
    """Step from which captions have all their tags; below 1 a share of all steps."""
    caption_tag_dropout_rate: Real = Field(0.0, ge=0, lt=1)
    """Share of the tags that are left out."""
    secondary_separator: str | None = Field(None, min_length=1)
    """Holds tags together that are shuffled and dropped as one; becomes the caption_separator."""
    replacements: dict[str, str | Annotated[list[str], Field(min_length=1)]] = Field({})
    """Words and their replacements; the word '' stands for the complete caption, which becomes the
    text or one of the texts."""

    @property
    def random(self) -> bool:
        """Whether two variants of an item can differ."""
        return (
            self.enable_wildcard
            or self.shuffle_caption
            or self.caption_and_tags == "pick"
            or self.caption_dropout_rate > 0
            or self.caption_tag_dropout_rate > 0
            or self.token_warmup_step > 0
            or isinstance(self.replacements.get(""), list)
        )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.variants > 1 and not self.random:
            raise ValueError(
                f"`variants: {self.variants}` of one and the same text: set `shuffle_caption`, "
                "`enable_wildcard` or a dropout rate, or leave out `variants`"
            )
        if self.caption_and_tags in ("lines", "wildcard") and not self.enable_wildcard:
            raise ValueError(
                f"`caption_and_tags: {self.caption_and_tags}` needs `enable_wildcard: true`"
            )
        if self.variants < 2 and (
            key := self.first_set("caption_dropout_rate", "caption_tag_dropout_rate")
        ):
            raise ValueError(
                f"`{key}` needs `variants: 2` or more: what an item's only text lacks is never seen"
            )
        if self.token_warmup_step > 0 and self.variants < 2:
            raise ValueError("`token_warmup_step` needs `variants: 2` or more")
        if any(isinstance(each, list) for word, each in self.replacements.items() if word):
            raise ValueError("`replacements` has a list for a word: only '' may have one")
        return self
