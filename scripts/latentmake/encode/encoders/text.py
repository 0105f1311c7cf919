"""Text encoders of a model: networks, tokenizers, and the encoding of captions to hidden states.

Captions that are encoded together are padded:

- CLIP of an architecture: to chunks of 77 tokens. There is usually no mask, because the UNet
  attends to the padding, too.
- T5 and umT5 with a mask: to the longest caption of a batch. The mask hides the padding from the
  tokens, and the cache does not contain it (musubi-tuner cuts it off, too:
  `T5EncoderModel.__call__` of wan/modules/t5.py).
- T5 of sd-scripts' layout: to 512 tokens, with or without a mask. The cache contains the padding.

Hidden padding adds zeros to sums. This changes the order of summation, and so the last bits.

Source: sd-scripts' library/strategy_sd.py, strategy_sdxl.py, strategy_sd3.py and strategy_flux.py.

Weights of umT5: a transformers folder, or the single file of the original release
(models_t5_umt5-xxl-enc-bf16.pth, or .safetensors with the same names) with a tokenizer's folder.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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

from latentmake.base.errors import ModelError
from latentmake.config.makers import ClipOutput
from latentmake.config.models import Model
from latentmake.config.weights import TextWeights
from latentmake.encode.encoders.device import DTYPES, compute_dtype, download, upload
from latentmake.encode.encoders.local_state import (
    UMT5,
    State,
    complete,
    fill,
    load_network,
    place,
    refusing,
    renamed,
    text_projection,
    text_state,
    without_weights,
)
from latentmake.encode.reading import Encoded, Loaded, Named, Sample, results
from latentmake.encode.tokenizers import CHUNK, Row, TokenCache, chunked, clean_caption, load
from latentmake.layouts.layout import layout_of, released_clip
from latentmake.layouts.names import encoder_name, text_metadata
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

    If `kind` is None, an encoder of any kind is loaded. For `released` see `clip` of
    `tokenizers.load`.
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
    network = next((_CLASSES[name] for name in names if name in _CLASSES), None)
    is_clip = network in (CLIPTextModel, CLIPTextModelWithProjection)
    if network is None or (kind is not None and is_clip != kind.startswith("CLIP")):
        raise ValueError(f"its model_type is {names[-1]}")
    return CLIPTextModelWithProjection if kind == "CLIP with its projection" else network


def _loaded(weights: TextWeights, dtype: torch.dtype, kind: Kind | None) -> PreTrainedModel:
    model: PreTrainedModel
    if weights.hub is not None:
        place: dict[str, Any] = {"revision": weights.revision, "subfolder": weights.subfolder or ""}
        config = AutoConfig.from_pretrained(weights.hub, **place).to_dict()
        model = complete(_class_of(config, kind), weights.hub, dtype=dtype, **place)
        return model
    weights_files(weights)  # raises an error that names missing files
    local_config = network_config(weights)
    if local_config is None:
        what = "a single file does not say what network it holds"
        hint = "name the folder of its config.json as `config`"
        raise ModelError(what, where=weights.path or "", hint=hint)
    model = without_weights(_class_of(local_config, kind), local_config)
    state = text_state(weights, model)
    own: State = {}
    for name in model.state_dict():
        # Some files have CLIP's names with this prefix, others without. The exact name wins.
        for other in (name.removeprefix(_PREFIX), f"{_PREFIX}{name}", name):
            if other in state:
                own[name] = state[other]
    fill(model, own)
    return model


Tensors = dict[str, torch.Tensor]
Results = Callable[[], list[Tensors]]
"""Function that waits for the device and returns each caption's tensors by name, on the CPU."""


_NAMED = 3  # most items that a line about cut captions names


