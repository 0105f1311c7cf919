"""Text encoders of a model: networks, tokenizers, and captions to hidden states.

Captions that are encoded together are padded:

- CLIP of an architecture: to chunks of 77 tokens each, without a mask as a rule, for a UNet attends
  to the padding, too.
- T5 and umT5 with a mask: to the longest of a batch. Padding is hidden from the tokens and is no
  part of the cache (musubi-tuner cuts it off: `T5EncoderModel.__call__` of wan/modules/t5.py).
- T5 of sd-scripts' layout: to 512 tokens, with or without a mask. The cache holds the padding.

Hidden padding adds zeros to sums. That changes their order, and with it the last bits.

Source: sd-scripts' library/strategy_sd.py, strategy_sdxl.py, strategy_sd3.py and strategy_flux.py.

Weights of umT5: a transformers folder, or the one file of the original release
(models_t5_umt5-xxl-enc-bf16.pth, or .safetensors of the same names) with a tokenizer's folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Literal

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    PreTrainedModel,
    T5EncoderModel,
    UMT5EncoderModel,
)

from latentmake.caches.encoders.device import DTYPES, compute_dtype, download, upload
from latentmake.caches.encoders.local_state import (
    UMT5,
    State,
    fill,
    load_network,
    place,
    pretrained,
    refusing,
    renamed,
    text_projection,
    text_state,
    without_weights,
)
from latentmake.caches.inputs import Encoded, Loaded, Named, Sample, results
from latentmake.caches.tokenizers import (
    CHUNK,
    Row,
    TokenCache,
    chunked,
    chunks_needed,
    clean_caption,
    load,
)
from latentmake.config.architectures import ClipOutput
from latentmake.config.models import Model
from latentmake.config.weights import TextWeights
from latentmake.errors import ModelError
from latentmake.layouts.layout import layout_of, released_clip
from latentmake.layouts.tensors import encoder_name, text_metadata
from latentmake.models.files import T5_LENGTH, network_config, weights_files
from latentmake.plan.orders import Order

Kind = Literal["CLIP", "CLIP with its projection", "T5"]

_CLASSES: dict[str, type[PreTrainedModel]] = {
    "t5": T5EncoderModel,
    "umt5": UMT5EncoderModel,
    "clip": CLIPTextModel,
    "clip_text_model": CLIPTextModel,
    "CLIPTextModelWithProjection": CLIPTextModelWithProjection,
}
_PREFIX = "text_model."


def _parts(
    weights: TextWeights,
    device: torch.device,
    dtype: torch.dtype,
    kind: Kind | None = None,
    released: ClipOutput | None = None,
) -> tuple[PreTrainedModel, TokenCache, torch.nn.Module | None]:
    """Load a text encoder's network, tokenizer and projection; raises ModelError.

    It may be of any kind if `kind` is None; for `released` see `tokenizers.load`.
    """
    hint = f"name the folder of a {kind or 'CLIP, T5 or UMT5'} encoder, with all its files"
    with refusing(weights, "a text encoder", hint):
        network = _loaded(weights, dtype, kind)
        tokens = TokenCache(load(weights, released))
        projection = None
        if path := weights.projection:
            projection = text_projection(path, trust_remote_code=weights.trust_remote_code)
    if projection is not None:
        projection.to(device=device, dtype=dtype)
    return place(network, device, dtype), tokens, projection


def _class_of(config: Mapping[str, Any], kind: Kind | None) -> type[PreTrainedModel]:
    names = (*(config.get("architectures") or ()), config.get("model_type"))
    found = next((_CLASSES[name] for name in names if name in _CLASSES), None)
    clip = found in (CLIPTextModel, CLIPTextModelWithProjection)
    if found is None or (kind is not None and clip != kind.startswith("CLIP")):
        raise ValueError(f"its model_type is {names[-1]}")
    return CLIPTextModelWithProjection if kind == "CLIP with its projection" else found


def _loaded(weights: TextWeights, dtype: torch.dtype, kind: Kind | None) -> PreTrainedModel:
    model: PreTrainedModel
    if weights.hub is not None:
        place = {"revision": weights.revision, "subfolder": weights.subfolder or ""}
        config = AutoConfig.from_pretrained(weights.hub, **place).to_dict()
        model = pretrained(_class_of(config, kind), weights, dtype=dtype)
        return model
    weights_files(weights)  # names what is missing
    known = network_config(weights)
    if known is None:
        what = "a single file does not say what network it holds"
        hint = "name the folder of its config.json as `config`"
        raise ModelError(what, where=weights.path or "", hint=hint)
    model = without_weights(_class_of(known, kind), known)
    state = text_state(weights, model)
    own: State = {}
    for name in model.state_dict():
        # CLIP's names come with this prefix or without.
        for other in (name.removeprefix(_PREFIX), f"{_PREFIX}{name}", name):
            own |= {name: state[other]} if other in state else {}
    fill(model, own)
    return model


Tensors = dict[str, torch.Tensor]
Results = Callable[[], list[Tensors]]
"""Waits for the device; tensors by name, of each caption, on the CPU."""

_NAMED = 3  # captions that a line about many of them names


@dataclass(frozen=True)
class TextEncoder:
    """A CLIP, T5 or umT5 with its tokenizer. Any number of threads may encode.

    Attributes:
        network: of transformers.
        tokens: of captions.
        projection: of the hidden states, if any.
        max_length: tokens kept of a caption, with BOS and EOS; None: all.
        padding: of captions: to `chunks` of 77 tokens, to `max_length` of them, or only to the
            longest of a batch (None), which is no part of the results.
        kept: tensors kept of a CLIP's output; None: of a T5, the last hidden states.
        masked: whether padding is hidden from the network; with one chunk only. CLIP was trained
            without a mask, and Stable Diffusion uses none either.
        tells_mask: whether embeddings come with their `attention_mask`.
        stored: dtype of embeddings.
    """

    network: PreTrainedModel
    tokens: TokenCache
    projection: torch.nn.Module | None
    max_length: int | None
    padding: Literal["chunks", "max_length"] | None = None
    kept: ClipOutput | None = None
    masked: bool = True
    tells_mask: bool = False
    stored: torch.dtype = torch.float32

    def row(self, caption: str, chunks: int = 1) -> Row:
        """Return a caption's tokens as the network gets them, with padding that is kept."""
        if self.padding == "chunks":
            return chunked(caption, self.tokens, chunks)
        # Empty captions without EOS get one token of padding, which is not hidden.
        ids = self.tokens.ids(caption, self.max_length) or [self.tokens.padding]
        rest = (self.max_length or 0) - len(ids) if self.padding else 0
        ids, mask = ids + [self.tokens.padding] * rest, [1] * len(ids) + [0] * rest
        return Row(ids, mask, [ids])

    def encode(self, captions: Sequence[str]) -> list[Tensors]:
        """Encode captions, those of a CLIP in one chunk each; see `queue`."""
        return self.queue([self.row(caption) for caption in captions])()

    @torch.inference_mode()
    def queue(self, rows: Sequence[Row]) -> Results:
        """Begin to encode the tokens of captions, all chunks as one batch.

        Returns:
            What waits for the device. Of each caption `hidden_state` [T, D]: of n chunks [75n + 2,
            D], BOS of the first, tokens of all, end of the last; for CLIP `pooled` [D'] of the
            first chunk, if it is kept; with `tells_mask`, `attention_mask` [T], 1 for tokens and 0
            for padding, int64.
        """
        device, parts = self.network.device, [len(row.chunks) for row in rows]
        chunks = [torch.tensor(chunk) for row in rows for chunk in row.chunks]
        ids = upload(
            pad_sequence(chunks, batch_first=True, padding_value=self.tokens.padding), device
        )
        masks = [torch.tensor(row.mask) for row in rows]
        network: Any = self.network
        if self.kept is not None:
            network = getattr(network, "text_model", network)  # without a projection
        mask: torch.Tensor | None = None
        if self.masked:
            mask = pad_sequence(masks, batch_first=True)
            mask = upload(mask, device) if self.kept else hiding(mask, self.network)
        output = network(
            input_ids=ids,
            attention_mask=mask,
            output_hidden_states=self.kept is not None and self.kept.layer is not None,
        )
        firsts = list(accumulate(parts[:-1], initial=0))  # each caption's first chunk
        made = self._made(network, output, ids, firsts)
        copied = download([each.to(self.stored) for each in made])

        def wait() -> list[Tensors]:
            hidden, *pooled = copied()
            found: list[Tensors] = []
            for index, states in enumerate(hidden.split_with_sizes(parts)):
                found.append({"hidden_state": _joined(states)[: len(masks[index])]})
                if pooled:
                    found[-1]["pooled"] = pooled[0][index]
                if self.tells_mask:
                    found[-1]["attention_mask"] = masks[index]
            return found

        return wait

    def _made(
        self, network: Any, output: Any, ids: torch.Tensor, firsts: Sequence[int]
    ) -> Iterator[torch.Tensor]:
        """Yield the hidden states of all chunks, [chunks, T, D], then any vectors, [captions, D'].

        A caption's vector is that of its first chunk.
        """
        hidden: torch.Tensor = output.last_hidden_state
        kept, project = self.kept, self.projection or torch.nn.Identity()
        if kept is None or kept.layer is None:
            yield project(hidden)
        else:
            states = output.hidden_states[-kept.layer]
            yield project(network.final_layer_norm(states) if kept.normalised else states)
        if kept is None or kept.pooled is None:
            return
        places = upload(torch.tensor(firsts), ids.device)
        vectors: torch.Tensor = output.pooler_output[places]
        if kept.pooled == "end":
            # Not the network's own: by its configuration it may take the highest id for EOS.
            ends = (ids[places] == self.tokens.tokenizer.eos_token_id).int().argmax(dim=1)
            vectors = hidden[places, ends]
        projection = getattr(self.network, "text_projection", None)
        yield vectors if projection is None or kept.pooled == "bare" else projection(vectors)


