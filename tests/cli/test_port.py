"""`hybrid-rlhf port`: runs of other systems become configurations that this project accepts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybrid_rlhf.cli.porting.port import main
from hybrid_rlhf.configs.parsing.building import flat
from tests.support.commands import CommandLine

VERL = r"""
set -x
MODEL=Qwen/Qwen2.5-3B-Instruct  # a comment
DATA=(
    data.train_files=${FOLDER:-data}/train.parquet
    data.val_files="['data/test.parquet']"
)
python3 -m verl.trainer.main_ppo "${DATA[@]}" \
    algorithm.adv_estimator=grpo \
    data.train_batch_size=1024 \
    data.max_prompt_length=512 \
    data.max_response_length=$((1024 * 2)) \
    actor_rollout_ref.model.path=$MODEL \
    actor_rollout_ref.actor.optim.lr=3e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    +actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.top_k=-1 \
    actor_rollout_ref.rollout.n=5 \
    custom_reward_function.path=rewards.py \
    trainer.critic_warmup=0 \
    trainer.logger='["console","wandb"]' \
    trainer.save_freq=-1 \
    trainer.wibble=3 \
    trainer.total_epochs=15 $@
"""
OPENRLHF = r"""
read -r -d '' training_commands <<EOF
openrlhf.cli.train_dpo \
   --model.model_name_or_path OpenRLHF/Llama-3-8b-sft-mixture \
   --data.dataset OpenRLHF/a,OpenRLHF/b \
   --data.dataset_probs 0.8,0.2 \
   --data.prompt_key prompt \
   --data.chosen_key better \
   --train.batch_size 256 \
   --train.micro_batch_size 1 \
   --model.beta 0.2 \
   --model.label_smoothing 0.1 \
   --adam.betas 0.9 0.98 \
   --adam.lr 5e-7 \
   --ds.zero_stage 3 \
   --ds.packing_samples \
   --logger.wandb.key secret \
   --hub_token secret \
   --logger.wandb.project dpo
EOF
deepspeed --num_gpus 8 --module $training_commands
"""
GRPO = """
import torch
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward

LR = 2e-6

def brevity(completions, **kwargs):
    return [-len(text) for text in completions]

def main():
    args = GRPOConfig(
        output_dir="out", learning_rate=LR, num_generations=4, per_device_train_batch_size=16,
        gradient_accumulation_steps=2, steps_per_generation=4, max_completion_length=64, use_vllm=True,
        loss_type="dr_grpo", scale_rewards="none", epsilon_high=0.28, reward_weights=[1.0, 0.2], bf16=True,
        save_steps=int(2.5), max_steps=200,
    )
    GRPOTrainer(
        model="Qwen/Qwen2.5-0.5B", reward_funcs=[accuracy_reward, brevity], args=args,
        train_dataset=load_dataset("json", data_files="rows.jsonl", split="train"),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", lora_dropout=0.05),
    ).train()
"""
FACTORY = """
model_name_or_path: Qwen/Qwen3-4B
stage: dpo
finetuning_type: lora
lora_rank: 8
lora_target: all
pref_loss: simpo
dataset: mine, other
template: qwen3
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 5.0e-6
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
quantization_bit: 4
bf16: true
"""
AXOLOTL = """
base_model: NousResearch/Llama-3.2-1B
datasets:
  - {path: teknium/GPT4-LLM-Cleaned, type: alpaca}
  - {path: json, data_files: mine.jsonl, type: chat_template, split: test}