@dataclass(frozen=True)
class TextEncoder:
    """A CLIP, T5 or umT5 with its tokenizer. Any number of threads may encode.

    Attributes:
        network: network of transformers.
        tokens: cache of captions' tokens.
        projection: projection of the hidden states, or None.
        max_length: largest number of tokens of a caption, BOS and EOS included; None: no limit.
        padding: target of the padding: `chunks` of 77 tokens, `max_length` tokens, or the longest
            caption of a batch (None). Padding to the longest is removed from the results.
        kept: tensors of a CLIP's output that are kept; None for a T5, whose last hidden states are
            kept.
        masked: whether padding is hidden from the network, which needs captions of one chunk. CLIP
            was trained without a mask, and Stable Diffusion uses none.
        tells_mask: whether embeddings come with their `attention_mask`.
        stored: dtype of the embeddings.
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
        """Return a caption's tokens for the network, with the padding that is kept."""
        if self.padding == "chunks":
            return chunked(caption, self.tokens, chunks)
        # An empty caption of a tokenizer without EOS gets one padding token, which is not hidden.
        ids = self.tokens.ids(caption, self.max_length) or [self.tokens.padding]
        rest = (self.max_length or 0) - len(ids) if self.padding else 0
        ids, mask = ids + [self.tokens.padding] * rest, [1] * len(ids) + [0] * rest
        return mask, [ids]

    def encode(self, captions: Sequence[str]) -> list[Tensors]:
        """Encode captions, each in one chunk; see `queue`."""
        return self.queue([self.row(caption) for caption in captions])()

    @torch.inference_mode()
    def queue(self, rows: Sequence[Row]) -> Results:
        """Begin to encode the tokens of captions, all chunks as one batch.

        Raises ModelError if the tokenizer is not the network's.

        Returns:
            A function that waits for the device and returns for each caption:

            - `hidden_state` [T, D]. T is 75n + 2 for n chunks: BOS of the first chunk, the tokens
              of all chunks, and the last token of the last chunk.
            - for a CLIP whose vector is kept, `pooled` [D'], the vector of the first chunk.
            - with `tells_mask`, `attention_mask` [T], int64: 1 for tokens, 0 for padding.
        """
        device, parts = self.network.device, [len(chunks) for _, chunks in rows]
        masks = [torch.tensor(mask) for mask, _ in rows]
        every_chunk = [torch.tensor(chunk) for _, chunks in rows for chunk in chunks]
        self._refuse_unknown(every_chunk)
        padding = self.tokens.padding
        ids = upload(pad_sequence(every_chunk, batch_first=True, padding_value=padding), device)
        network: Any = self.network
        if self.kept is not None:
            # The inner network, without its projection: `_made` applies the projection itself.
            network = getattr(network, "text_model", network)
        mask: torch.Tensor | None = None
        if self.masked:
            mask = pad_sequence(masks, batch_first=True)
            mask = upload(mask, device) if self.kept else hiding(mask, self.network)
        output = network(
            input_ids=ids,
            attention_mask=mask,
            output_hidden_states=self.kept is not None and self.kept.layer is not None,
        )
        firsts = list(accumulate(parts[:-1], initial=0))  # index of each caption's first chunk
        made = self._made(network, output, ids, firsts)
        copied = download([tensor.to(self.stored) for tensor in made])

        def wait() -> list[Tensors]:
            hidden, *pooled = copied()
            embeddings: list[Tensors] = []
            for index, states in enumerate(hidden.split_with_sizes(parts)):
                embedding = {"hidden_state": _joined(states)[: len(masks[index])]}
                if pooled:
                    embedding["pooled"] = pooled[0][index]
                if self.tells_mask:
                    embedding["attention_mask"] = masks[index]
                embeddings.append(embedding)
            return embeddings

        return wait

    def _refuse_unknown(self, chunks: Sequence[torch.Tensor]) -> None:
        """Raise ModelError for a token that the network does not have.

        On a GPU such a token ends the process's use of the device, without a word about its cause.
        """
        embeddings: Any = self.network.get_input_embeddings()
        number, highest = len(embeddings.weight), max(int(chunk.max()) for chunk in chunks)
        if highest >= number:
            what = f"has {number} tokens, and its tokenizer gave the number {highest}"
            hint = "name the text encoder's own tokenizer"
            raise ModelError(what, where=self.network.name_or_path or "text", hint=hint)

    def _made(
        self, network: Any, output: Any, ids: torch.Tensor, firsts: Sequence[int]
    ) -> Iterator[torch.Tensor]:
        """Yield the hidden states of all chunks, [chunks, T, D], then the vectors, [captions, D'].

        A caption's vector comes from its first chunk. There are none if they are not kept.
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
            # Not the network's own vector: some configurations make it take the highest id as EOS.
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

    The result is None if there is no padding, and else a mask of four dimensions. transformers
    would check a mask [N, T] for padding on the device, and so wait until earlier work is done
    (`_ignore_bidirectional_mask_sdpa` of masking_utils). It uses a mask of four dimensions as it
    is.
    """
    if bool(mask.all()):
        return None
    if network.config._attn_implementation != "sdpa":
        return upload(mask, network.device)
    return upload(mask.bool()[:, None, None], network.device)


