"""Keys that a config does not read: refused where given, left out where saved; and defaults that follow from others."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

import train
from hybrid_rlhf.configs.algorithms import ON_POLICY, ON_POLICY_KEYS, PREFERENCE_KEYS, SFT_KEYS
from hybrid_rlhf.configs.cli import dotted_keys, parse_config, read_config, save_config
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.pipeline import PipelineConfig
from hybrid_rlhf.configs.ppo import PPOConfig
from hybrid_rlhf.configs.preference import PreferenceStepConfig
from hybrid_rlhf.configs.sft import SFTConfig

NO_CRITIC = "algorithm grpo has no critic, got"
NO_KL = "there is no KL penalty (ppo.kl_coef 0), got"
STEP_3 = {
    "--algorithm grpo --ppo.lam 0.9": f"{NO_CRITIC} ppo.lam 0.9",
    "--algorithm grpo --ppo.value_clip 0.5": f"{NO_CRITIC} ppo.value_clip 0.5",
    "--algorithm grpo --ppo.critic_warmup_steps 0": f"{NO_CRITIC} ppo.critic_warmup_steps 0",
    "--algorithm grpo --critic.optimizer.lr 1e-5": f"{NO_CRITIC} critic.optimizer.lr 1e-05",
    "--algorithm grpo --critic.share_base true": f"{NO_CRITIC} critic.share_base True",
    "--algorithm grpo --critic.lam 1": f"{NO_CRITIC} critic.lam 1.0",
    "--algorithm rloo --ppo.gamma 1": "algorithm rloo does not discount, got ppo.gamma 1.0",
    "--algorithm rloo --ppo.whiten_rewards false": "algorithm rloo compares whole completions, got ppo.whiten_rewards "
    "False",
    "--ppo.group_deviation true": "algorithm ppo has no groups' deviation, got ppo.group_deviation True",
    "--ppo.beta 0.1": "algorithm ppo does not learn from pairs, got ppo.beta 0.1",
    "--ppo.selected_per_prompt 1": "algorithm ppo selects no completions, got ppo.selected_per_prompt 1",
    "--algorithm raft --ppo.clip_low 0.2": "the loss of algorithm raft has no such bound, got ppo.clip_low 0.2",
    "--algorithm online_dpo --ppo.clip_high 0.2": "the loss of algorithm online_dpo has no such bound, got "
    "ppo.clip_high 0.2",
    "--algorithm cispo --ppo.dual_clip 3": "the loss of algorithm cispo has no such bound, got ppo.dual_clip 3.0",
    "--algorithm online_dpo --ppo.loss_normalisation token": "algorithm online_dpo learns from pairs, by DPO's loss, "
    "got ppo.loss_normalisation token",
    "--algorithm raft --ppo.whiten_advantages false": "algorithm raft learns alike from all that it selects, got "
    "ppo.whiten_advantages False",
    "--algorithm grpo --ppo.whiten_shift_mean true": "ppo.whiten_advantages is off, got ppo.whiten_shift_mean True",
    "--algorithm grpo --ppo.whiten_unbiased true": "ppo.whiten_advantages and ppo.whiten_rewards are off, got "
    "ppo.whiten_unbiased True",
    "--ppo.kl_coef 0 --ppo.kl_estimator k1": f"{NO_KL} ppo.kl_estimator k1",
    "--algorithm dapo --ppo.kl_in reward": f"{NO_KL} ppo.kl_in reward",
    "--ppo.kl_horizon 100": "ppo.kl_coef stays (no ppo.kl_target), got ppo.kl_horizon 100",
    "--ppo.kl_coef 0 --reference.path x": "nothing asks for a reference (ppo.kl_coef 0), got reference.path x",
    "--ppo.max_refills 3": "ppo.dynamic_sampling is off, got ppo.max_refills 3",
    "--ppo.overlong_penalty 1": "ppo.overlong_fraction is 0, got ppo.overlong_penalty 1.0",
    "--ppo.sampler_correction_clip 2": "ppo.sampler_correction is none, got ppo.sampler_correction_clip 2.0",
    "--data.max_length 64": "there is no pretraining loss (ppo.ptx_coef 0), got data.max_length 64",
    "--data.ptx_sources [x]": "there is no pretraining loss (ppo.ptx_coef 0), got data.ptx_sources ['x']",
    "--environment.max_turns 4": "there is no environment (environment.path), got environment.max_turns 4",
    "--environment.on_failure stop": "there is no environment (environment.path), got environment.on_failure stop",
}
READ = [
    "--ppo.lam 0.9 --critic.lam 0.95 --ppo.gamma 0.9 --critic.optimizer.lr 1e-5 --ppo.whiten_unbiased false",
    "--algorithm reinforce_pp --ppo.gamma 0.9",
    "--algorithm dapo --ppo.max_refills 3 --ppo.overlong_penalty 2 --ppo.group_deviation false --ppo.dual_clip 3",
    "--algorithm online_dpo --ppo.beta 0.2 --reference.path x",
    "--algorithm raft --ppo.selected_per_prompt 2",
    "--ppo.ptx_coef 1 --data.ptx_sources x --data.max_length 64",
    "--environment.path a:B --environment.max_turns 4",
    "--ppo.kl_target 3 --ppo.kl_horizon 100",
    "--ppo.sampler_correction mask --ppo.sampler_correction_clip 3",
]


@pytest.mark.parametrize("line", STEP_3)
def test_a_key_that_is_not_read_is_refused_on_the_line_in_a_file_and_through_train(line: str, tmp_path: Path) -> None:
    words = line.split()
    expected = f"{STEP_3[line]}: leave it out"
    pairs = list(zip(words[::2], words[1::2], strict=True))
    file, whole = tmp_path / "c.yaml", tmp_path / "whole.yaml"
    sections: dict[str, Any] = {}
    for key, value in pairs:
        *path, name = key[2:].split(".")
        place = sections
        for section in path:
            place = place.setdefault(section, {})
        place[name] = yaml.safe_load(value)
    file.write_text(yaml.safe_dump(sections))
    whole.write_text(yaml.safe_dump({"ppo": sections}))
    inside = [word.replace("--", "--ppo.") for word in words]
    for config_type, given in (
        (PPOConfig, words), (PPOConfig, ["--config", str(file)]), (PipelineConfig, inside),
        (PipelineConfig, ["--config", str(whole)]),
    ):  # fmt: skip
        with pytest.raises(UserError) as refused:
            parse_config(config_type, given)
        assert str(refused.value) == expected


def test_a_section_on_the_line_counts_key_by_key() -> None:
    with pytest.raises(UserError, match=f"{NO_CRITIC} critic.path x: leave it out"):
        parse_config(PPOConfig, ["--algorithm", "grpo", "--critic", "{path: x}"])


@pytest.mark.parametrize("line", READ)
def test_what_is_read_passes_and_what_is_saved_reads_back(line: str, tmp_path: Path) -> None:
    config = parse_config(PPOConfig, line.split())
    save_config(config, tmp_path / "c.yaml")
    assert parse_config(PPOConfig, ["--config", str(tmp_path / "c.yaml")]) == config


@pytest.mark.parametrize("name", ON_POLICY)
def test_a_saved_config_has_what_is_read_alone(name: str, tmp_path: Path) -> None:
    config = parse_config(PPOConfig, ["--algorithm", name])
    save_config(config, tmp_path / "c.yaml")
    assert parse_config(PPOConfig, ["--config", str(tmp_path / "c.yaml")]) == config
    saved = read_config(tmp_path / "c.yaml")
    assert ("ppo.lam" in saved) == ("critic.optimizer.lr" in saved) == (name == "ppo") == ("critic.lam" in saved)
    assert ("ppo.beta" in saved) == (name == "online_dpo") and "environment.path" in saved
    assert "environment.max_turns" not in saved and "data.max_length" not in saved


def test_every_key_of_the_tables_is_a_key() -> None:
    for rules, config_type in (
        (ON_POLICY_KEYS, PPOConfig), (PREFERENCE_KEYS, PreferenceStepConfig), (SFT_KEYS, SFTConfig),
    ):  # fmt: skip
        known = [*dotted_keys(config_type)]
        for name in (name for rule in rules for name in rule.keys):
            assert name in known or (name.endswith(".") and any(key.startswith(name) for key in known)), name


@pytest.mark.parametrize(
    ("config_type", "line", "expected"),
    [
        (SFTConfig, "--distill.beta 0.5", "algorithm sft has no teacher, got distill.beta 0.5"),
        (SFTConfig, "--data.condition_template {bucket}", "data.condition_buckets is 0, got data.condition_template "
         "{bucket}"),
        (PreferenceStepConfig, "--algorithm orpo --reference.logprobs live", "algorithm orpo asks no reference, got "
         "reference.logprobs live"),
    ],
)  # fmt: skip
def test_other_steps_refuse_what_they_do_not_read(config_type: Any, line: str, expected: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_config(config_type, line.split())
    assert str(refused.value) == f"{expected}: leave it out"


def test_a_key_of_another_algorithm_is_refused_at_its_default_too() -> None:
    with pytest.raises(UserError, match="loss.label_smoothing is read by algorithm cdpo alone, got 0.0 with dpo"):
        parse_config(PreferenceStepConfig, ["--loss.label_smoothing", "0"])


def test_the_demos_own_keys_are_nobodys_mistake(tmp_path: Path) -> None:
    """The demo gives lambda and a critic, which GRPO does not read: they are not the user's, and are not saved."""
    config = parse_config(PipelineConfig, ["--ppo.algorithm", "grpo"], defaults=train.DEMO)
    save_config(config.ppo, tmp_path / "c.yaml")
    again = parse_config(PPOConfig, ["--config", str(tmp_path / "c.yaml")])
    assert again.rollout == config.ppo.rollout and not [key for key in read_config(again) if "critic" in key]