def _joined(hidden: torch.Tensor) -> torch.Tensor:
    """Join a caption's chunks: [n, 77, D] -> [75n + 2, D]."""
    if len(hidden) == 1:
        return hidden[0]
    return torch.cat([hidden[0, :1], hidden[:, 1:-1].flatten(0, 1), hidden[-1, -1:]])


def hiding(mask: torch.Tensor, network: PreTrainedModel) -> torch.Tensor | None:
    """Return the argument `attention_mask` of a T5 or umT5 on its device; `mask` is [N, T], int64.

    None where nothing is padded. transformers would look at a mask [N, T] on the device for that,
    and wait until the work before it is done (`_ignore_bidirectional_mask_sdpa` of masking_utils).
    A mask of four dimensions it takes as it is.
    """
    if bool(mask.all()):
        return None
    if network.config._attn_implementation != "sdpa":
        return upload(mask, network.device)
    return upload(mask.bool()[:, None, None], network.device)


class TextEncoders:
    """A model's text encoders.

    Args:
        encoders: by their names in cache files and messages.
        max_token_length: of CLIPs that take captions in chunks.
    """

    def __init__(
        self, encoders: dict[str, TextEncoder], max_token_length: int | Literal["auto"] = CHUNK
    ) -> None:
        self._encoders = encoders
        clips = [each.tokens for each in encoders.values() if each.padding == "chunks"]
        self._chunks = partial(chunks_needed, tokens=clips, max_token_length=max_token_length)
        self._cut: dict[tuple[str, int], dict[str, str]] = {}

    def encode(self, captions: Sequence[str]) -> list[Tensors]:
        """Encode captions.

        Returns:
            Of each caption, on the CPU: `text_encoder.hidden_state` [T, D] and, if the encoder has
            them, `text_encoder.pooled` [D] and `text_encoder.attention_mask` [T], int64;
            `text_encoder_2...` and so on.
        """
        return self.queue(captions)()

    def queue(self, captions: Sequence[str]) -> Results:
        """Begin to encode captions; what is returned waits for the device."""
        chunks = [self._chunks(caption) for caption in captions]
        begun = {
            name: each.queue([each.row(*one) for one in zip(captions, chunks, strict=True)])
            for name, each in self._encoders.items()
        }

        def wait() -> list[Tensors]:
            found: list[Tensors] = [{} for _ in captions]
            for name, wait_for in begun.items():
                for tensors, own in zip(found, wait_for(), strict=True):
                    tensors |= {f"{name}.{key}": value for key, value in own.items()}
            return found

        return wait

    def lengths(self, caption: str) -> tuple[int, ...]:
        """Return how many tokens of a caption each encoder gets, with its padding."""
        chunks = self._chunks(caption)
        rows = [each.row(caption, chunks) for each in self._encoders.values()]
        return tuple(sum(map(len, row.chunks)) for row in rows)

    def cutting(self, caption: str) -> Iterator[tuple[str, int]]:
        """Yield each encoder that cuts a caption, and the number of tokens it keeps."""
        for name, each in self._encoders.items():
            if each.max_length is not None:
                limit = each.max_length - each.tokens.special
                if each.tokens.count(caption) > limit:
                    yield name, limit

    def loaded(self, named: Callable[[str, Tensors], Named]) -> Loaded:
        """Return these encoders for a job; `named` names a caption's results in its file."""

        def encode(samples: list[Sample]) -> Encoded:
            captions = [str(sample.content) for sample in samples]
            begun = self.queue(captions)
            for sample, caption in zip(samples, captions, strict=True):
                for cut in self.cutting(caption):
                    self._cut.setdefault(cut, {})[sample.key] = sample.item.name
            return results(captions, lambda: [begun()], named)

        return Loaded(encode, remarks=self._remarks, lengths=self.lengths)

    def _remarks(self) -> list[str]:
        """Return a line for each encoder that cut any caption since this was asked last."""
        found = []
        cut, self._cut = self._cut, {}
        for (encoder, limit), names in cut.items():
            many = "1 caption is" if len(names) == 1 else f"{len(names)} captions are"
            first = ", ".join(sorted(names.values())[:_NAMED])
            more = " ..." if len(names) > _NAMED else ""
            found.append(f"{many} cut to the first {limit} tokens by {encoder}: {first}{more}")
        return found


