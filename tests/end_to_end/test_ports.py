"""Runs of other systems, ported by `hybrid-rlhf port`, run with other paths and nothing else changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.commands import CommandLine
from tests.support.steps import write_lines

REWARDS = """
import torch

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(len(set(solution_str)) % 3), "acc": solution_str == ground_truth}

def reward_func(queries, prompts, labels):
    return {"rewards": torch.tensor([float(len(query) % 3) for query in queries]), "scores": None}
"""
GRPO = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

def brevity(completions, **kwargs):
    return [-len(set(text)) for text in completions]

if __name__ == "__main__":
    args = GRPOConfig(output_dir="out", num_generations=4, per_device_train_batch_size=8, steps_per_generation=2,
                      max_completion_length=4, max_steps=2, beta=0.02, temperature=0.9, bf16=False, report_to="none")
    GRPOTrainer(model="model", reward_funcs=brevity, args=args,
                train_dataset=load_dataset("json", data_files="prompts.jsonl", split="train")).train()
"""
DPO = """
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer

trainer = DPOTrainer("model", args=DPOConfig(output_dir="out", loss_type="ipo", beta=0.2, max_steps=2, max_length=64,
    per_device_train_batch_size=2, gradient_accumulation_steps=2, lr_scheduler_type="cosine", warmup_ratio=0.1),
    train_dataset=load_dataset("json", data_files="pairs.jsonl", split="train"),
    peft_config=LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", lora_dropout=0.05))
"""
VERL = """
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=verl.jsonl data.val_files=verl.jsonl \\
    data.train_batch_size=4 data.max_prompt_length=48 data.max_response_length=4 data.filter_overlong_prompts=True \\
    actor_rollout_ref.model.path=model actor_rollout_ref.actor.optim.lr=1e-4 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=2 actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    actor_rollout_ref.rollout.n=2 actor_rollout_ref.rollout.tensor_model_parallel_size=2 trainer.critic_warmup=0 \\
    custom_reward_function.path=rewards.py trainer.default_local_dir=out trainer.total_training_steps=2 \\
    trainer.logger='["console"]' $@
"""
PPO = """
python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path model --critic.model_name_or_path model \\
    --reward.remote_url rewards.py --data.prompt_dataset labelled.jsonl --data.input_key question \\
    --data.label_key answer \\
    --rollout.batch_size 4 --rollout.n_samples_per_prompt 1 --train.batch_size 2 --rollout.max_new_tokens 4 \\
    --data.max_len 52 --actor.adam.lr 1e-4 --critic.adam.lr 1e-4 --ckpt.output_dir out --ds.zero_stage 2 \\
    --algo.kl.init_coef 0.01 --train.num_episodes 1 --actor.eps_clip_low_high 0.2 0.27
"""
SFT = """
deepspeed --module openrlhf.cli.train_sft --model.model_name_or_path model --data.dataset labelled.jsonl \\
    --data.input_key question --data.output_key answer --data.max_len 64 --train.batch_size 4 --train.max_epochs 1 \\
    --adam.lr 1e-3 --ckpt.output_dir out --model.gradient_checkpointing_enable --ds.packing_samples
"""
FACTORY = """
model_name_or_path: model
stage: dpo
finetuning_type: full
pref_loss: simpo
dataset: pairs
dataset_dir: .
cutoff_len: 64
per_device_train_batch_size: 1
gradient_accumulation_steps: 4
learning_rate: 1.0e-4
max_steps: 2
output_dir: out
report_to: none
"""
AXOLOTL = """
base_model: model
datasets:
  - {path: chats.jsonl, type: chat_template}
val_set_size: 0.1
sequence_len: 64
sample_packing: true
adapter: lora
lora_r: 4
lora_alpha: 8
lora_target_linear: true
micro_batch_size: 2
gradient_accumulation_steps: 1
num_epochs: 1
max_steps: 2
optimizer: adamw_torch
learning_rate: 1e-3
output_dir: out
"""


@pytest.mark.parametrize(
    ("system", "name", "text", "step"),
    [
        ("trl", "run.py", GRPO, "rl"),
        pytest.param("trl", "run.py", DPO, "preference", marks=pytest.mark.slow),
        ("verl", "run.sh", VERL, "rl"),
        pytest.param("openrlhf", "run.sh", PPO, "rl", marks=pytest.mark.slow),
        pytest.param("openrlhf", "run.sh", SFT, "sft", marks=pytest.mark.slow),
        pytest.param("llamafactory", "run.yml", FACTORY, "preference", marks=pytest.mark.slow),
        pytest.param("axolotl", "run.yml", AXOLOTL, "sft", marks=pytest.mark.slow),
    ],
    ids=["trl grpo", "trl dpo", "verl grpo", "openrlhf ppo", "openrlhf sft", "llamafactory dpo", "axolotl sft"],
)
def test_a_ported_run_runs(
    system: str,
    name: str,
    text: str,
    step: str,
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cli: CommandLine,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(model_folder)
    (tmp_path / name).write_text(text)
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "dataset_info.json").write_text(json.dumps({"pairs": {"file_name": "pairs.jsonl", "ranking": True}}))
    numbers = range(40)
    write_lines(tmp_path / "prompts.jsonl", [{"prompt": f"say {i}"} for i in numbers])
    write_lines(tmp_path / "labelled.jsonl", [{"question": f"say {i}", "answer": str(i)} for i in numbers])
    write_lines(tmp_path / "pairs.jsonl", [{"prompt": f"say {i}", "chosen": str(i), "rejected": "x"} for i in numbers])
    turns = [[{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": str(i)}] for i in numbers]
    write_lines(tmp_path / "chats.jsonl", [{"messages": turn} for turn in turns])
    rows = [
        {"data_source": "x", "prompt": turn[:1], "reward_model": {"ground_truth": turn[1]["content"]}} for turn in turns
    ]
    write_lines(tmp_path / "verl.jsonl", rows)
    ported = cli(f"port {name} --from {system} --json")
    assert ported.result["step"] == step and not any("edit this" in text for text in ported.result["remarks"])
    ended = cli(f"{step} --config run.yaml --data.cache_dir cache")
    assert ended.code == 0, ended.err
    assert (tmp_path / "out" / "finished.json").exists()
