"""Captioners of random weights in their real classes, as folders on this disk."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from latentmake.config.captioners import Captioner
from latentmake.data.item import Item
from latentmake.encode.reading import Sample
from tokenizers import Tokenizer, models, pre_tokenizers, processors

SPECIAL = ("<pad>", "<unk>", "<s>", "</s>")
WORDS = """a cat dog sits on the mat and looks at big small red blue house what does image photo
describe in one word picture or two sentences of : ? . user assistant"""
TAGS = ("general", "1girl", "long_hair", ">_<", "sks_(game)", "sensitive")
CATEGORIES = (9, 0, 0, 0, 4, 9)


def settings(folder: Path, **keys: Any) -> Captioner:
    own = {} if folder.name == "tagger" else {"max_new_tokens": 6}
    return Captioner.model_validate({"model": str(folder), **own, **keys})


def picture(seed: int, height: int = 30, width: int = 44, *frames: int) -> Any:
    """Random pixels, or those of a clip."""
    dice = np.random.default_rng(seed)
    return dice.integers(0, 256, (*frames, height, width, 3), dtype=np.uint8)


def sample(pixels: Any, seed: int = 0) -> Sample:
    source = f"{seed:064x}"
    return Sample(source, source, Item("a", "a"), pixels, (0, 0))


def tokenizer(*, ends: bool = False, **named: str) -> Any:
    """A tokenizer of words, and of the special tokens of a model with their names.

    With `ends`, a text begins with `<s>` and ends with `</s>`, as those of BLIP's do.
    """
    from transformers import PreTrainedTokenizerFast

    tokens = dict.fromkeys([*SPECIAL, *named.values(), *WORDS.split()])
    vocabulary = {word: number for number, word in enumerate(tokens)}
    own = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    if ends:
        numbers = [(token, vocabulary[token]) for token in ("<s>", "</s>")]
        own.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=numbers
        )
    names = ("pad_token", "unk_token", "bos_token", "eos_token")
    return PreTrainedTokenizerFast(
        tokenizer_object=own,
        extra_special_tokens=named,
        **dict(zip(names, SPECIAL, strict=True)),
    )


def ids(words: Any) -> dict[str, int]:
    return {
        "bos_token_id": words.bos_token_id,
        "eos_token_id": words.eos_token_id,
        "pad_token_id": words.pad_token_id,
    }


def enlarge(model: Any) -> None:
    """Give a model random weights so large that its answers depend on the picture."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter)


def save(folder: Path, model: Any, processor: Any) -> Path:
    """Save a model with other random weights, and its processor."""
    enlarge(model)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


SMALL = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def florence(folder: Path) -> Path:
    from transformers import (
        BartConfig,
        CLIPImageProcessor,
        Florence2Config,
        Florence2ForConditionalGeneration,
        Florence2Processor,
    )

    words = tokenizer(image_token="<image>")
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    text = BartConfig(
        vocab_size=len(words),
        d_model=16,
        max_position_embeddings=64,
        decoder_start_token_id=words.eos_token_id,
        forced_eos_token_id=words.eos_token_id,
        **ids(words),
        **sizes,
        **heads,
    )
    vision = {
        "embed_dim": (8, 16),
        "depths": (1, 1),
        "num_heads": (1, 2),
        "num_groups": (1, 2),
        "patch_size": (7, 3),
        "patch_stride": (4, 2),
        "patch_padding": (3, 1),
        "patch_prenorm": (False, True),
        "window_size": 4,
        "projection_dim": 16,
        "drop_path_rate": 0.0,
    }
    config = Florence2Config(
        text_config=text.to_dict(),
        vision_config=vision,
        image_token_id=words.image_token_id,
        **ids(words),
    )
    size = {"height": 32, "width": 32}
    images = CLIPImageProcessor(size=size, do_center_crop=False)
    images.image_seq_length = 17  # 4 x 4 patches, and their mean
    parsing = {"pure_text": {}, "description_with_bboxes": {}}
    model = Florence2ForConditionalGeneration(config)
    return save(folder, model, Florence2Processor(images, words, post_processor_config=parsing))


def blip(folder: Path) -> Path:
    from transformers import (
        BlipConfig,
        BlipForConditionalGeneration,
        BlipImageProcessor,
        BlipProcessor,
    )

    words = tokenizer(ends=True)
    text = {"vocab_size": len(words), "encoder_hidden_size": 16, "max_position_embeddings": 32}
    config = BlipConfig(
        text_config=SMALL | text | ids(words) | {"sep_token_id": words.eos_token_id},
        vision_config=SMALL | {"image_size": 32, "patch_size": 8},
    )
    images = BlipImageProcessor(size={"height": 32, "width": 32})
    return save(folder, BlipForConditionalGeneration(config), BlipProcessor(images, words))


def blip2(folder: Path) -> Path:
    from transformers import (
        Blip2Config,
        Blip2ForConditionalGeneration,
        Blip2Processor,
        BlipImageProcessor,
    )

    words = tokenizer()
    images = BlipImageProcessor(size={"height": 32, "width": 32})
    processor = Blip2Processor(images, words, num_query_tokens=4)  # it adds a token
    text = {"model_type": "opt", "word_embed_proj_dim": 16, "ffn_dim": 16}
    text |= {"vocab_size": len(words), "max_position_embeddings": 128}
    config = Blip2Config(
        vision_config=SMALL | {"image_size": 32, "patch_size": 8},
        qformer_config=SMALL | {"encoder_hidden_size": 16, "vocab_size": len(words)},
        text_config=SMALL | text | ids(words),
        num_query_tokens=4,
        image_token_index=words.convert_tokens_to_ids("<image>"),
    )
    return save(folder, Blip2ForConditionalGeneration(config), processor)