val_set_size: 0.1
output_dir: ./outputs/lora-out
adapter: lora
sequence_len: 2048
sample_packing: true
lora_r: 16
lora_alpha: 32
lora_target_linear: true
gradient_accumulation_steps: 2
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_8bit
lr_scheduler: cosine
learning_rate: 2e-4
warmup_steps: 10
saves_per_epoch: 1
"""


def ported(
    system: str, name: str, text: str, folder: Path, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[dict[str, Any], str]:
    """The settings of a ported file by dotted key, and what was printed."""
    (folder / name).write_text(text)
    main([str(folder / name), "--from", system, "--output", str(folder / "run.yaml"), *words])
    content = yaml.safe_load((folder / "run.yaml").read_text())

    def flat(value: Any, prefix: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            return {prefix[:-1]: value}
        return {key: leaf for name, inner in value.items() for key, leaf in flat(inner, f"{prefix}{name}.").items()}

    return flat(content, ""), capsys.readouterr().out


@pytest.mark.parametrize(("loss", "setting"), [("dppo_tv", ("grpo", "probability")), ("geo_mean", ("gmpo", None))])
def test_a_loss_of_verl_is_an_algorithm_or_a_clip(
    loss: str, setting: tuple[str, str | None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """DPPO's is no algorithm here; it was left out."""
    mode = f"actor_rollout_ref.actor.policy_loss.loss_mode={loss}"
    line = f"python3 -m verl.trainer.main_ppo data.train_files=a.parquet algorithm.adv_estimator=grpo {mode}"
    settings, said = ported("verl", "a.sh", line, tmp_path, capsys)
    assert (settings["algorithm.name"], settings.get("algorithm.clip_of")) == setting and "loss_mode" not in said


def test_a_script_of_verl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings, said = ported("verl", "run.sh", VERL, tmp_path, capsys)
    columns = {"ground_truth": "reward_model.ground_truth"}
    assert settings.pop("data.sources") == [{"path": "data/train.parquet", "columns": columns}]
    assert settings.pop("data.eval_sources") == [{"path": "data/test.parquet", "columns": columns}]
    assert settings == {
        "model.path": "Qwen/Qwen2.5-3B-Instruct",
        "algorithm.name": "grpo",
        "algorithm.mini_batches": 4,
        "algorithm.kl.where": "loss",
        "algorithm.kl.coef": 0.001,
        "algorithm.kl.estimator": "k3",
        "algorithm.clip": [0.28, 0.28],
        "algorithm.loss_normalization": "sequence",
        "actor.optimizer.lr": 3e-6,
        "reward.components": [{"function": "rewards.py:compute_score"}],
        "rollout.prompts_per_step": 1024,
        "rollout.max_prompt_tokens": 512,
        "rollout.sampling.top_k": 0,
        "rollout.sampling.n": 5,
        "logging.sinks": ["wandb"],
        "train.save_every": 0,
        "train.epochs": 15,
    }
    assert "data.max_response_length" in said and "an expression; fill in its value" in said
    assert "trainer.wibble 3" in said and "critic.warmup_steps is not read by grpo" in said
    assert "tensor_model_parallel_size 2: set rollout.tensor_parallel" in said
    two = ported("verl", "run.sh", VERL, tmp_path, capsys, "--processes", "2", "--overwrite")[0]
    assert two["rollout.tensor_parallel"] == 2