# -- loading --------------------------------------------------------------------------------------


def text(order: Order, device: torch.device, say: Callable[[str], None]) -> Loaded:
    """Load the text encoders of an order."""
    model = order.model_settings
    dtype = compute_dtype(device, model.caption_dtype, say)
    encoders = text_encoders(model, device, dtype, stored=DTYPES[model.caption_dtype])
    return encoders.loaded(lambda caption, tensors: (tensors, {"caption": caption}))


def umt5(order: Order, device: torch.device, say: Callable[[str], None]) -> Loaded:
    """Load Wan's text encoder for an order."""
    model = order.model_settings

    def named(caption: str, tensors: Tensors) -> Named:
        (embedding,) = tensors.values()
        return {"varlen_t5_bfloat16": embedding}, text_metadata(caption)

    computed = compute_dtype(device, "bfloat16", say)
    encoder = load_umt5(model.text[0], device, computed, fp8=model.fp8_t5)
    return TextEncoders({"umT5": encoder}).loaded(named)


def text_encoders(
    model: Model, device: torch.device, dtype: torch.dtype, stored: torch.dtype = torch.float32
) -> TextEncoders:
    """Load a model's text encoders, which return dtype `stored`; raises ModelError."""
    if model.architecture is None:
        found = [load_text_encoder(each, device, dtype, stored) for each in model.text]
    else:
        found = [_load(model, index, device, dtype, stored) for index in range(len(model.text))]
    named = {encoder_name(index): each for index, each in enumerate(found)}
    return TextEncoders(named, model.max_token_length)


