"""Models: encoders, and the network to train."""

from __future__ import annotations

from typing import Any, Self

from pydantic import TypeAdapter, ValidationError, model_validator

from latentmake.config.architectures import ARCHITECTURES, GENERIC, WAN, Architecture
from latentmake.config.model_checks import check_model
from latentmake.config.model_keys import ModelKeys
from latentmake.config.weights import LocalPlace

_PLACE: TypeAdapter[str] = TypeAdapter(LocalPlace)


def _of_checkpoint(values: dict[str, Any], row: Architecture) -> dict[str, Any]:
    """Return the keys of a model with the parts that its `checkpoint` holds and no key names.

    The network that sd-scripts trains stays the `checkpoint`.
    """
    if not row.checkpoints or not values.get("checkpoint") or values.get("task") is not None:
        return values
    try:
        path = _PLACE.validate_python(values["checkpoint"])
    except ValidationError:
        return values  # said of its own key
    keys = ("vae",) if values.get("layout") == "sdscripts" else ("vae", "unet")
    own = {key: {"path": path, "subfolder": key} for key in keys if values.get(key) is None}
    number = max(1, len(row.text_encoders))
    text = values.get("text") or {}
    texts = text if isinstance(text, list) else [text] * number if _no_place(text) else [text]
    names = ["text_encoder", *(f"text_encoder_{index}" for index in range(2, len(texts) + 1))]
    filled = [
        {"path": path, "subfolder": name, **each} if _no_place(each) else each
        for each, name in zip(texts, names, strict=False)
    ]
    return {**values, **own, "text": filled}


def _no_place(text: object) -> bool:
    """Whether a text encoder's section names neither file nor folder."""
    return isinstance(text, dict) and not text.get("path") and not text.get("hub")


class Model(ModelKeys):
    """Encoders whose caches a trainer reads, and the network to train.

    Each entry of `models` is a model with a name of yours. Its VAE makes the latents, its text
    encoders make the embeddings of captions, and its network is trained. The caches lie in
    `cache/{dataset}/{model}/`.

    ```yaml
    models:
      sd15:
        vae: models/sd15/vae
        text: [models/sd15/text_encoder]
        unet: models/sd15/unet
    ```

    The trainer decides which keys a model needs:

    - **`sd`**, the trainer for Stable Diffusion 1.x and 2.x: `vae`, `text` and `unet`.
    - **sd-scripts**: `architecture`, `layout: sdscripts`, `vae`, `text` and `checkpoint`. The
      architectures `lumina`, `hunyuan_image` and `anima` set the layout themselves. See
      [sd-scripts](../trainers/sdscripts.md).
    - **Wan**, by the trainer `wan` or by musubi-tuner: `task`, `vae`, `text` and `dit`, and no
      `architecture`. See [Wan](../trainers/wan.md).
    - **Other architectures of musubi-tuner**: `architecture`, `vae`, `text` and `dit`, and `task`
      where there are several. See [musubi-tuner](../trainers/musubi.md).

    [Architectures](architectures.md) lists the weights, tasks and training defaults of each
    architecture.

    If the content of a weight file, its `config.json` or a tokenizer changes, everything that was
    made from it is made again. Paths do not matter: a moved model rebuilds nothing.

    ## Layers of the text encoders

    `architecture` decides which layers and vectors are cached:

    - without `architecture`: the last layer of each text encoder.
    - `sd1`, `sd2`: the last layer of CLIP, normalised, or the layer of `clip_skip`; and the vector
      of the caption.
    - `sdxl`: the last layer but one of both CLIPs, not normalised; and the projected vector of the
      second CLIP at the first end-of-text token.
    - `sd3`: the same layer of both CLIPs and their projected vectors; and the last layer of T5.
    - `flux`: the last layer of CLIP and its vector, not projected; and the last layer of T5.

    With an `architecture` the cache also holds the `attention_mask` of each encoder (1 for tokens,
    0 for padding). T5 embeddings keep the length of their caption. In the layout `sdscripts` they
    are padded to `max_length`.

    ## Layout of sd-scripts

    With `layout: sdscripts` the caches have the names and arrays of sd-scripts' own caches. For
    SDXL these are `{stem}_{W}x{H}_sdxl.npz`, where W x H is the size of the image, and
    `{stem}_te_outputs.npz`; [architectures](architectures.md#architectures-of-sd-scripts) lists
    the others. Differences from `layout: plain`:

    - Captions of `sd1` and `sd2` are not cached. sd-scripts encodes them while it trains.
    - Latents are stored in float32, as sd-scripts expects. `dtype` is the precision of the
      computation.
    - `fit: bucket` uses the buckets of sd-scripts. EXIF orientation and `background` are not
      applied.
    - The key of the cache file is stored in the comment of the npz archive. A file that sd-scripts
      wrote over has no such comment, so Latentmake makes it again.

    For `lumina`, `hunyuan_image` and `anima`, sd-scripts' own classes encode the stale items, one
    at a time, in the environment of sd-scripts. Their `dtype` is `bfloat16`, as in a training with
    `mixed_precision: bf16`; HunyuanImage uses the precisions that sd-scripts fixes. Lumina and
    HunyuanImage cache a random sample of the VAE's posterior; its seed is made from
    `posterior_seed` and the content of the image.

    ## Files of Wan

    - `vae`: a diffusers folder, or the original `Wan2.1_VAE.pth` or `.safetensors`.
    - `text`: one umT5-XXL, as a transformers folder or the original
      `models_t5_umt5-xxl-enc-bf16.pth`. The original file needs a `tokenizer`: a folder with the
      `tokenizer.json`, `tokenizer_config.json`, `special_tokens_map.json` and `spiece.model` of
      google/umt5-xxl.
    - `clip`: a transformers folder, or the original
      `models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth`.

    Sides of resolutions are multiples of 16. `cache/{dataset}/{model}/{resolution}/` is a
    `cache_directory` of musubi-tuner and has no sub-folders, so two items of a dataset may not
    have the same file name. After an OOM the encoder halves its batch; at batch size 1 it keeps
    features in the CPU's memory, which does not change the result.
    [Faults](../how-it-works/faults.md) says when an item that still does not fit is faulty.
    """

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_architecture(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if isinstance(values.get("vae"), dict) and not any(values["vae"].values()):
            values = {key: values[key] for key in values if key != "vae"}  # NO_WEIGHTS, as written
        name, task = values.get("architecture"), values.get("task")
        if name == WAN.name:
            name, values = None, {key: values[key] for key in values if key != "architecture"}
        row = ARCHITECTURES.get(name, GENERIC) if isinstance(name, str) else GENERIC
        values = _of_checkpoint(values, row)
        if row.scripts is not None:
            (only, *others) = row.scripts.versions
            given = {} if others or not only else {"task": only}
            forced = {"dtype": "bfloat16", "layout": "musubi", "encoder": "musubi"}
            return {**forced, **given, **values}
        if row.strategies is not None and not row.encodes:
            return {**row.strategies.defaults, **values}
        if name is None and task is not None:
            return {"dtype": "bfloat16", "layout": "musubi", **values}
        return values

    @model_validator(mode="after")
    def _fits(self) -> Self:
        check_model(self)
        return self
