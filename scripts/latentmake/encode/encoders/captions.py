"""Vision-language models that write captions: with a chat template, or with a task.

A batch has pictures of one shape and one prompt, so its rows of tokens have one length and need no
padding. Beams are off: with `temperature: 0` the likeliest token is taken. With a temperature, each
caption is written by itself, with a generator that depends on the seed and the picture.
"""

from __future__ import annotations

import importlib.util
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from latentmake.base.errors import ModelError, first_line
from latentmake.config.captioners import Captioner
from latentmake.config.weights import Weights
from latentmake.encode.encoders.device import compute_dtype
from latentmake.encode.encoders.local_state import complete, refusing
from latentmake.encode.encoders.tagger import PACKAGES, Tagger
from latentmake.encode.reading import Encoded, Loaded, Sample
from latentmake.models.captioner_recipe import Network, network_of
from latentmake.models.files import only_variant
from latentmake.plan.orders import Order

_TASK = re.compile(r"<[A-Z_]+>")  # a task of Florence-2, such as <CAPTION>
_QUESTION = (":", "?")  # ends of a prompt that an answer follows, and not the rest of a caption


def captions(order: Order, device: torch.device, say: Callable[[str], None]) -> Loaded:
    """Load the captioner of an order, whose results have no tensors: `({}, {"caption": text})`.

    Several threads may call the encoder. One at a time uses the network, because some networks keep
    values of a batch in attributes.
    """
    settings = order.dataset_settings.captioners[order.model]
    write, lock = load_captioner(settings, device, say), threading.Lock()

    def encode(samples: list[Sample]) -> Encoded:
        with lock, torch.inference_mode():
            return [({}, {"caption": text}) for text in write(samples)]

    return Loaded(encode)


def load_captioner(
    settings: Captioner, device: torch.device, say: Callable[[str], None]
) -> Callable[[Sequence[Sample]], list[str]]:
    """Load a captioner: a function that writes the answer for each sample; raises ModelError."""
    network = network_of(settings)
    on_cpu = device.type == "cpu"
    dtype = torch.float32 if on_cpu else compute_dtype(device, settings.dtype, say)
    if network.kind == "tagger":
        tagger = Tagger(network, settings, device, dtype)
        return lambda samples: tagger.write([_middle(sample) for sample in samples])
    model = ChatModel if network.kind == "chat" else TaskModel
    return model(network, settings, device, dtype).write


class LanguageModel:
    """A vision-language model with its processor.

    Args:
        network: files of the model.
        settings: settings of the captioner.
        device: device to compute on.
        dtype: dtype to compute in.
    """

    def __init__(
        self, network: Network, settings: Captioner, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.settings, self.device, self.dtype = settings, device, dtype
        self.prompt = network.prompt(settings)
        self.model, self.processor = _load(network, settings, device, dtype)
        self.tokenizer = getattr(self.processor, "tokenizer", self.processor)

    def write(self, samples: Sequence[Sample]) -> list[str]:
        """Return the answers for samples of one shape."""
        if not self.settings.temperature:
            return self._answers(samples)
        answers = []
        for sample in samples:
            on_gpu = [self.device] if self.device.type == "cuda" else []
            with torch.random.fork_rng(on_gpu):
                torch.manual_seed((int(sample.source[:15], 16) + self.settings.seed) % 2**63)
                answers += self._answers([sample])
        return answers

    def _answers(self, samples: Sequence[Sample]) -> list[str]:
        raise NotImplementedError

    def _generated(self, inputs: Any) -> torch.Tensor:
        """Return tokens [N, T]: those of the prompt, if the model repeats them, then the answer."""
        given = inputs["input_ids"].shape[1] if "input_ids" in inputs else 1
        text = self.model.config.get_text_config(decoder=True)
        most = getattr(text, "max_position_embeddings", None) or 2**31
        options: dict[str, Any] = {"do_sample": False}
        if temperature := self.settings.temperature:
            options = {"do_sample": True, "temperature": temperature}
        tokens: torch.Tensor = self.model.generate(
            **inputs.to(self.device, self.dtype),
            max_new_tokens=max(1, min(self.settings.max_new_tokens, most - given - 1)),
            num_beams=1,
            **options,
        )
        return tokens


class ChatModel(LanguageModel):
    """A model with a chat template, such as Qwen2.5-VL, SmolVLM or LLaVA.

    The frames of a clip are several pictures of one message.
    """

    def _answers(self, samples: Sequence[Sample]) -> list[str]:
        self.tokenizer.padding_side = "left"
        most = self.settings.image_size
        pictures = [[sized(frame, most) for frame in _frames(sample)] for sample in samples]
        text = self._message(len(pictures[0]))
        inputs = self.processor(
            text=[text] * len(pictures), images=pictures, padding=True, return_tensors="pt"
        )
        tokens = self._generated(inputs)[:, inputs["input_ids"].shape[1] :]
        answers: list[str] = self.processor.batch_decode(tokens, skip_special_tokens=True)
        return [answer.strip() for answer in answers]

    def _message(self, number: int) -> str:
        """Return the text of a chat with a number of pictures and the prompt.

        Templates of some LLaVA models take a message that is text, and some of them put the picture
        into it themselves (JoyCaption's).
        """
        words = {"type": "text", "text": self.prompt}
        text = self._chat([*[{"type": "image"}] * number, words])
        if text and "'type'" not in text and text != self._chat([words]):
            return text
        token = str(getattr(self.processor, "image_token", None) or "<image>")
        for content in (self.prompt, f"{token * number}\n{self.prompt}"):
            if (text := self._chat(content)).count(token) == number:
                return text
        what, hint = "its chat template takes no picture", "name a vision-language model"
        raise ModelError(what, where=self.settings.model.local, hint=hint)

    def _chat(self, content: object) -> str:
        """Return the text of a chat with one message; "" if the template does not take it."""
        try:
            return str(
                self.processor.apply_chat_template(
                    [{"role": "user", "content": content}],
                    chat_template=self.processor.chat_template or self.tokenizer.chat_template,
                    add_generation_prompt=True,
                    tokenize=False,
                )
            )
        except Exception:  # a template raises errors of several types
            return ""


class TaskModel(LanguageModel):
    """A model without a chat template, such as Florence-2, BLIP or BLIP-2; it sees one picture."""

    def _answers(self, samples: Sequence[Sample]) -> list[str]:
        images = [sized(_middle(sample), self.settings.image_size) for sample in samples]
        text = {} if self.prompt is None else {"text": [self.prompt] * len(images)}
        inputs = self.processor(images=images, return_tensors="pt", **text)
        tokens = self._generated(inputs)
        if hasattr(self.processor, "post_process_generation") and self.prompt is not None:
            return [self._parsed(row, image) for row, image in zip(tokens, images, strict=True)]
        answers = self.processor.batch_decode(tokens, skip_special_tokens=True)
        question = self.prompt if self.prompt and self.prompt.endswith(_QUESTION) else ""
        return [answer.strip().removeprefix(question).strip() for answer in answers]

    def _parsed(self, tokens: torch.Tensor, image: Image.Image) -> str:
        """Return the answer of a task; of a task that finds objects, their names."""
        text = self.tokenizer.decode(tokens[tokens != self.tokenizer.pad_token_id])
        task = _TASK.match(str(self.prompt))
        name = task[0] if task else str(self.prompt)
        parsed = self.processor.post_process_generation(
            text=text, task=name, image_size=(image.width, image.height)
        )[name]
        if isinstance(parsed, dict):
            return ", ".join(parsed.get("labels") or parsed.get("bboxes_labels") or ())
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True)).strip()


