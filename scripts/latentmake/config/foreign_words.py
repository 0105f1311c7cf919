"""Keys of other programs, with the key to write here in their place.

The words are those of musubi-tuner, sd-scripts, ai-training and diffusers' training scripts. An
answer is the place of a key (`datasets.NAME.path`, with a value where one belongs to it), or a
sentence; where it depends on the run's trainer there is one for each kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

__all__ = ["ANSWERS", "TRAINER", "Answer", "Kind"]

Kind = Literal["sd", "musubi", "sdscripts"]
Answer = str | Mapping[Kind, str]
TRAINER = "runs.NAME.trainer"
"""Section of a run's trainer, whatever its kind."""


def _each(sd: str, musubi: str, sdscripts: str) -> Answer:
    return {"sd": sd, "musubi": musubi, "sdscripts": sdscripts}


def _key(sd: str, musubi: str, sdscripts: str) -> Answer:
    """Return keys of the trainer, one for each kind."""
    return _each(*(f"{TRAINER}.{key}" for key in (sd, musubi, sdscripts)))


def _flag(sd: str, flag: str) -> Answer:
    """Return a key of the trainer sd, and for the others a flag among their arguments."""
    further = f"arguments: [{flag}]"
    return _key(sd, further, further)


_CACHED = "leave it out: latents and text are always cached, under cache/DATASET/MODEL/"
_RESULTS = "leave it out: results go to runs/NAME/, named by the run"
_FROZEN = "leave it out: text encoders are not trained, their output is cached"
_AUGMENTED = "leave it out: cached latents cannot be varied while training"
_STATES = f"{TRAINER}.save_every_n_epochs"
_SAMPLED = 'arguments: [--sample_prompts, FILE, --sample_every_n_epochs, "1"]'
_UNTILED = "leave it out: an image is encoded whole, and fewer at once where memory runs out"
_DEVICES = (
    "leave it out: jobs take this machine's GPUs, and `accelerate_config` of the trainer says more"
)