def rates(config_type: Any, *line: str, **known: Any) -> dict[str, float]:
    values = read_config(parse_config(config_type, line, **known))
    return {key: value for key, value in values.items() if key.endswith("optimizer.lr")}


def test_adapters_learn_ten_times_faster_unless_the_user_says(tmp_path: Path) -> None:
    assert rates(SFTConfig) == {"optimizer.lr": 2e-5}
    assert rates(SFTConfig, "--lora.rank", "16") == {"optimizer.lr": 2e-4}
    assert rates(SFTConfig, "--lora", "{rank: 16}") == {"optimizer.lr": 2e-4}
    assert rates(SFTConfig, "--lora.rank", "16", "--optimizer.lr", "2e-5") == {"optimizer.lr": 2e-5}
    assert rates(SFTConfig, "--lora.rank", "0") == {"optimizer.lr": 2e-5}
    assert rates(PreferenceStepConfig, "--lora.rank", "4") == {"optimizer.lr": 1e-5}
    assert rates(PPOConfig) == {"actor.optimizer.lr": 1e-6, "critic.optimizer.lr": 1e-5}
    assert rates(PPOConfig, "--actor.lora.rank", "8") == {"actor.optimizer.lr": 1e-5, "critic.optimizer.lr": 1e-5}
    assert rates(PPOConfig, "--critic.lora.rank", "8") == {"actor.optimizer.lr": 1e-6, "critic.optimizer.lr": 1e-4}
    assert rates(PPOConfig, "--algorithm", "raft") == {"actor.optimizer.lr": 2e-5}
    assert rates(PPOConfig, "--algorithm", "raft", "--actor.lora.rank", "8") == {"actor.optimizer.lr": 2e-4}
    file = tmp_path / "c.yaml"
    file.write_text("reward: {lora: {rank: 8}}\nsft: {lora: {rank: 8}, optimizer: {lr: 3.0e-5}}\n")
    whole = rates(PipelineConfig, "--config", str(file))
    assert (whole["sft.optimizer.lr"], whole["reward.optimizer.lr"], whole["preference.optimizer.lr"]) == (
        3e-5, 1e-4, 1e-6,
    )  # fmt: skip
    demo = rates(PipelineConfig, defaults=train.DEMO)
    assert (demo["sft.optimizer.lr"], demo["ppo.actor.optimizer.lr"]) == (1e-3, 4e-4), "it names its own"
    other = rates(PipelineConfig, "--sft.lora.rank", "4", "--ppo.algorithm", "raft", defaults=train.DEMO)
    assert (other["sft.optimizer.lr"], other["ppo.actor.optimizer.lr"]) == (1e-3, 2e-4)


