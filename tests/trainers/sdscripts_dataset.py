"""Reads a dataset as one of sd-scripts' training scripts does, and every batch of it.

    python sdscripts_dataset.py SCRIPT ARGUMENTS.json [make]

The script's own parser, trainer and strategies are used. No network is loaded: what is not cached
is an error. With `make` the trainer loads its encoders and caches as it does before a training.
"""

import importlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path[0] = os.getcwd()
script = importlib.import_module(sys.argv[1])
from library import config_util, strategy_base, train_util  # noqa: E402

args = script.setup_parser().parse_args(json.loads(Path(sys.argv[2]).read_bytes()))
train_util.verify_command_line_training_args(args)
(kind,) = (
    each
    for each in vars(script).values()
    if isinstance(each, type) and each.__module__ == script.__name__
)
trainer = kind()
strategy_base.LatentsCachingStrategy.set_strategy(trainer.get_latents_caching_strategy(args))
user = config_util.load_user_config(args.dataset_config)
sanitizer = config_util.ConfigSanitizer(True, True, args.masked_loss, True)
blueprint = config_util.BlueprintGenerator(sanitizer).generate(user, args)
group, _ = config_util.generate_dataset_group_by_blueprint(blueprint.dataset_group)
trainer.assert_extra_args(args, group, None)
latents = strategy_base.LatentsCachingStrategy.get_strategy()
text = trainer.get_text_encoder_outputs_caching_strategy(args)
strategy_base.TextEncoderOutputsCachingStrategy.set_strategy(text)
if sys.argv[3:] == ["make"]:
    import accelerate
    import torch

    class Network(torch.nn.Linear):
        """In place of the network that is trained, of gigabytes."""

        device = torch.device("cpu")

    for module in vars(script).values():
        if hasattr(module, "load_lumina_model"):
            module.load_lumina_model = lambda *_, **__: Network(1, 1)
    strategy_base.TokenizeStrategy.set_strategy(trainer.get_tokenize_strategy(args))
    accelerator = accelerate.Accelerator(mixed_precision=args.mixed_precision, cpu=True)
    weight_dtype, _ = train_util.prepare_dtype(args)
    _, encoders, vae, unet = trainer.load_target_model(args, weight_dtype, accelerator)
    vae.to(accelerator.device, dtype=weight_dtype if trainer.cast_vae(args) else vae.dtype)
    vae.requires_grad_(False)
    vae.eval()
    group.new_cache_latents(vae, accelerator)
    strategy_base.TextEncodingStrategy.set_strategy(trainer.get_text_encoding_strategy(args))
    trainer.cache_text_encoder_outputs_if_needed(
        args, accelerator, unet, vae, encoders, group, weight_dtype
    )
else:
    nobody = SimpleNamespace(num_processes=1, process_index=0, wait_for_everyone=lambda: None)
    group.new_cache_latents(None, nobody)
    group.new_cache_text_encoder_outputs(None, nobody)
group.set_current_strategies()
accepted = sum(
    latents.is_disk_cached_latents_expected(
        info.bucket_reso, info.latents_npz, subset.flip_aug, subset.alpha_mask
    )
    and text.is_disk_cached_outputs_expected(info.text_encoder_outputs_npz)
    for dataset in group.datasets
    for info in dataset.image_data.values()
    for subset in [dataset.image_to_subset[info.image_key]]
)
batches = [dataset[number] for dataset in group.datasets for number in range(len(dataset))]
print(
    json.dumps(
        {
            "accepted": accepted,
            "captions": sorted(each for batch in batches for each in batch["captions"]),
            "latents": [list(batch["latents"].shape) for batch in batches],
            "text": [len(batch["text_encoder_outputs_list"]) for batch in batches],
        }
    )
)