class TextEncoders:
    """A model's text encoders.

    Args:
        encoders: name in cache files and messages -> encoder.
        max_token_length: number of tokens for CLIPs that get captions in chunks, whose hidden
            states must have one length; auto: as many chunks as the longest row of tokens needs.
    """

    def __init__(
        self, encoders: dict[str, TextEncoder], max_token_length: int | Literal["auto"] = CHUNK
    ) -> None:
        self._encoders, self._length = encoders, max_token_length
        self._cut: dict[tuple[str, int], dict[str, str]] = {}

    def encode(self, captions: Sequence[str]) -> list[Tensors]:
        """Encode captions.

        Returns:
            Tensors of each caption, on the CPU: `text_encoder.hidden_state` [T, D] and, if the
            encoder returns them, `text_encoder.pooled` [D] and `text_encoder.attention_mask` [T],
            int64. Names of further encoders begin with `text_encoder_2`, `text_encoder_3`.
        """
        return self.queue(captions)()

    def queue(self, captions: Sequence[str]) -> Results:
        """Begin to encode captions, and return a function that waits for the device."""
        rows = zip(*map(self._rows, captions), strict=True)
        begun = {
            name: encoder.queue(own)
            for (name, encoder), own in zip(self._encoders.items(), rows, strict=True)
        }

        def wait() -> list[Tensors]:
            embeddings: list[Tensors] = [{} for _ in captions]
            for name, wait_for in begun.items():
                for tensors, own in zip(embeddings, wait_for(), strict=True):
                    tensors |= {f"{name}.{key}": value for key, value in own.items()}
            return embeddings

        return wait

    def _rows(self, caption: str) -> list[Row]:
        """Return a caption's tokens for each encoder; all CLIPs get the same number of chunks."""
        encoders = self._encoders.values()
        clips = (encoder.tokens for encoder in encoders if encoder.padding == "chunks")
        longest = max((clip.count(caption) for clip in clips), default=0)
        length = self._length if isinstance(self._length, int) else longest
        chunks = max(1, math.ceil(length / CHUNK))
        return [encoder.row(caption, chunks) for encoder in encoders]

    def lengths(self, caption: str) -> tuple[int, ...]:
        """Return the number of a caption's tokens in each encoder, padding included."""
        return tuple(sum(map(len, chunks)) for _, chunks in self._rows(caption))

    def cutting(self, caption: str) -> Iterator[tuple[str, int]]:
        """Yield the encoders that cut a caption, each with the number of tokens that it keeps."""
        for name, encoder in self._encoders.items():
            if encoder.max_length is not None:
                limit = encoder.max_length - encoder.tokens.special
                if encoder.tokens.count(caption) > limit:
                    yield name, limit

    def loaded(self, named: Callable[[str, Tensors], Named]) -> Loaded:
        """Return these encoders for a job.

        `named` gets a caption and its tensors, and returns the tensors and metadata of its file.
        """

        def encode(samples: list[Sample]) -> Encoded:
            captions = [str(sample.content) for sample in samples]
            begun = self.queue(captions)
            for sample, caption in zip(samples, captions, strict=True):
                for cut in self.cutting(caption):
                    self._cut.setdefault(cut, {})[sample.key] = sample.item.name
            return results(captions, lambda: [begun()], named)

        return Loaded(encode, remarks=self._remarks, lengths=self.lengths)

    def _remarks(self) -> list[str]:
        """Return a line for each encoder that has cut captions since the last call."""
        lines = []
        cut, self._cut = self._cut, {}
        for (encoder, limit), names in cut.items():
            many = "1 caption is" if len(names) == 1 else f"{len(names)} captions are"
            first = ", ".join(sorted(names.values())[:_NAMED])
            more = " ..." if len(names) > _NAMED else ""
            lines.append(f"{many} cut to the first {limit} tokens by {encoder}: {first}{more}")
        return lines