LLAVA_TEMPLATE = (
    "{% for message in messages %}USER: {% for part in message['content'] %}{% if part['type'] == "
    "'image' %}<image> {% else %}{{ part['text'] }}{% endif %}{% endfor %} {% endfor %}ASSISTANT:"
)


def llava(folder: Path) -> Path:
    from transformers import (
        CLIPImageProcessor,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )

    words = tokenizer(image_token="<image>")
    text = {"vocab_size": len(words), "max_position_embeddings": 256}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            **SMALL | {"num_hidden_layers": 2}, image_size=32, patch_size=8
        ),
        text_config=LlamaConfig(**SMALL | text | ids(words)),
        image_token_id=words.image_token_id,
    )
    model = LlavaForConditionalGeneration(config)
    model.generation_config.update(**ids(words))
    processor = LlavaProcessor(
        CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}),
        words,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=LLAVA_TEMPLATE,
    )
    return save(folder, model, processor)


QWEN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }} {% if message['content'] is "
    "string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if "
    "part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}"
    "{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


def qwen(folder: Path) -> Path:
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )

    names = ("im_start", "im_end", "vision_start", "vision_end", "image_pad", "video_pad")
    own = {name.replace("pad", "token"): f"<|{name}|>" for name in names}
    words = tokenizer(**own)
    text = {
        "vocab_size": len(words),
        "num_hidden_layers": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [1, 1, 2],
        },
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 16,
        "fullatt_block_indexes": [0],
        "window_size": 56,
    }
    config = Qwen2_5_VLConfig(
        text_config=SMALL | text | ids(words),
        vision_config=vision,
        image_token_id=words.image_token_id,
        video_token_id=words.video_token_id,
        vision_start_token_id=words.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=words.convert_tokens_to_ids("<|vision_end|>"),
    )
    pixels = {"min_pixels": 28 * 28, "max_pixels": 56 * 56}
    processor = Qwen2_5_VLProcessor(
        Qwen2VLImageProcessor(**pixels),
        words,
        Qwen2VLVideoProcessor(**pixels),
        chat_template=QWEN_TEMPLATE,
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config.update(**ids(words))
    return save(folder, model, processor)


def smolvlm(folder: Path) -> Path:
    from transformers import (
        SmolVLMConfig,
        SmolVLMForConditionalGeneration,
        SmolVLMImageProcessor,
        SmolVLMProcessor,
        SmolVLMVideoProcessor,
    )
    from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE

    own = {
        "image_token": "<image>",
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
        "end_of_utterance_token": "<end_of_utterance>",
        "video_token": "<video>",
    }
    words = tokenizer(im_start="<|im_start|>", **own)
    text = {
        "model_type": "llama",
        "vocab_size": len(words),
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
    }
    vision = SMALL | {"image_size": 32, "patch_size": 8}
    config = SmolVLMConfig(
        text_config=SMALL | text | ids(words),
        vision_config=vision,
        image_token_id=words.image_token_id,
        scale_factor=2,
        pad_token_id=words.pad_token_id,
    )
    size = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 32}}
    processor = SmolVLMProcessor(
        SmolVLMImageProcessor(**size),
        words,
        SmolVLMVideoProcessor(**size),
        image_seq_len=4,
        chat_template=DEFAULT_CHAT_TEMPLATE,
    )
    model = SmolVLMForConditionalGeneration(config)
    model.generation_config.update(**ids(words))
    return save(folder, model, processor)


def tagger(folder: Path) -> Path:
    import timm
    from safetensors.torch import save_file

    arguments = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
    torch.manual_seed(2)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=len(TAGS), **arguments)
    enlarge(model)
    folder.mkdir(parents=True)
    save_file(model.state_dict(), folder / "model.safetensors")
    pretrained = {
        "input_size": [3, 32, 32],
        "mean": [0.5, 0.5, 0.5],
        "std": [0.5, 0.5, 0.5],
        "interpolation": "bicubic",
        "num_classes": len(TAGS),
    }
    config = {
        "architecture": "vit_tiny_patch16_224",
        "num_classes": len(TAGS),
        "model_args": arguments,
        "pretrained_cfg": pretrained,
    }
    (folder / "config.json").write_text(json.dumps(config))
    pairs = enumerate(zip(TAGS, CATEGORIES, strict=True))
    rows = [f"{number},{tag},{category},1" for number, (tag, category) in pairs]
    (folder / "selected_tags.csv").write_text("\n".join(["tag_id,name,category,count", *rows]))
    return folder


def lacking() -> set[str]:
    """Return the kinds whose processors or models need packages that are not there."""
    has = {name: importlib.util.find_spec(name) is not None for name in ("timm", "torchvision")}
    lacks = set() if has["torchvision"] else {"qwen", "smolvlm"}
    return lacks if has["timm"] else lacks | {"tagger"}


MAKERS = {
    "florence": florence,
    "blip": blip,
    "blip2": blip2,
    "qwen": qwen,
    "smolvlm": smolvlm,
    "llava": llava,
    "tagger": tagger,
}