def _load(
    model: Model, index: int, device: torch.device, dtype: torch.dtype, stored: torch.dtype
) -> TextEncoder:
    place, spec = model.text[index], model.spec
    if spec.text_encoders[index] == "T5":
        # sd-scripts pads T5's captions and shows it the padding, unless told otherwise.
        pads = layout_of(model.layout_name).pads_t5
        return TextEncoder(
            *_parts(place, device, dtype, "T5"),
            max_length=place.max_length or T5_LENGTH,
            padding="max_length" if pads else None,
            masked=model.apply_t5_attn_mask or not pads,
            tells_mask=True,
            stored=stored,
        )
    kept, length = spec.clips[index], model.max_token_length
    if spec.picks_layer:
        kept = kept._replace(layer=model.clip_skip)
    kind: Kind = "CLIP with its projection" if kept.projects else "CLIP"
    network, tokens, projection = _parts(place, device, dtype, kind, released_clip(model, index))
    config: Any = network.config
    layers = getattr(config, "text_config", config).num_hidden_layers
    if (kept.layer or 1) > layers:
        hint = "lower `clip_skip`" if model.clip_skip else f"name {model.architecture}'s own CLIP"
        fault = f"has {layers} layers, but layer {kept.layer} from the last is kept"
        raise ModelError(fault, where=place.path or place.hub or "", hint=hint)
    return TextEncoder(
        network,
        tokens,
        projection,
        max_length=None if length == "auto" else length + tokens.special,
        padding="chunks",
        kept=kept,
        masked=model.apply_lg_attn_mask,
        tells_mask=True,
        stored=stored,
    )


