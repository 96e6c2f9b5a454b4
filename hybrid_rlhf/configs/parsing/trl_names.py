"""TRL's argument names and the equivalent keys, for the errors of unknown keys.

Source: TRL 0.24 (SFTConfig, RewardConfig, DPOConfig, GRPOConfig, RLOOConfig and their trainers); the names of
transformers' TrainingArguments are among them. docs/migration.md explains the differences in meaning.
"""

from __future__ import annotations

from collections.abc import Sequence

_BATCH = "train.global_batch_size or rollout.prompts_per_step"
_KEYS = {
    "batch": _BATCH,
    "batch_size": _BATCH,
    "beta": "algorithm.beta or algorithm.kl.coef",
    "bf16": "model.dtype",
    "dataset_name": "data.sources",
    "deepspeed": "zero.stage",
    "delta": "algorithm.dual_clip",
    "epsilon": "algorithm.clip",
    "eval_dataset": "data.eval_sources",
    "eval_steps": "train.eval_every",
    "eval_strategy": "train.eval_every",
    "fp16": "model.dtype",
    "generation_batch_size": "rollout.prompts_per_step",
    "gradient_accumulation_steps": _BATCH,
    "kl_coef": "algorithm.kl.coef",
    "learning_rate": "optimizer.lr",
    "log_completions": "logging.samples_every",
    "logging_steps": "logging.every",
    "lora_alpha": "lora.alpha",
    "lora_r": "lora.rank",
    "lora_target_modules": "lora.target_modules",
    "loss_type": "algorithm.loss_normalization or algorithm.name",
    "lr_scheduler_type": "optimizer.schedule",
    "mask_truncated_completions": "algorithm.mask_truncated",
    "max_completion_length": "rollout.sampling.max_new_tokens",
    "max_prompt_length": "rollout.max_prompt_tokens",
    "max_seq_length": "data.max_length",
    "missing_eos_penalty": "algorithm.penalties.missing_eos",
    "model_name_or_path": "base_model or model.path",
    "num_generations": "rollout.sampling.n",
    "num_iterations": "algorithm.epochs",
    "num_ppo_epochs": "algorithm.epochs",
    "num_train_epochs": "train.epochs",
    "peft_config": "lora.rank",
    "per_device_train_batch_size": _BATCH,
    "ref_model": "reference.path",
    "report_to": "logging.sinks",
    "response_length": "rollout.sampling.max_new_tokens",
    "resume_from_checkpoint": "resume",
    "reward_funcs": "reward.components",
    "reward_model_path": "reward.components",
    "reward_weights": "reward.components",
    "save_steps": "train.save_every",
    "save_total_limit": "train.keep_last",
    "scale_rewards": "algorithm.divide_by_std",
    "steps_per_generation": "algorithm.mini_batches",
    "torch_dtype": "model.dtype",
    "train_dataset": "data.sources",
    "use_peft": "lora.rank",
    "warmup_ratio": "optimizer.warmup_fraction",
    "warmup_steps": "optimizer.warmup_fraction",
}
"""The keys for each name; of several, a config has one. A key of a section stands for that key in any section."""
_ANSWERS = {
    "args": "settings are keywords, for example train={'epochs': 1}",
    "assistant_only_loss": "the loss is always on what the assistant says",
    "completion_only_loss": "the loss is always on the completion",
    "processing_class": "give tokenizer, together with a model object",
    "use_vllm": "the engine of the actor generates: leave it out, or give rollout.vllm",
    "vllm_mode": "the engine of the actor generates: leave it out, or give rollout.vllm",
}


def trl_answer(name: str, known: Sequence[str]) -> str | None:
    """Advice for one of TRL's names; None for other names.

    Args:
        name: dotted key that a config does not have.
        known: the keys of the config.
    """
    leaf = name.rpartition(".")[2]
    for key in _KEYS.get(leaf, "").split(" or "):
        keys = [key] if key in known else [longer for longer in known if longer.endswith(f".{key}")]
        if keys:
            return f"give {' or '.join(keys[:3])}"
    return _ANSWERS.get(leaf)
