"""Settings of the caption pipeline."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from latentmake.config.fields import Closed, Number, Real
from latentmake.config.shapes import TEXT, Shapes


class Captions(Closed):
    """Changes to captions before they are encoded, under the names of sd-scripts.

    `captions` is a section of a dataset. It makes the text that is encoded from the caption and
    the tags of an item, in the order of sd-scripts. sd-scripts repeats this in every step, or
    ignores these settings when text is cached. Latentmake makes `variants` texts of each item once
    and caches them; training picks among them.

    ```yaml
    datasets:
      cats:
        path: data/cats
        tags_extension: .tags
        captions: {variants: 8, shuffle_caption: true, keep_tokens: 1, caption_dropout_rate: 0.1}
    ```

    A variant is the empty caption (see `caption_dropout_rate`), or is made in this order:

    - join caption and tags, add prefix and suffix;
    - choose a line and the wildcards;
    - limit the tags during the warm-up, shuffle them, drop some;
    - apply `replacements`.

    `latentmake captions RUN` shows every text as it is encoded. See the guide [Edit
    captions](../guides/captions.md).

    Trainers use the variants in two ways. The trainers `sd` and `wan` pick one text of an item in
    each step. For musubi-tuner and sd-scripts each text is an item of its own with links to the
    same latents, so an epoch is `variants` times as long. There, keys that depend on step or epoch
    are refused.
    """

    shapes: ClassVar[Shapes] = TEXT

    variants: Number = Field(1, ge=1, le=1000)
    """Number of texts of each item. The random choices of a variant depend only on `seed`, the
    item's name and the number of the variant: editing another item does not change them, and more
    variants keep the first ones. A larger number encodes only the new ones."""
    seed: Number = Field(0, ge=0)
    """Seed of all random choices of this section."""
    caption_and_tags: Literal["join", "tags_first", "pick", "lines", "wildcard"] = "join"
    """Text of an item that has a caption and tags. `join`: the caption, then the tags, as in
    sd-scripts. `tags_first`: the tags, then the caption. `pick`: one of the two, so that the
    network learns to follow either. `lines`: the tags become one more line, and one of the lines
    is taken. `wildcard`: the wildcard `{caption|tags}`. `lines` and `wildcard` need
    `enable_wildcard`."""
    caption_separator: str = Field(",", min_length=1)
    """Text between two tags, and between caption and tags."""
    caption_prefix: str | None = Field(None, min_length=1)
    """Text before the caption, with a space. `{folder}` stands for the name of the image's folder,
    without the repeats of a name such as `10_sks man`."""
    caption_suffix: str | None = Field(None, min_length=1)
    """Text after the caption, with a space."""
    caption_dropout_rate: Real = Field(0.0, ge=0, lt=1)
    """Share of the variants that are the empty caption. It needs `variants` of 2 or more."""
    caption_dropout_every_n_epochs: Number = Field(
        0, ge=0, json_schema_extra=Shapes("text", "weights")
    )
    """In each epoch whose number (from 1) is a multiple of this, all captions are empty; `0` is
    never. For the trainers `sd` and `wan`."""
    enable_wildcard: bool = False
    """Take one line of a caption with several lines, then one alternative of each `{a|b}`; `{{`
    and `}}` are braces. Without it all lines are encoded, with `layout: sdscripts` only the
    first."""
    shuffle_caption: bool = False
    """Shuffle the tags."""
    keep_tokens: Number = Field(0, ge=0)
    """Number of tags at the beginning that are neither shuffled nor dropped."""
    keep_tokens_separator: str | None = Field(None, min_length=1)
    """Marker such as `|||`: tags before it, and after a second one, stay in place. It overrides
    `keep_tokens` where it occurs."""
    token_warmup_min: Number = Field(1, ge=0)
    """Number of tags in the first step, in addition to those that are kept; see
    `token_warmup_step`."""
    token_warmup_step: Real = Field(0.0, ge=0, json_schema_extra=Shapes("text", "weights"))
    """Step from which captions have all their tags; below 1, the share of all steps. Until then
    training uses the first half of the variants one after the other, with more and more tags;
    afterwards it uses the second half, with all tags. For the trainers `sd` and `wan`."""
    caption_tag_dropout_rate: Real = Field(0.0, ge=0, lt=1)
    """Share of the tags that are dropped. It needs `variants` of 2 or more."""
    secondary_separator: str | None = Field(None, min_length=1)
    """Separator such as `;;;` between tags that are shuffled and dropped together. In the text it
    becomes `caption_separator`."""
    replacements: dict[str, str | Annotated[list[str], Field(min_length=1)]] = Field({})
    """Words and their replacements, applied last. The word `''` stands for the complete caption
    and may have a list of texts, one of which is taken."""

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
