"""Networks that are trained, of one or two layers, for embeddings 32 wide."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tiny import hub, tiny_qwen_image

_AXES = (4, 6, 6)  # of the positions: together the width of a head
_Z_IMAGE = {"DIM": 32, "N_LAYERS": 1, "N_REFINER_LAYERS": 1, "N_HEADS": 2, "N_KV_HEADS": 2}
_Z_IMAGE |= {"CAP_FEAT_DIM": 32}
_QWEN_IMAGE = {
    "num_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "axes_dims_rope": _AXES,
}
_FLUX = {
    "context_in_dim": 32,
    "hidden_size": 32,
    "num_heads": 2,
    "depth": 1,
    "depth_single_blocks": 1,
}

_KREA2 = {
    **{"features": 32, "tdim": 16, "txtdim": 32, "heads": 2, "kvheads": 2, "multiplier": 2},
    **{"layers": 1, "txtheads": 2, "txtkvheads": 2, "txtlayers": 2},
}
_IDEOGRAM4 = {
    **{"emb_dim": 32, "num_layers": 1, "num_heads": 2, "intermediate_size": 48},
    **{"adanln_dim": 16, "llm_features_dim": 32, "mrope_section": (4, 2, 2)},
}
_KANDINSKY5 = {
    **{"in_text_dim": 32, "in_text_dim2": 16, "time_dim": 16, "model_dim": 32, "ff_dim": 48},
    **{"num_text_blocks": 1, "num_visual_blocks": 1, "axes_dims": _AXES},
}


def _shrink_z_image() -> None:
    from musubi_tuner.zimage import zimage_config

    for name, value in _Z_IMAGE.items():
        setattr(zimage_config, f"DEFAULT_TRANSFORMER_{name}", value)
    zimage_config.ROPE_AXES_DIMS = list(_AXES)


def _shrink_qwen_image() -> None:
    from musubi_tuner.qwen_image import qwen_image_model

    made = qwen_image_model.QwenImageTransformer2DModel
    qwen_image_model.QwenImageTransformer2DModel = lambda **given: made(**{**given, **_QWEN_IMAGE})


def _shrink_qwen_image_and_encoders() -> None:
    """Of a training that draws samples."""
    tiny_qwen_image.shrink()
    _shrink_qwen_image()


def _shrink(params: Any, **further: Any) -> None:
    for name, value in (_FLUX | further).items():
        setattr(params, name, value)


def _shrink_flux_1() -> None:
    from musubi_tuner.flux import flux_models

    _shrink(flux_models.configs_flux_dev_context.params, axes_dim=list(_AXES), vec_in_dim=16)


def _shrink_flux_2() -> None:
    from musubi_tuner.flux_2 import flux2_utils

    for model in flux2_utils.FLUX2_MODEL_INFO.values():
        _shrink(model.params, axes_dim=[4, 4, 4, 4])


def _shrink_krea2() -> None:
    from musubi_tuner.krea2 import krea2_utils

    for name, value in _KREA2.items():
        object.__setattr__(krea2_utils.single_mmdit_large_wide, name, value)


def _shrink_ideogram4() -> None:
    from musubi_tuner.ideogram4 import ideogram4_model, ideogram4_utils

    small = ideogram4_model.Ideogram4Config(**_IDEOGRAM4)
    ideogram4_utils.Ideogram4Config = lambda: small


def _shrink_kandinsky5() -> None:
    from musubi_tuner.kandinsky5 import configs

    for name, value in _KANDINSKY5.items():
        setattr(configs.TASK_CONFIGS["k5-lite-t2v-5s-sd"].dit_params, name, value)


def _krea2() -> Any:
    from musubi_tuner.krea2 import krea2_mmdit, krea2_utils

    return krea2_mmdit.SingleStreamDiT(krea2_utils.single_mmdit_large_wide)


def _ideogram4() -> Any:
    from musubi_tuner.ideogram4 import ideogram4_utils

    return ideogram4_utils.Ideogram4Transformer(ideogram4_utils.Ideogram4Config())


def _kandinsky5() -> Any:
    from musubi_tuner.kandinsky5 import configs
    from musubi_tuner.kandinsky5.models import dit

    return dit.get_dit(vars(configs.TASK_CONFIGS["k5-lite-t2v-5s-sd"].dit_params))


def _z_image() -> Any:
    from musubi_tuner.zimage import zimage_model

    return zimage_model.create_model("torch", False, None)


def _qwen_image(version: str) -> Any:
    from musubi_tuner.qwen_image import qwen_image_model

    layered = version == "layered"
    return qwen_image_model.create_model(
        "torch", False, version == "edit-2511", layered, layered, None
    )


def _flux_1() -> Any:
    from musubi_tuner.flux import flux_models

    return flux_models.Flux(flux_models.configs_flux_dev_context.params, "torch", False)


def _flux_2() -> Any:
    from musubi_tuner.flux_2 import flux2_models, flux2_utils

    return flux2_models.Flux2(flux2_utils.FLUX2_MODEL_INFO["klein-4b"].params, "torch", False)


def _write(shrink: Callable[[], None], make: Callable[[], Any], folder: Path) -> None:
    shrink()
    hub.write_random(make(), folder / "dit.safetensors", model_type="ideogram4_cond")


SCRIPTS: Mapping[str, Callable[[], None]] = {
    "zimage_train_network.py": _shrink_z_image,
    "qwen_image_train_network.py": _shrink_qwen_image_and_encoders,
    "flux_kontext_train_network.py": _shrink_flux_1,
    "flux_2_train_network.py": _shrink_flux_2,
    "krea2_train_network.py": _shrink_krea2,
    "ideogram4_train_network.py": _shrink_ideogram4,
    "kandinsky5_train_network.py": _shrink_kandinsky5,
}
WEIGHTS = {
    "z_image_dit": functools.partial(_write, _shrink_z_image, _z_image),
    "flux_kontext_dit": functools.partial(_write, _shrink_flux_1, _flux_1),
    "flux_2_klein_4b_dit": functools.partial(_write, _shrink_flux_2, _flux_2),
    "krea2_dit": functools.partial(_write, _shrink_krea2, _krea2),
    "ideogram4_dit": functools.partial(_write, _shrink_ideogram4, _ideogram4),
    "kandinsky5_dit": functools.partial(_write, _shrink_kandinsky5, _kandinsky5),
    **{
        f"{name}_dit": functools.partial(
            _write, _shrink_qwen_image, functools.partial(_qwen_image, version)
        )
        for name, version in (
            ("qwen_image", "original"),
            ("qwen_image_edit", "edit-2509"),
            ("qwen_image_layered", "layered"),
        )
    },
}
