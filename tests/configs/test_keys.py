"""Which keys a config has: those that its algorithm reads, and sections that exist once they are given; and defaults
that follow from other keys.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybrid_rlhf.cli import train
from hybrid_rlhf.configs.algorithms import RL_ALGORITHMS, OnlineDPOConfig, PPOConfig
from hybrid_rlhf.configs.parsing.listing import changed_keys, is_mutable
from hybrid_rlhf.configs.pipeline import PipelineConfig
from hybrid_rlhf.configs.preference import PREFERENCE_LOSSES, PreferenceStepConfig
from hybrid_rlhf.configs.reward import RewardConfig
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.model import LoraConfig
from hybrid_rlhf.configs.sft import SFTConfig
from hybrid_rlhf.engines.learning_rates import Learning, derived_rate
from hybrid_rlhf.runtime.command_line import parse_config, read_config, save_config
from tests.support.errors import refused, user_error

NO_CRITIC = "algorithm grpo has no critic, got"
NOT_READ = {
    "--algorithm grpo --algorithm.gae_lambda 0.9": "algorithm grpo has no key algorithm.gae_lambda (ppo has), got 0.9",
    "--algorithm grpo --algorithm.value_clip 0.5": "algorithm grpo has no key algorithm.value_clip (ppo, vapo "
    "have), got 0.5",
    "--algorithm grpo --critic.warmup_steps 0": f"{NO_CRITIC} critic.warmup_steps 0",
    "--algorithm grpo --critic.optimizer.lr 1e-5": f"{NO_CRITIC} critic.optimizer.lr 1e-05",
    "--algorithm rloo --algorithm.gamma 1": "algorithm rloo has no key algorithm.gamma (ppo, reinforce_pp, "
    "reinforce_pp_baseline and others have), got 1",
    "--algorithm.divide_by_std true": "algorithm ppo has no key algorithm.divide_by_std (grpo, dr_grpo, dapo and "
    "others have), got True",
    "--algorithm raft --algorithm.clip [0.2,0.2]": "algorithm raft has no key algorithm.clip (ppo, reinforce, rloo and "
    "others have), got [0.2, 0.2]",
    "--algorithm cispo --algorithm.dual_clip 3": "algorithm cispo has no key algorithm.dual_clip (ppo, reinforce, rloo "
    "and others have), got 3",
    "--algorithm online_dpo --algorithm.correction null": "algorithm online_dpo has no key algorithm.correction (ppo, "
    "reinforce, rloo and others have), got None",
    "--algorithm raft --algorithm.whiten_advantages false": "algorithm raft has no key algorithm.whiten_advantages "
    "(ppo, reinforce, rloo and others have), got False",
}
"""Keys that another algorithm reads, at their defaults too."""
RULES = {
    "--faults.check_weights true": ("faults.check_weights", "got placement None"),
    "--algorithm grpo --algorithm.whiten_shift_mean false": ("algorithm.whiten_shift_mean", "False"),
    "--algorithm grpo --algorithm.whiten_unbiased false": ("algorithm.whiten_unbiased", "False"),
    "--algorithm.kl.horizon 100": ("algorithm.kl.horizon", "100"),
    "--algorithm.kl.coef 0": ("algorithm.kl.coef", "got 0"),
    "--algorithm.kl null --reference.path x": ("reference.path", "got reference.path x"),
    "--algorithm dapo --reference.refresh_every 2": ("reference", "refresh_every 2"),
    "--algorithm.penalties.overlong 2": ("algorithm.penalties.overlong", "got 2.0"),
    "--algorithm.correction.low 0.5": ("method truncate masks", "got algorithm.correction.low 0.5"),
    "--algorithm.correction.count_masked false": ("masks nothing", "got algorithm.correction.count_masked False"),
    "--algorithm.entropy.coef 2": ("clip_cov reads share and bounds", "got algorithm.entropy.coef 2.0"),
    "--algorithm.entropy.method adaptive --algorithm.entropy.share 0.1": ("reads target and step", "entropy.share 0.1"),
    "--algorithm.entropy.method kl_cov --algorithm.entropy.bounds [0,1]": (
        "kl_cov reads share and coef",
        "bounds [0.0, 1.0]",
    ),
    "--algorithm.entropy.target 0.3": ("method clip_cov reads", "got algorithm.entropy.target 0.3"),
    "--algorithm.entropy.step 0.3": ("method clip_cov reads", "got algorithm.entropy.step 0.3"),
    "--algorithm.entropy.share 0": ("algorithm.entropy.share", "got 0"),
    "--ptx.sources [x]": ("ptx.coef", "got 0.0"),
    "--ptx.coef 1": ("ptx.sources", "got none"),
    "--environment.max_turns 4": ("environment.path", "got None"),
    "--algorithm grpo --environment.path a:B --rollout.endpoint true": ("rollout.endpoint is for programs", "a:B"),
    "--rollout.sampling.seed 3": ("rollout.sampling", "got seed 3"),
    "--rollout.sampling.stop x": ("rollout.sampling", "got stop x"),
    "--rollout.sampling.repetition_penalty 1.2": ("rollout.sampling", "got repetition_penalty 1.2"),
    "--actor.lora.rank 0": ("lora.rank", "got 0"),
    "--rollout.quantization int8 --rollout.backend module": ("rollout.backend module", "got rollout.quantization int8"),
    "--rollout.quantization int4": ("rollout.quantization", "int4"),
    "--rollout.backend vllm": ("rollout.vllm", "got no section"),
    "--rollout.vllm {}": ("rollout.vllm", "got none"),
    "--rollout.vllm.python p --rollout.vllm.urls [http://a]": ("rollout.vllm", "got both"),
    "--rollout.vllm.urls [a:8000]": ("rollout.vllm.urls", "got a:8000"),
    "--rollout.vllm.urls [http://a] --rollout.vllm.api_key secret": ("rollout.vllm.api_key", "got a text"),
    "--rollout.vllm.python p --rollout.vllm.api_key ${KEY}": ("rollout.vllm.api_key", "got rollout.vllm.python"),
    "--rollout.vllm.urls [http://a] --rollout.vllm.arguments [--x]": ("rollout.vllm.arguments", "got ['--x']"),
    "--rollout.vllm.urls [http://a] --rollout.kv_cache_gib 1": ("run already", "got rollout.kv_cache_gib 1"),
    "--rollout.vllm.python p --rollout.backend module": ("rollout.backend vllm", "got module"),
    "--rollout.vllm.python p --rollout.quantization int8": ("rollout.backend vllm", "got rollout.quantization int8"),
    "--rollout.vllm.python p --rollout.tensor_parallel 2": ("rollout.backend vllm", "got rollout.tensor_parallel 2"),
    "--rollout.vllm.python p --rollout.offload_states true": (
        "rollout.backend vllm",
        "got rollout.offload_states True",
    ),
    "--rollout.vllm.python p --rollout.sampling.top_p 0.9": ("one log-prob", "got rollout.sampling.top_p 0.9"),
    '--rollout.vllm.python p --rollout.sampling.response_format {"type":"json_object"}': (
        "one log-prob",
        "got rollout.sampling.response_format {'type': 'json_object'}",
    ),
    "--rollout.vllm.python p --placement separation": ("placement", "got placement separation"),
    "--rollout.vllm.python p --actor.lora.rank 4 --model.quantization nf4": ("model.quantization", "backend vllm"),
}
"""What a key needs: the key, and the value."""
READ = [
    "--algorithm.gae_lambda 0.9 --critic.gae_lambda 0.95 --algorithm.gamma 0.9 --critic.optimizer.lr 1e-5 "
    "--algorithm.whiten_unbiased false",
    "--algorithm reinforce_pp --algorithm.gamma 0.9",
    "--algorithm dapo --algorithm.dynamic_sampling.max_refills 3 --algorithm.penalties.overlong 2 "
    "--algorithm.divide_by_std false --algorithm.dual_clip 3",
    "--algorithm online_dpo --algorithm.beta 0.2 --reference.path x",
    "--algorithm raft --algorithm.selected_per_prompt 2",
    "--ptx.coef 1 --ptx.sources x --ptx.max_length 64",
    "--environment.path a:B --environment.max_turns 4",
    '--environment.path a:B --environment.options {"seed":-1}',
    "--algorithm.kl.target 3 --algorithm.kl.horizon 100",
    "--algorithm.correction.method mask --algorithm.correction.clip 3",
    "--actor.lora.rank 8 --critic.lora.rank 0 --rollout.kv_cache_gib 1 --rollout.max_lag 2 --algorithm.correction {}",
    "--algorithm.kl null --algorithm.penalties null --actor.zero.stage 2",
    "--algorithm.entropy.share 1e-3 --algorithm.entropy.bounds [2,3]",
    "--algorithm grpo --algorithm.entropy.method kl_cov --algorithm.entropy.coef 0.5",
    "--algorithm raft --algorithm.entropy.method adaptive --algorithm.entropy.target 0.3 --algorithm.entropy.step 1e-3",
    "--rollout.quantization int8 --algorithm.correction.method truncate",
    "--algorithm online_dpo --rollout.quantization int8",
    "--rollout.vllm.python p --rollout.vllm.arguments [--x] --rollout.kv_cache_gib 1 --rollout.max_lag 1",
    "--rollout.vllm.urls [http://a:1,https://b] --rollout.vllm.api_key ${KEY} --rollout.vllm.folder /shared",
    "--reward.components [rm,{'function':'a:b','weight':0.5}]",
    "--data.sources [a,{'path':'b','weight':0.5,'split_name':'x'}] --actor.optimizer.betas [0.8,0.99]",
]


def as_sections(words: list[str]) -> dict[str, Any]:
    """A command line as the content of a file."""
    sections: dict[str, Any] = {}
    for key, value in zip(words[::2], words[1::2], strict=True):
        *path, name = key[2:].split(".")
        place = sections
        for section in path:
            found = place.setdefault(section, {})
            place[section] = {"name": found} if isinstance(found, str) else found
            place = place[section]
        place[name] = float(value) if value == "1e-5" else yaml.safe_load(value)
    return sections


@pytest.mark.parametrize(("line", "error"), NOT_READ.items())
def test_a_key_that_is_not_read_is_refused_on_the_line_in_a_file_and_through_train(
    line: str, error: str, tmp_path: Path
) -> None:
    words, expected = line.split(), f"{error}: leave it out"
    file, whole = tmp_path / "c.yaml", tmp_path / "whole.yaml"
    file.write_text(yaml.safe_dump(as_sections(words)))
    whole.write_text(yaml.safe_dump({"rl": as_sections(words)}))
    inside = [word.replace("--", "--rl.") for word in words]
    in_pipeline = expected.replace("key algorithm", "key rl.algorithm").replace("got critic", "got rl.critic")
    spelled = {"[0.2,0.2]": "[0.2, 0.2]", "1e-5:": "1e-05:", "true:": "True:", "false:": "False:"}
    found = refused(parse_config, RLConfig, words)
    for text, value in spelled.items():
        found = found.replace(text, value)
    assert found == expected
    assert refused(parse_config, RLConfig, ["--config", str(file)]) == f"{file}: {expected}"
    assert refused(parse_config, PipelineConfig, ["--config", str(whole)]) == f"{whole}: {in_pipeline}"
    assert refused(parse_config, PipelineConfig, inside).split(", got ")[0] == in_pipeline.split(", got ")[0]


@pytest.mark.parametrize(("line", "parts"), RULES.items())
def test_a_key_without_effect_is_refused_by_key_and_value(line: str, parts: tuple[str, str]) -> None:
    message = refused(parse_config, RLConfig, line.split())
    assert all(part in message for part in parts) and ": " in message


def test_a_section_on_the_line_counts_key_by_key() -> None:
    assert refused(parse_config, RLConfig, ["--algorithm", "grpo", "--critic", "{path: x}"]).startswith(
        f"{NO_CRITIC} critic.path x"
    )


@pytest.mark.parametrize("line", READ)
def test_what_is_read_passes_and_what_is_saved_reads_back(line: str, tmp_path: Path) -> None:
    config = parse_config(RLConfig, line.split())
    save_config(config, tmp_path / "c.yaml")
    assert parse_config(RLConfig, ["--config", str(tmp_path / "c.yaml")]) == config


@pytest.mark.parametrize("name", RL_ALGORITHMS)
def test_a_saved_config_has_what_is_read_alone(name: str, tmp_path: Path) -> None:
    config = parse_config(RLConfig, ["--algorithm", name])
    assert type(config.algorithm) is RL_ALGORITHMS[name] and config.algorithm.name == name
    save_config(config, tmp_path / "c.yaml")
    assert parse_config(RLConfig, ["--config", str(tmp_path / "c.yaml")]) == config
    saved = read_config(tmp_path / "c.yaml")
    has_critic = name in ("ppo", "vapo")
    assert ("critic.optimizer.lr" in saved) == (config.critic is not None) == has_critic
    assert ("algorithm.gae_lambda" in saved) == (name == "ppo")
    assert ("algorithm.beta" in saved) == (name == "online_dpo") and saved["environment"] is None
    assert "environment.max_turns" not in saved and "data.max_length" not in saved and "ptx.max_length" not in saved
    assert "rollout.sampling.seed" not in saved and saved["rollout.sampling.temperature"] == 1.0


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_a_preference_loss_has_its_own_keys(name: str, tmp_path: Path) -> None:
    config = parse_config(PreferenceStepConfig, ["--algorithm", name])
    assert type(config.algorithm) is PREFERENCE_LOSSES[name]
    assert (config.reference is None) == (name in ("simpo", "orpo"))
    save_config(config, tmp_path / "c.yaml")
    assert parse_config(PreferenceStepConfig, ["--config", str(tmp_path / "c.yaml")]) == config
    own = {"cdpo": "label_smoothing", "simpo": "target_margin", "kto": "desirable_weight"}
    saved = {key for key in own.values() if f"algorithm.{key}" in read_config(config)}
    assert saved == {*own.values()} & {own.get(name)}


def test_a_config_may_be_built_in_python() -> None:
    assert RLConfig().critic is not None and RLConfig().algorithm == PPOConfig()
    with user_error("compares completions of one prompt, got rollout.sampling.n 1"):
        RLConfig(algorithm=OnlineDPOConfig())
    with user_error("algorithm reinforce has no critic"):
        RLConfig(algorithm=RL_ALGORITHMS["reinforce"](), critic=RLConfig().critic)


def test_the_last_word_counts_for_a_section_too(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("algorithm: {name: ppo, kl: null}\nactor: {lora: {rank: 4, alpha: 8}}\n")
    config = parse_config(RLConfig, ["--config", str(file)])
    assert config.algorithm.kl is None and config.actor.lora is not None and config.actor.lora.rank == 4
    config = parse_config(RLConfig, ["--config", str(file), "--actor.lora", "null", "--algorithm.kl.target", "3"])
    assert config.actor.lora is None and config.algorithm.kl is not None and config.algorithm.kl.coef == 0.05
    config = parse_config(RLConfig, ["--actor.lora.alpha", "8", "--actor.lora", "null", "--actor.lora.rank", "2"])
    assert config.actor.lora is not None and (config.actor.lora.rank, config.actor.lora.alpha) == (2, 16)
    refilled = [["--rollout.sampling.n", "2", "--algorithm.dynamic_sampling", word] for word in ("true", "{}")]
    assert parse_config(RLConfig, refilled[0]) == parse_config(RLConfig, refilled[1]) != RLConfig()


def test_the_critic_follows_the_actor_unless_it_is_set() -> None:
    config = parse_config(RLConfig, ["--actor.lora.rank", "8", "--actor.zero.stage", "2"])
    assert config.critic is not None and config.critic.lora is None and config.critic.zero is None
    assert config.critic_lora == config.actor.lora and config.critic_zero.stage == 2
    config = parse_config(RLConfig, ["--actor.lora.rank", "8", "--critic.lora.rank", "0", "--critic.zero.stage", "1"])
    assert config.critic_lora is None and config.critic_zero.stage == 1


@pytest.mark.parametrize(
    ("config_type", "line", "expected"),
    [
        (SFTConfig, "--distill.beta 0.5", "distill.teacher must name a model, got none"),
        (SFTConfig, "--condition.template x", "condition.template must contain {bucket}, got 'x'"),
        (
            PreferenceStepConfig,
            "--algorithm orpo --reference.logprobs live",
            "algorithm orpo has no reference, got reference.logprobs live",
        ),
        (PreferenceStepConfig, "--algorithm.label_smoothing 0", "algorithm dpo has no key algorithm.label_smoothing"),
        (SFTConfig, "--algorithm sft", "unknown option --algorithm"),
    ],
)
def test_other_steps_refuse_what_they_do_not_read(config_type: Any, line: str, expected: str) -> None:
    assert refused(parse_config, config_type, line.split()).startswith(expected)


def test_the_demos_own_keys_are_nobodys_mistake(tmp_path: Path) -> None:
    """The demo gives a critic and a KL coefficient of PPO's, which GRPO does not have: they are not the user's."""
    config = parse_config(PipelineConfig, ["--rl.algorithm", "grpo"], defaults=train.DEMO)
    assert config.rl.algorithm == RL_ALGORITHMS["grpo"]()
    save_config(config.rl, tmp_path / "c.yaml")
    again = parse_config(RLConfig, ["--config", str(tmp_path / "c.yaml")])
    assert again.rollout == config.rl.rollout and not [key for key in read_config(again) if "critic" in key]


def test_what_may_change_when_a_run_resumes_is_marked_on_the_field() -> None:
    free = (
        "output_dir resume logging.every faults.max_skipped_steps data.cache_dir train.save_every train.keep_best "
        "train.micro_batch_tokens train.micro_batch_size actor.zero.stage critic.zero critic.zero.stage "
        "model.gradient_checkpointing model.activation_offload rollout.offload_states rollout.offload_frozen "
        "rollout.kv_cache_gib rollout.keep_weights rollout.max_decode_rows rollout.tensor_parallel rollout.vllm.urls"
    ).split()
    fixed = (
        "seed model.path model.dtype data.sources algorithm.name algorithm.kl.coef algorithm.beta actor.lora.rank "
        "actor.optimizer.lr critic.gae_lambda rollout.sampling.temperature train.epochs rollout.prompts_per_step "
        "train.max_steps train.eval_every rollout.max_lag rollout.quantization"
    ).split()
    assert [key for key in free if not is_mutable(RLConfig, key)] == []
    assert [key for key in fixed if is_mutable(RLConfig, key)] == []
    before, now = ({key: number for key in free + fixed} for number in (0, 1))
    assert changed_keys(RLConfig, before, now) == sorted(fixed)


@pytest.mark.parametrize("kind", [SFTConfig, RewardConfig, PreferenceStepConfig, RLConfig, PipelineConfig])
def test_a_learning_rate_is_derived_unless_the_user_gives_one(kind: Any, tmp_path: Path) -> None:
    """The width is known only once the model is read: the config, its file and a resumed run keep null, not a number
    that another model would not have."""
    config = parse_config(kind, [])
    rates = {key: value for key, value in read_config(config).items() if key.endswith("optimizer.lr")}
    assert rates and {*rates.values()} == {None}
    save_config(config, tmp_path / "c.yaml")
    again = parse_config(kind, ["--config", str(tmp_path / "c.yaml")])
    assert again == config and changed_keys(kind, read_config(tmp_path / "c.yaml"), read_config(again)) == []
    for key in rates:
        given = parse_config(kind, [f"--{key}", "3e-5"])
        assert read_config(given)[key] == 3e-5
        assert changed_keys(kind, read_config(config), read_config(given)) == [key]


@pytest.mark.parametrize(
    ("learning", "width", "lora", "expected"),
    [
        ("sft", 4096, None, 2e-5),
        ("reward", 4096, None, 1e-5),
        ("preference", 4096, None, 1e-6),
        ("actor", 4096, None, 1e-6),
        ("critic", 4096, None, 1e-5),
        ("actor", 576, None, 7.1e-6),
        ("critic", 576, None, 7.1e-5),
        ("actor", 8192, None, 5e-7),
        ("actor", 4096, LoraConfig(rank=16), 1e-5),
        ("actor", 4096, LoraConfig(rank=256), 1e-5),
        ("actor", 4096, LoraConfig(alpha=32), 1e-5),
        ("actor", 4096, LoraConfig(alpha=128), 2.5e-6),
        ("sft", 576, LoraConfig(), 1.4e-3),
    ],
)
def test_a_derived_rate_is_the_published_one_scaled_by_width_and_adapters(
    learning: Learning, width: int, lora: LoraConfig | None, expected: float
) -> None:
    rate, source = derived_rate(learning, width=width, lora=lora)
    assert rate == expected
    assert source == f"width {width}" + ("" if lora is None else f" and adapters of alpha {lora.alpha:g}")


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
        ("--rollout.prompts_per_step 25 --rollout.sampling.n 2", 25, 2),
        ("--rollout.prompts_per_step 16 --train.micro_batch_size 8", 16, 2),
        ("--rollout.prompts_per_step 6 --algorithm.mini_batches 6", 6, 6),
        ("--algorithm remax --rollout.prompts_per_step 8", 8, 1),
        ("--algorithm remax --algorithm.mini_batches 2", 256, 2),
    ],
)
def test_a_rollout_is_cut_into_what_it_divides_into(line: str, prompts: int, mini_batches: int) -> None:
    config = parse_config(RLConfig, line.split())
    assert (config.rollout.prompts_per_step, config.algorithm.mini_batches) == (prompts, mini_batches)
    assert config.algorithm.clip_is_idle == (mini_batches == 1 and not config.algorithm.single_update)


def test_algorithms_of_one_update_are_those_whose_papers_do_not_clip() -> None:
    once = {name for name, kind in RL_ALGORITHMS.items() if kind.single_update}
    assert once == {"reinforce", "rloo", "remax", "online_dpo", "raft"}
    for name in RL_ALGORITHMS:
        config = parse_config(RLConfig, ["--algorithm", name])
        assert config.algorithm.updates_once == (name in once) and not config.algorithm.clip_is_idle
    assert dataclasses.replace(RL_ALGORITHMS["grpo"](), mini_batches=1).clip_is_idle