_ROWS: tuple[tuple[str, Answer], ...] = (
    # Datasets.
    (
        "image_directory image_dir image_folder images train_data_dir instance_data_dir data_dir "
        "data_root dataset_path folder directory video_dir",
        "datasets.NAME.path",
    ),
    (
        "video_directory",
        "write it as `path` in datasets.NAME, with the clips' lengths as `target_frames`",
    ),
    ("image_jsonl_file video_jsonl_file in_json caption_column", "datasets.NAME.metadata_file"),
    ("dataset_name", "write the folder of the images as `path` in datasets.NAME"),
    (
        "caption_ext caption_extention txt_suffix captions_extension",
        "datasets.NAME.caption_extension",
    ),
    (
        "cache_directory cache_dir latent_cache_directory cache_info skip_cache_check "
        "cache_latents cache_latents_to_disk cache_text_encoder_outputs "
        "cache_text_encoder_outputs_to_disk txtcache_suffix imgcache_suffix "
        "skip_existing keep_cache vae_batch_size text_encoder_batch_size",
        _CACHED,
    ),
    ("enable_bucket aspect_ratio_bucketing enable_bucketing bucket", "datasets.NAME.fit: bucket"),
    ("center_crop", "leave it out: `fit: crop`, the default of a dataset, cuts at the centre"),
    ("resolution width height size target_width target_height", "runs.NAME.resolutions"),
    ("repeats num_repeat dataset_repeats repeat", "datasets.NAME.num_repeats"),
    ("random_flip flip flip_augment", _each(_AUGMENTED, _AUGMENTED, "datasets.NAME.flip_aug")),
    ("color_aug random_crop face_crop_aug_range random_rotate", _AUGMENTED),
    (
        "instance_prompt class_prompt class_tokens trigger_word instance_token",
        "leave it out: the texts are the caption files; `captions: {caption_prefix: ...}` of a "
        "dataset puts words before each",
    ),
    (
        "reg_data_dir is_reg class_data_dir prior_loss_weight",
        "name those images as a dataset of their own",
    ),
    ("control_dir conditioning_data_dir control_path", "datasets.NAME.control_directory"),
    ("target_frame frames num_frames", "datasets.NAME.target_frames"),
    ("fps", "datasets.NAME.source_fps"),
    ("dropout caption_dropout", "datasets.NAME.captions.caption_dropout_rate"),
    # Models.
    (
        "t5 text_encoder text_encoders text_encoder1 text_encoder_1 clip_l t5xxl text_model",
        "models.NAME.text",
    ),
    (
        "text_encoder2 text_encoder_2 text_encoder3 clip_g",
        "models.NAME.text: [FIRST, SECOND]",
    ),
    ("ae vae_path vae_file pretrained_vae_model_name_or_path vae_model", "models.NAME.vae"),
    (
        "pretrained_model_name_or_path pretrained_model base_model model_path ckpt "
        "ckpt_path model_name",
        _each(
            "name its parts in models.NAME: `vae`, `text` and `unet`",
            "models.NAME.dit",
            "models.NAME.checkpoint",
        ),
    ),
    (
        "transformer dit_path dit_low_noise",
        _each("models.NAME.unet", "models.NAME.dit", "models.NAME.checkpoint"),
    ),
    ("dit_high", "models.NAME.dit_high_noise"),
    ("unet_path", _each("models.NAME.unet", "models.NAME.dit", "models.NAME.checkpoint")),
    ("clip_path image_encoder clip_vision", "models.NAME.clip"),
    ("tokenizer tokenizer_path tokenizer_name", "models.NAME.text: {path: ..., tokenizer: ...}"),
    (
        "revision variant hub repo repo_id",
        "write it beside the hub id: `vae: {hub: OWNER/NAME, revision: COMMIT}`",
    ),
    (
        "scaling_factor vae_scaling_factor shift_factor",
        "leave it out: it is read from the VAE's config.json",
    ),
    ("v2", "models.NAME.architecture: sd2"),
    (
        "model_type arch model_arch",
        _each("models.NAME.architecture", "models.NAME.task", "models.NAME.architecture"),
    ),
    ("force_toklen max_tokens", "models.NAME.text: {path: ..., max_length: ...}"),
    (
        "vae_tiling vae_slicing",
        _each(_UNTILED, "models.NAME.vae_cache_cpu: true", _UNTILED),
    ),
    # What is trained, and for how long.
    (
        "rank network_dim lora_rank lora_dim network_rank dim r",
        _key("rank", "network_dim", "network_dim"),
    ),
    ("alpha network_alpha lora_alpha", _key("alpha", "network_alpha", "network_alpha")),
    (
        "network_module network_type",
        _each(
            f"{TRAINER}.adapter",
            "leave it out: a LoRA is trained",
            "leave it out: `script` decides it",
        ),
    ),
    ("network_args", _flag("target_modules", "--network_args, ...")),
    ("train_text_encoder network_train_unet_only", _FROZEN),
    (
        "text_encoder_lr learning_rate_te1 learning_rate_te2",
        _each(_FROZEN, _FROZEN, f'{TRAINER}.arguments: [--text_encoder_lr, "1e-5"]'),
    ),
    ("network_weights lora_weights", _flag("resume_from_checkpoint", "--network_weights, FILE")),
    (
        "batch_size train_batch_size batchsize per_device_train_batch_size",
        _key("train_batch_size", "batch_size", "train_batch_size"),
    ),
    (
        "steps max_train_steps max_steps train_steps num_train_steps iterations",
        _each(
            f"{TRAINER}.steps",
            f"write epochs: `max_train_epochs` in {TRAINER}",
            f"{TRAINER}.max_train_steps",
        ),
    ),
    (
        "epochs epoch max_train_epochs num_train_epochs num_epochs max_epochs",
        _key("epochs", "max_train_epochs", "max_train_epochs"),
    ),
    (
        "gradient_accum gradient_accumulation grad_accum accumulation_steps "
        "gradient_accumulate_every",
        f"{TRAINER}.gradient_accumulation_steps",
    ),
    # Saving and resuming.
    (
        "save_steps save_every save_every_n_steps save_every_steps",
        _each(f"{TRAINER}.save_every_n_steps", _STATES, _STATES),
    ),
    (
        "save_every_n_epochs save_every_epochs save_on_epoch save_n_epochs",
        f"{TRAINER}.save_every_n_epochs",
    ),
    (
        "checkpointing_steps checkpoint_steps",
        _each(f"{TRAINER}.checkpointing_steps", _STATES, _STATES),
    ),
    (
        "checkpoints_total_limit save_total_limit save_last_n_epochs_state",
        _each(
            f"{TRAINER}.checkpoints_total_limit",
            "leave it out: one state is kept",
            "leave it out: one state is kept",
        ),
    ),
    (
        "save_state save_state_on_train_end",
        "leave it out: states are saved, and a killed training goes on by itself",
    ),
    (
        "resume resume_from resume_from_checkpoint",
        _each(
            f"{TRAINER}.resume_from_checkpoint",
            "leave it out: a killed training goes on by itself",
            "leave it out: a killed training goes on by itself",
        ),
    ),
    (
        "output_dir output_name output_path logging_dir save_model_as output_directory project_dir",
        _RESULTS,
    ),
    (
        "report_to log_with log_tracker_name wandb_run_name",
        "leave it out: scalars for TensorBoard are in runs/NAME/logs",
    ),
    (
        "push_to_hub hub_token hub_model_id huggingface_repo_id huggingface_token",
        "leave it out: nothing is uploaded",
    ),
    # Optimizer and loss.
    ("lr unet_lr initial_lr base_lr", f"{TRAINER}.learning_rate"),
    (
        "optimizer optimizer_type optim optimiser",
        _key("optimizer", "optimizer_type", "optimizer_type"),
    ),
    (
        "use_8bit_adam adam_8bit",
        _key("optimizer: adamw8bit", "optimizer_type: adamw8bit", "optimizer_type: AdamW8bit"),
    ),
    ("use_lion_optimizer", _key("optimizer: lion", "optimizer_type: lion", "optimizer_type: Lion")),
    (
        "optimizer_args optimizer_arguments optimizer_params",
        _flag("optimizer_arguments", "--optimizer_args, ..."),
    ),
    (
        "betas adam_beta1 adam_beta2",
        _flag(
            "optimizer_arguments: {betas: [0.9, 0.999]}", '--optimizer_args, "betas=(0.9,0.999)"'
        ),
    ),
    ("adam_epsilon", _flag("optimizer_arguments: {eps: 1e-8}", '--optimizer_args, "eps=1e-8"')),
    (
        "weight_decay adam_weight_decay",
        _flag("weight_decay", '--optimizer_args, "weight_decay=0.01"'),
    ),
    (
        "max_grad_norm gradient_clip gradient_clipping clip_grad_norm",
        _flag("max_grad_norm", '--max_grad_norm, "1.0"'),
    ),
    (
        "lr_scheduler lr_schedule lr_scheduler_type",
        _key("lr_scheduler", "arguments: [--lr_scheduler, cosine]", "lr_scheduler"),
    ),
    (
        "lr_warmup_steps warmup_steps lr_warmup num_warmup_steps warmup",
        _flag("lr_warmup_steps", '--lr_warmup_steps, "100"'),
    ),
    (
        "min_lr_ratio lr_scheduler_min_lr_ratio lr_min_ratio",
        _flag("lr_min_ratio", '--lr_scheduler_min_lr_ratio, "0.1"'),
    ),
    (
        "snr_gamma min_snr_gamma use_snr min_snr use_min_snr",
        _each(
            f"{TRAINER}.snr_gamma: 5",
            "leave it out: Wan is trained by flow matching, without Min-SNR",
            f'{TRAINER}.arguments: [--min_snr_gamma, "5"]',
        ),
    ),
    (
        "noise_offset offset_noise",
        _each(
            f"{TRAINER}.noise_offset",
            "leave it out: Wan is trained by flow matching, without it",
            f'{TRAINER}.arguments: [--noise_offset, "0.05"]',
        ),
    ),
    (
        "v_parameterization v_prediction v_pred",
        _each(
            f"{TRAINER}.prediction_type: v_prediction",
            "leave it out: Wan is trained by flow matching",
            f"{TRAINER}.arguments: [--v_parameterization]",
        ),
    ),
    (
        "ema use_ema ema_decay",
        _each(
            f"{TRAINER}.ema_decay: 0.9999",
            "leave it out: musubi-tuner keeps no average of the weights",
            "leave it out: sd-scripts keeps no average of the weights",
        ),
    ),
    (
        "flow_shift shift",
        _each(
            "leave it out: the noise schedule of the model decides it",
            f"{TRAINER}.discrete_flow_shift",
            f'{TRAINER}.arguments: [--discrete_flow_shift, "3.0"]',
        ),
    ),
    ("seed", _key("seed", 'arguments: [--seed, "42"]', "seed")),
    # Memory and speed.
    (
        "gradient_checkpointing",
        _key(
            "gradient_checkpointing",
            "arguments: [--gradient_checkpointing]",
            "gradient_checkpointing",
        ),
    ),
    ("bf16 use_bf16", f"{TRAINER}.mixed_precision: bf16"),
    ("fp16 use_fp16", f"{TRAINER}.mixed_precision: fp16"),
    ("precision amp", f"{TRAINER}.mixed_precision"),
    (
        "xformers enable_xformers_memory_efficient_attention use_xformers",
        f"{TRAINER}.attention: xformers",
    ),
    ("sdpa", f"{TRAINER}.attention: sdpa"),
    ("flash_attn flash_attention", _key("attention: flash", "attention: flash_attn", "attention")),
    ("sage_attn", _key("attention", "attention: sage_attn", "attention")),
    ("mem_eff_attn", _key("attention", "attention", "attention: mem_eff_attn")),
    ("attn_mode attn attention_mode", f"{TRAINER}.attention"),
    (
        "compile torch_compile",
        _key("torch_compile: true", "arguments: [--compile]", "torch_compile: true"),
    ),
    (
        "dataloader_num_workers num_workers max_data_loader_n_workers workers",
        _key("dataloader_num_workers", "max_data_loader_n_workers", "max_data_loader_n_workers"),
    ),
    (
        "persistent_data_loader_workers",
        "leave it out: what reads caches lives as long as a training",
    ),
    ("num_processes num_gpus gpus gpu_ids device devices num_machines", _DEVICES),
    ("config_file dataset_config", "leave it out: this file is all there is"),
    # Sample pictures.
    (
        "sample_prompts sample_prompt validation_prompt validation_prompts prompts prompt",
        _key("samples: {prompts: [...]}", _SAMPLED, _SAMPLED),
    ),
    (
        "sample_every_n_steps sample_every_n_epochs validation_steps validation_epochs "
        "sample_every",
        _key("samples: {every: ...}", _SAMPLED, _SAMPLED),
    ),
    ("num_validation_images", "leave it out: one picture is drawn for each prompt"),
    (
        "sample_steps inference_steps",
        _key("samples: {num_inference_steps: ...}", _SAMPLED, _SAMPLED),
    ),
    ("cfg cfg_scale guidance", _key("samples: {guidance_scale: ...}", _SAMPLED, _SAMPLED)),
)

ANSWERS: Mapping[str, Answer] = {word: answer for words, answer in _ROWS for word in words.split()}
"""Another program's word, mapped to what is written here in its place."""