def load_text_encoder(
    weights: TextWeights,
    device: torch.device,
    dtype: torch.dtype,
    stored: torch.dtype = torch.float32,
) -> TextEncoder:
    """Load a text encoder of any kind and its tokenizer for inference; raises ModelError."""
    loaded = _parts(weights, device, dtype)
    config: Any = loaded[0].config
    if not str(config.model_type).startswith("clip"):
        return TextEncoder(*loaded, max_length=weights.max_length or T5_LENGTH, stored=stored)
    positions = int(getattr(config, "text_config", config).max_position_embeddings)
    return TextEncoder(
        *loaded,
        max_length=min(weights.max_length or positions, positions),
        padding="max_length",
        kept=ClipOutput(layer=None, normalised=True, pooled="own"),
        masked=False,
        stored=stored,
    )


# In files of complete models; the last is ComfyUI's copy of the tokenizer.
_FOREIGN = r"decoder\.|lm_head\.|spiece_model"
_SCALES = (".scale_weight", ".weight_scale", "scaled_fp8")


class _EightBitLinear(torch.nn.Module):
    """Linear layer without bias, with unscaled weights in float8_e4m3fn.

    They are kept as plain bytes, untouched by conversions of the network to another dtype.
    """

    weight = None  # transformers would cast activations to the dtype of a `weight`

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        packed = weight.float().to(torch.float8_e4m3fn).view(torch.uint8)
        self.register_buffer("packed", packed)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        packed: torch.Tensor = self.get_buffer("packed")
        weight = packed.view(torch.float8_e4m3fn).to(values.dtype)
        return torch.nn.functional.linear(values, weight)


def load_umt5(
    weights: TextWeights, device: torch.device, dtype: torch.dtype, *, fp8: bool = False
) -> TextEncoder:
    """Load umT5 and its tokenizer; `fp8` keeps linear layers in 8 bits; raises ModelError.

    Wan pads to 512 tokens, masks the padding and strips it again. Masked tokens change only the
    order of sums, so here captions are padded to the longest of the batch.
    """
    network = load_network(
        weights,
        UMT5EncoderModel,
        "umT5",
        models=("umt5",),
        hint="set `text` to models_t5_umt5-xxl-enc-bf16.pth or its .safetensors, or to the "
        "`text_encoder` folder of a Wan pipeline",
        converted=_converted,
        inferred=_inferred,
        foreign=_FOREIGN,
    )
    if fp8:
        for module in list(network.modules()):
            for name, child in module.named_children():
                if isinstance(child, torch.nn.Linear):
                    setattr(module, name, _EightBitLinear(child.weight))
    return TextEncoder(
        place(network, device, dtype),
        TokenCache(load(weights), clean_caption),
        projection=None,
        max_length=min(weights.max_length or T5_LENGTH, T5_LENGTH),
        stored=torch.bfloat16,
    )


def _converted(state: State) -> State:
    """Name weights as transformers does, and drop a decoder's."""
    if any(name.endswith(_SCALES) for name in state):
        what = "it is in 8 bits with scales, which cannot be read; `fp8_t5` brings 16 bits to 8"
        raise ValueError(what)
    if any("blocks.0.ffn.gate." in name for name in state):
        state = renamed(state, UMT5)
    state = {name: value for name, value in state.items() if not re.match(_FOREIGN, name)}
    embedding = ("shared.weight", "encoder.embed_tokens.weight")  # one tensor of two names
    found = next((state[name] for name in embedding if name in state), None)
    return state if found is None else dict.fromkeys(embedding, found) | state


def _inferred(state: State) -> dict[str, Any]:
    first = "encoder.block.0.layer"
    buckets, heads = state[f"{first}.0.SelfAttention.relative_attention_bias.weight"].shape
    vocabulary, width = state["shared.weight"].shape
    blocks = [re.match(r"encoder\.block\.(\d+)\.", name) for name in state]
    return {
        "vocab_size": vocabulary,
        "d_model": width,
        "d_kv": state[f"{first}.0.SelfAttention.q.weight"].shape[0] // heads,
        "d_ff": state[f"{first}.1.DenseReluDense.wi_0.weight"].shape[0],
        "num_layers": 1 + max(int(match[1]) for match in blocks if match),
        "num_heads": heads,
        "relative_attention_num_buckets": buckets,
        "feed_forward_proj": "gated-gelu",  # the approximation by tanh
    }
