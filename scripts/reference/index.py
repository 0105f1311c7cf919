"""First page of the reference: all sections, and how to read an entry."""

from __future__ import annotations

from latentmake.config.root import Config

from reference.pages import PAGES, entry, summary

__all__ = ["page"]

_HEAD = """# Reference

These pages describe every key of the configuration and every option of `latentmake`. They are
generated from the program. The guide to the configuration is
[config/README.md](../../config/README.md).

"""
_OTHERS = """\
- [Architectures](architectures.md): Weights, tasks and training defaults of each architecture.
- [Commands](commands.md): The commands of `latentmake` and their options.

## How to read an entry

Each key has a heading, one line of facts, and a description:

> **`num_repeats`**
>
> *integer from 1 · default `1` · rebuilds training*

- The **type**: `path` is a path on this machine, where `~`, `$NAME` and `${NAME}` are expanded;
  `size` is a side in pixels, `[width, height]` or `512x768`; `section` has keys of its own; `or
  list of them` means that one value may stand for a list of one.
- The **default**. A key that is `optional` may be left out; its description says what happens
  then. `default: see below` means that the description tells the default.
- The results that a changed value **rebuilds**:

| word | made again |
|---|---|
| nothing | No cache and no training. |
| latents | The latents that the key affects, then the trainings that use them. |
| embeddings | The embeddings of captions that the key affects, then the trainings that use them. |
| captions | The captions that captioners wrote, then the embeddings of those that changed. |
| training | Trainings; every cache stays. |
| pictures | Sample pictures or clips of the next training; no step is trained. |
| clips | Clips and pictures of `generate_{run}` and `evaluate_{run}`; no step is trained. |
| publication | Files of `publish_{run}` or `export_{run}`; no cache and no training. |

Only the result counts: a value that leaves an image's size or a caption's text as it was rebuilds
nothing. `snakemake -n train_{run}` shows what a change would make again, and why. More: [how
staleness is decided](../how-it-works/staleness.md).

## On the command line

"""
_GRAPH = """
## The graph

"""


def page() -> str:
    """Return the Markdown of the page."""
    rows = [f"- [{page.title}]({page.file}): {summary(page.section)}\n" for page in PAGES]
    entries = f"{entry(Config, 'prompt')}{_GRAPH}{entry(Config, 'graph')}"
    return f"{_HEAD}{''.join(rows)}{_OTHERS}{entries}\n"
