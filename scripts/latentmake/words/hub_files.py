"""Files on the hub that the trainers' guides name, and the commands that download them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from shlex import quote
from typing import NamedTuple

import yaml

_PARTS = {  # folder of a pipeline -> its files; repositories have others besides
    **dict.fromkeys(("vae", "unet"), ("config.json", "diffusion_pytorch_model.safetensors")),
    "text_encoder": ("config.json", "model.safetensors"),
    "scheduler": ("scheduler_config.json",),
}


class HubFile(NamedTuple):
    """A file in a repository on the hub; a name with `*` stands for several."""

    repo: str
    name: str

    def local(self, folder: Path) -> Path:
        """Return the --local-dir of a download: a complete repository gets its own folder."""
        return folder / Path(self.repo).name if self.name == "*" else folder

    def future(self, folder: Path) -> Path:
        """Return the path of the file, or the folder of several, after the download."""
        return self.local(folder).joinpath(*(x for x in Path(self.name).parts if "*" not in x))


_TABLE = Path(__file__).with_suffix(".yaml").read_text("utf-8")
HUB_FILES: Mapping[str, Mapping[str, HubFile]] = {
    name: {key: HubFile(*file) for key, file in files.items()}
    for name, files in yaml.safe_load(_TABLE).items()
}
"""Architecture -> key of the model -> file. `config` and `tokenizer` are those of text encoders."""


def downloads(missing: Mapping[str, HubFile], folder: Path) -> Iterator[tuple[list[str], str]]:
    """Yield commands that download files, one for each repository and kind of names.

    Args:
        missing: key of the model -> file.
        folder: gets them.

    Returns:
        Keys, and the command.
    """
    calls: dict[tuple[str, Path, bool], tuple[list[str], list[str]]] = {}
    for key, file in missing.items():
        part = re.sub(r"(_\d)?/\*$", "", file.name)
        names = [file.name.replace("*", each) for each in _PARTS.get(part, ())]
        names = names or [file.name.replace("-00001-of-", "-*-of-")]  # all shards
        call = calls.setdefault((file.repo, file.local(folder), "*" in names[0]), ([], []))
        call[0].append(key)
        call[1].extend(names)
    for (repo, local, several), (keys, names) in calls.items():
        words = [f'--include "{x}"' if several else x for x in names if x != "*"]
        yield keys, " ".join(["hf download", repo, *words, "--local-dir", quote(str(local))])


PIPELINE = (
    f'hf download {HUB_FILES["sd1"]["vae"].repo} --include "*.json" --include "*/merges.txt" '
    '--include "*/diffusion_pytorch_model.safetensors" --include "text_encoder/model.safetensors"'
)
"""Command that downloads Stable Diffusion 1.5, without files that no training reads."""