def test_images_of_other_systems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A frozen tower; that of verl, which trains it unless told otherwise, is named in each dump of its settings."""
    verl = "python3 -m verl.trainer.main_ppo data.train_files=a.parquet data.image_key=pictures "
    factory = "stage: sft\ndataset: a\nimage_max_pixels: 262144\nfreeze_vision_tower: false\n"
    cases = {
        "verl": ("a.sh", verl + "actor_rollout_ref.actor.freeze_vision_tower=True", "freeze"),
        "openrlhf": ("b.sh", "python3 -m openrlhf.cli.train_sft --data.dataset a --data.image_key pictures", None),
        "llamafactory": ("c.yaml", factory, "train"),
    }
    for system, (name, text, vision) in cases.items():
        settings, said = ported(system, name, text, tmp_path, capsys, "--overwrite")
        assert settings.get("model.vision") == vision and "not known" not in said
        if system == "llamafactory":
            assert settings["data.max_image_pixels"] == 262144
        else:
            assert settings["data.sources"][0]["columns"]["images"] == "pictures"
    settings, _ = ported(
        "verl", "a.sh", verl + "actor_rollout_ref.actor.freeze_vision_tower=False", tmp_path, capsys, "--overwrite"
    )
    assert "model.vision" not in settings


def test_a_command_of_openrlhf(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings, said = ported("openrlhf", "run.sh", OPENRLHF, tmp_path, capsys)
    columns = {"chosen": "better"}
    assert settings == {
        "model.path": "OpenRLHF/Llama-3-8b-sft-mixture",
        "data.sources": [
            {"path": "OpenRLHF/a", "weight": 1.0, "columns": columns},
            {"path": "OpenRLHF/b", "weight": 0.25, "columns": columns},
        ],
        "logging.sinks": ["wandb"],
        "logging.project": "dpo",
        "optimizer.betas": [0.9, 0.98],
        "optimizer.lr": 5e-7,
        "optimizer.schedule": "cosine",
        "zero.stage": 3,
        "algorithm.name": "cdpo",
        "algorithm.beta": 0.2,
        "algorithm.label_smoothing": 0.1,
        "train.global_batch_size": 256,
        "train.epochs": 1,
    }
    assert "train.micro_batch_size 1: micro-batches are derived" in said
    assert "secret" not in said + (tmp_path / "run.yaml").read_text()


def test_a_script_of_trl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings, said = ported("trl", "train.py", GRPO, tmp_path, capsys, "--processes", "2")
    assert settings == {
        "output_dir": "out",
        "model.path": "Qwen/Qwen2.5-0.5B",
        "model.dtype": "bfloat16",
        "data.sources": ["rows.jsonl"],
        "algorithm.name": "grpo",
        "algorithm.divide_by_std": False,
        "algorithm.loss_normalization": "fixed",
        "algorithm.clip": [0.2, 0.28],
        "algorithm.kl": None,
        "algorithm.mini_batches": 2,
        "actor.optimizer.lr": 2e-6,
        "actor.optimizer.schedule": "linear",
        "actor.lora.rank": 8,
        "actor.lora.alpha": 16.0,
        "actor.lora.target_modules": "all-linear",
        "reward.components": [
            {"function": "trl.rewards:accuracy_reward", "weight": 1.0},
            {"function": f"{tmp_path}/train.py:brevity", "weight": 0.2},
        ],
        "rollout.sampling.n": 4,
        "rollout.sampling.max_new_tokens": 64,
        "rollout.prompts_per_step": 32,
        "train.max_steps": 200,
    }
    assert (
        "save_steps" in said
        and "use_vllm true: the actor's engine generates" in said
        and "lora_dropout 0.05: adapters" in said
    )


def test_a_command_of_trl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = "accelerate launch --num_processes 4 -m trl.cli sft --model-name-or-path m --dataset_name d --packing"
    main([command, "--from", "trl", "--output", str(tmp_path / "run.yaml")])
    assert yaml.safe_load((tmp_path / "run.yaml").read_text()) == {
        "model": {"path": "m"},
        "data": {"sources": ["d"], "packing": "best_fit", "max_length": 1024},
        "optimizer": {"lr": 2e-5, "schedule": "linear"},
        "train": {"epochs": 3, "global_batch_size": 32},
    }


def test_a_long_command_with_an_odd_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = f"trl sft --model_name_or_path {'m' * 300} --per_device_train_batch_size many --bf16"
    main([command, "--from", "trl", "--output", str(tmp_path / "run.yaml")])
    content = yaml.safe_load((tmp_path / "run.yaml").read_text())
    assert content["model"] == {"path": "m" * 300, "dtype": "bfloat16"} and "global_batch_size" not in content["train"]
    assert 'per_device_train_batch_size "many": values of another form' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("system", "options", "settings"),
    [
        ("trl", "loss_type: luspo", {"loss_normalization": "sequence_sum"}),
        (
            "trl",
            "loss_type: luspo\nimportance_sampling_level: sequence",
            {"name": "gspo", "loss_normalization": "sequence_sum"},
        ),
        (
            "verl",
            "actor_rollout_ref.actor.loss_agg_mode: seq-mean-token-sum",
            {"loss_normalization": "sequence_sum"},
        ),
    ],
)
def test_losses_that_sum_over_a_sequence(system: str, options: str, settings: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(options)
    main([str(tmp_path / "run.yaml"), "--from", system, "--step", "rl", "--output", str(tmp_path / "ported.yaml")])
    found = yaml.safe_load((tmp_path / "ported.yaml").read_text())["algorithm"]
    assert found.items() >= settings.items()


@pytest.mark.parametrize(
    ("system", "step", "text", "settings", "remark"),
    [
        ("axolotl", "sft", "base_model: m\ndatasets: foo", {}, 'datasets "foo"'),
        ("axolotl", "sft", "base_model: m\ndatasets: [{type: chat_template}]", {}, "datasets [{"),
        ("trl", "rl", "reward_funcs: [a:b, c:d]\nreward_weights: [1.0]", {}, "reward_funcs ["),
        ("trl", "rl", "num_generations: 0", {}, "\nvalues of another form"),
        ("trl", "sft", "per_device_train_batch_size: .inf", {}, "per_device_train_batch_size Infinity"),
        ("trl", "sft", "run_name: 2026-11-30", {"logging.run_name": "2026-11-30"}, None),
        ("trl", "sft", "run_name: '007'", {"logging.run_name": "007"}, None),
        ("trl", "sft", "1: a", {}, '1 "a": not known of'),
        ("llamafactory", "sft", "dataset: a\ndataset_dir: 3", {"data.sources": ["a"]}, None),
    ],
)
def test_odd_values_in_files(
    system: str,
    step: str,
    text: str,
    settings: dict[str, Any],
    remark: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "given.yaml").write_text(text)
    output = tmp_path / "run.yaml"
    main([str(tmp_path / "given.yaml"), "--from", system, "--step", step, "--output", str(output)])
    said = capsys.readouterr().out
    assert settings.items() <= flat(yaml.safe_load(output.read_text())).items()
    assert remark is None or remark in said


def test_a_nested_file_of_verl_is_its_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "given.yaml").write_text(
        "data: {train_files: a.parquet, max_prompt_length: 512}\n"
        "actor_rollout_ref: {model: {path: m}, actor: {optim: {lr: 3e-6}}}\ntrainer: {total_epochs: 2}\n"
    )
    command = "python3 -m verl.trainer.main_ppo data.train_files=a.parquet data.max_prompt_length=512"
    command += " actor_rollout_ref.model.path=m actor_rollout_ref.actor.optim.lr=3e-6 trainer.total_epochs=2"
    contents = []
    for name, given in (("file", str(tmp_path / "given.yaml")), ("command", command)):
        main([given, "--from", "verl", "--output", str(tmp_path / name / "run.yaml")])
        assert "not known" not in (said := capsys.readouterr().out) and "\nthe reward depends on" in said
        contents.append(yaml.safe_load((tmp_path / name / "run.yaml").read_text()))
    assert contents[0] == contents[1] and flat(contents[0])["actor.optimizer.lr"] == 3e-6


@pytest.mark.parametrize(
    ("name", "content", "rule"),
    [
        ("run.yaml", b"\xff\xfe bad", "is UTF-16: save it as UTF-8"),
        ("run.sh", b"trl sft --run_name \xe9", "is not UTF-8 text"),
        ("run.py", b"x = '\xe9'", "is not UTF-8 text"),
        ("run.py", b"x = '\0'", "a script must be Python"),
    ],
)
def test_files_that_are_not_text(
    name: str, content: bytes, rule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / name), "--from", "trl", "--step", "sft", "--output", str(tmp_path / "out.yaml")])
    assert rule in capsys.readouterr().err


def test_a_file_of_llamafactory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    entries = {"mine": {"file_name": "mine.json", "ranking": True}, "other": {"hf_hub_url": "a/b"}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(entries))
    settings, said = ported("llamafactory", "run.yml", FACTORY, tmp_path, capsys)
    assert settings == {
        "model.path": "Qwen/Qwen3-4B",
        "model.dtype": "bfloat16",
        "model.quantization": "nf4",
        "data.sources": ["data/mine.json", "a/b"],
        "data.max_length": 2048,
        "lora.rank": 8,
        "lora.alpha": 16.0,
        "lora.target_modules": "all-linear",
        "optimizer.lr": 5e-6,
        "optimizer.schedule": "cosine",
        "optimizer.warmup_fraction": 0.1,
        "algorithm.name": "simpo",
        "train.global_batch_size": 8,
        "train.epochs": 3,
    }
    assert "`hybrid-rlhf data convert`" in said and 'template "qwen3"' in said


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        ("{", "dataset_info.json must be JSON, data/dataset_info.json:1 is not"),
        ("[1]", "dataset_info.json must be a JSON object, data/dataset_info.json holds a list"),
        ('{"mine": "mine.json"}', "data/dataset_info.json: a data set is an object with the text file_name, got mine "),
        ('{"mine": {"file_name": null}}', "got mine {'file_name': None}: fix it"),
        ('{"mine": {}}', None),
        ("{}", None),
    ],
)
def test_a_list_of_data_sets_that_is_wrong(
    content: str, rule: str | None, tmp_path: Path, cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name without a file is one of the hub, as in LLaMA-Factory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(content)
    (tmp_path / "run.yml").write_text(FACTORY)
    line = "port run.yml --from llamafactory --output out.yaml"
    if rule is None:
        assert cli(f"{line} --json").result["settings"]["data.sources"] == ["mine", "other"]
    else:
        assert rule in cli.refused(line)


def test_a_file_of_axolotl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings, said = ported("axolotl", "run.yml", AXOLOTL, tmp_path, capsys)
    assert settings == {
        "output_dir": "./outputs/lora-out",
        "model.path": "NousResearch/Llama-3.2-1B",
        "data.sources": ["teknium/GPT4-LLM-Cleaned", {"path": "mine.jsonl", "split_name": "test"}],
        "data.eval_fraction": 0.1,
        "data.max_length": 2048,
        "data.packing": "best_fit",
        "lora.rank": 16,
        "lora.alpha": 32.0,
        "lora.target_modules": "all-linear",
        "optimizer.name": "adamw",
        "optimizer.schedule": "cosine",
        "optimizer.lr": 2e-4,
        "train.epochs": 1,
        "train.global_batch_size": 4,
    }
    assert "warmup_steps 10: a fraction of the steps here" in said and "saves_per_epoch 1: set train.save_every" in said


@pytest.mark.parametrize(
    ("system", "text", "name"),
    [
        ("axolotl", "base_model: m\noptimizer: adamw_bnb_8bit\n", "adamw_8bit"),
        ("llamafactory", "model_name_or_path: m\nstage: sft\noptim: paged_adamw_8bit\n", "adamw_8bit"),
        ("llamafactory", "model_name_or_path: m\nstage: sft\noptim: adamw_torch_fused\n", "adamw"),
        ("llamafactory", "finetuning_type: lora\nstage: sft\noptim: paged_adamw_8bit\n", "adamw"),
    ],
)
def test_moments_in_8_bits_are_carried_over_without_adapters(
    system: str, text: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With adapters they are refused, and the ported file could not be run."""
    settings, said = ported(system, "run.yml", text, tmp_path, capsys)
    assert settings["optimizer.name"] == name and "edit this" not in said


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["train --x 1"], "port must know the system of the file"),
        (["nothing.sh", "--from", "trl"], "a file or a command must be given, got nothing.sh, which is no file"),
        (["train --beta 1", "--from=trl"], "port cannot tell the step of the run: give --step sft"),
        (["trl dpo --beta '1", "--from", "trl"], "a command must have paired quotes"),
        (["trl dpo --beta 1", "--from", "trl", "--output", "."], "output must be a file that can be written"),
    ],
)
def test_mistakes(words: list[str], rule: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert rule in capsys.readouterr().err