def test_a_saved_config_and_help_show_the_rate_of_adapters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = parse_config(SFTConfig, ["--lora.rank", "16"])
    save_config(config, tmp_path / "c.yaml")
    assert yaml.safe_load((tmp_path / "c.yaml").read_text())["optimizer"]["lr"] == 2e-4
    assert parse_config(SFTConfig, ["--config", str(tmp_path / "c.yaml")]) == config
    with pytest.raises(SystemExit):
        parse_config(SFTConfig, ["--lora.rank", "16", "--help"])
    assert "(type: float, default: 0.0002)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("line", "prompts", "mini_batches"),
    [
        ("", 256, 4),
        ("--algorithm grpo", 64, 4),
        ("--algorithm rloo", 64, 1),
        ("--algorithm online_dpo", 128, 1),
        ("--algorithm gspo --rollout.prompts_per_step 6", 6, 4),
        ("--rollout.prompts_per_step 6", 6, 3),
        ("--rollout.prompts_per_step 2", 2, 2),
        ("--rollout.prompts_per_step 25", 25, 1),
        ("--rollout.prompts_per_step 25 --rollout.samples_per_prompt 2", 25, 2),
        ("--rollout.prompts_per_step 16 --train.micro_batch_size 8", 16, 2),
        ("--rollout.prompts_per_step 6 --ppo.mini_batches 6", 6, 6),
        ("--algorithm remax --rollout.prompts_per_step 8", 8, 1),
        ("--algorithm remax --ppo.mini_batches 2", 256, 2),
    ],
)
def test_a_rollout_is_cut_into_what_it_divides_into(line: str, prompts: int, mini_batches: int) -> None:
    config = parse_config(PPOConfig, line.split())
    assert (config.rollout.prompts_per_step, config.ppo.mini_batches) == (prompts, mini_batches)
    assert config.clip_is_idle == (mini_batches == 1 and not config.traits.once)


def test_algorithms_of_one_update_are_those_whose_papers_do_not_clip() -> None:
    once = {name for name, traits in ON_POLICY.items() if traits.once}
    assert once == {"reinforce", "rloo", "remax", "online_dpo", "raft"}
    for name in ON_POLICY:
        config = parse_config(PPOConfig, ["--algorithm", name])
        assert config.ppo.updates_once == (name in once) and not config.clip_is_idle
    assert not dataclasses.replace(config, algorithm="remax").clip_is_idle