# -- loading --------------------------------------------------------------------------------------


def text(order: Order, device: torch.device, say: Callable[[str], None]) -> Loaded:
    """Load the text encoders of an order."""
    model = order.model_settings
    dtype = compute_dtype(device, model.caption_dtype, say)
    encoders = text_encoders(model, device, dtype, stored=DTYPES[model.caption_dtype])
    return encoders.loaded(lambda caption, tensors: (tensors, {"caption": caption}))


def umt5(order: Order, device: torch.device, say: Callable[[str], None]) -> Loaded:
    """Load Wan's text encoder for an order."""
    model, name = order.model_settings, "varlen_t5_bfloat16"
    computed = compute_dtype(device, "bfloat16", say)
    encoder = load_umt5(model.text[0], device, computed, fp8=model.fp8_t5)
    return TextEncoders({"umT5": encoder}).loaded(
        lambda caption, tensors: ({name: tensors["umT5.hidden_state"]}, text_metadata(caption))
    )


def text_encoders(
    model: Model, device: torch.device, dtype: torch.dtype, stored: torch.dtype = torch.float32
) -> TextEncoders:
    """Load a model's text encoders, which return dtype `stored`; raises ModelError."""
    if model.architecture is None:
        encoders = [load_text_encoder(weights, device, dtype, stored) for weights in model.text]
    else:
        encoders = [_load(model, index, device, dtype, stored) for index in range(len(model.text))]
    named = {encoder_name(index): encoder for index, encoder in enumerate(encoders)}
    return TextEncoders(named, model.max_token_length)


def _load(
    model: Model, index: int, device: torch.device, dtype: torch.dtype, stored: torch.dtype
) -> TextEncoder:
    place, spec = model.text[index], model.spec
    if spec.text_encoders[index] == "T5":
        # By default, sd-scripts pads T5's captions and does not mask the padding.
        pads = layout_of(model.layout_name).like_sdscripts
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


# Other parts of complete models. The last one is ComfyUI's copy of the tokenizer.
_FOREIGN = r"decoder\.|lm_head\.|spiece_model"
_SCALES = (".scale_weight", ".weight_scale", "scaled_fp8")


class _EightBitLinear(torch.nn.Module):
    """Linear layer without bias, with unscaled weights in float8_e4m3fn.

    The weights are stored as plain bytes, so converting the network's dtype does not change them.
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
    """Load umT5 and its tokenizer; `fp8` stores linear layers in 8 bits; raises ModelError.

    Wan pads to 512 tokens, masks the padding and removes it from the result. Masked tokens change
    only the order of summation, so here captions are padded to the longest of the batch.
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
    """Give weights the names of transformers, and drop the weights of a decoder."""
    if any(name.endswith(_SCALES) for name in state):
        what = "it is in 8 bits with scales, which cannot be read; `fp8_t5` brings 16 bits to 8"
        raise ValueError(what)
    if any("blocks.0.ffn.gate." in name for name in state):
        state = renamed(state, UMT5)
    state = {name: value for name, value in state.items() if not re.match(_FOREIGN, name)}
    names = ("shared.weight", "encoder.embed_tokens.weight")  # two names of one tensor
    embedding = next((state[name] for name in names if name in state), None)
    return state if embedding is None else dict.fromkeys(names, embedding) | state


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
        "feed_forward_proj": "gated-gelu",  # GELU approximated by tanh
    }