# -- pictures -------------------------------------------------------------------------------------


def _frames(sample: Sample) -> list[NDArray[np.uint8]]:
    """Return the pictures [H, W, 3] of a sample."""
    pixels = np.asarray(sample.content)
    return list(pixels) if pixels.ndim == 4 else [pixels]


def _middle(sample: Sample) -> NDArray[np.uint8]:
    """Return the picture of a sample, or the middle frame of its clip."""
    frames = _frames(sample)
    return frames[len(frames) // 2]


def sized(pixels: NDArray[np.uint8], longest: int | None) -> Image.Image:
    """Return a picture that is scaled down so that its longest side has at most some pixels."""
    picture = Image.fromarray(pixels)
    if longest is None or max(picture.size) <= longest:
        return picture
    factor = longest / max(picture.size)
    width, height = (max(1, round(side * factor)) for side in picture.size)
    return picture.resize((width, height), Image.Resampling.LANCZOS)


# -- loading --------------------------------------------------------------------------------------


def _load(
    network: Network, settings: Captioner, device: torch.device, dtype: torch.dtype
) -> tuple[Any, Any]:
    """Load a model and its processor from their folder; raises ModelError."""
    import transformers  # takes seconds, and taggers do not need it

    trusts, folder = settings.trust_remote_code, str(network.folder)
    own: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trusts}
    options: dict[str, Any] = {"variant": only_variant(network.folder) or None, "dtype": dtype}
    if settings.quantization != "none":
        options |= {"quantization_config": _quantization(settings, dtype)}
        options |= {"device_map": {"": str(device)}}
    loader, classes = "AutoModelForImageTextToText", network.config.get("auto_map") or {}
    if trusts and loader not in classes and "AutoModelForCausalLM" in classes:
        loader = "AutoModelForCausalLM"  # code of a model may know no other
    hint = "name the complete folder of a model that transformers knows, such as "
    hint += "florence-community/Florence-2-base, or set `trust_remote_code: true` for its own code"
    transformers.utils.logging.disable_progress_bar()  # it takes a second, and hides other lines
    with refusing(Weights(path=folder), "a captioner", hint):
        model = complete(getattr(transformers, loader), folder, **options, **own)
        try:
            processor = transformers.AutoProcessor.from_pretrained(folder, **own)
        except ImportError as error:
            what = first_line(error) or "its processor needs a package that is missing"
            raise ModelError(what, where=folder, hint=PACKAGES) from None
    if settings.quantization == "none":
        model.to(device)
    return model.eval().requires_grad_(False), processor


def _quantization(settings: Captioner, dtype: torch.dtype) -> Any:
    """Return the settings of bitsandbytes; raises ModelError if it is missing."""
    from transformers import BitsAndBytesConfig

    if importlib.util.find_spec("bitsandbytes") is None:
        what = f"`quantization: {settings.quantization}` needs bitsandbytes, which is missing"
        hint = "run `pip install bitsandbytes`, or leave `quantization` out"
        raise ModelError(what, where=settings.model.local, hint=hint)
    if settings.quantization == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
    )
