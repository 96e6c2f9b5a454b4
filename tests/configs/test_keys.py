"""Which keys a config has: those that its algorithm reads, and sections that exist once they are given; and defaults
that follow from other keys.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from hybrid_rlhf.configs.algorithms import RL_ALGORITHMS, OnlineDPOConfig, PPOConfig
from hybrid_rlhf.configs.parsing.building import build_config, read_words
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
    "--algorithm grpo --critic.optimizer.lr 0.5": f"{NO_CRITIC} critic.optimizer.lr 0.5",
    '--algorithm grpo --critic {"path":"x"}': f"{NO_CRITIC} critic.path x",
    "--algorithm rloo --algorithm.gamma 1": "algorithm rloo has no key algorithm.gamma (ppo, reinforce_pp, "
    "reinforce_pp_baseline and others have), got 1",
    "--algorithm.divide_by_std true": "algorithm ppo has no key algorithm.divide_by_std (grpo, dr_grpo, dapo and "
    "others have), got True",
    "--algorithm online_dpo --algorithm.correction null": "algorithm online_dpo has no key algorithm.correction (ppo, "
    "reinforce, rloo and others have), got None",
}
"""Keys that another algorithm reads, at their defaults too."""
RULES = {
    "--faults.check_weights true": ("faults.check_weights", "got placement None"),
    "--algorithm grpo --algorithm.whiten_shift_mean false": ("algorithm.whiten_shift_mean", "False"),
    "--algorithm grpo --algorithm.whiten_unbiased false": ("algorithm.whiten_unbiased", "False"),
    "--algorithm gspo --algorithm.clip_of probability": ("gspo clips the ratio of a sequence", "clip_of probability"),
    "--algorithm gdpo --algorithm.divide_by_mean true": ("each component of the reward", "divide_by_mean True"),
    "--algorithm pass_at_k --algorithm.divide_by_mean true": ("subsets of completions", "divide_by_mean True"),
    "--algorithm.clip_of probability --algorithm.dual_clip 3": ("algorithm.dual_clip bounds ratios", "got 3.0"),
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
    "--ptx.sources [x]": ("ptx.coef", "got 0.0"),
    "--environment.max_turns 4": ("environment.path", "got None"),
    "--algorithm grpo --environment.path a:B --rollout.endpoint true": ("rollout.endpoint is for programs", "a:B"),
    "--rollout.sampling.seed 3": ("rollout.sampling", "got seed 3"),
    "--rollout.quantization int8 --rollout.backend module": ("rollout.backend module", "got rollout.quantization int8"),
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
    "--rollout.vllm.python p --placement separation": ("placement", "got placement separation"),
    "--rollout.vllm.python p --actor.lora.rank 4 --model.quantization nf4": ("model.quantization", "backend vllm"),
}
"""What a key needs: the key, and the value."""
READ = [
    "--algorithm.gae_lambda 0.9 --critic.gae_lambda 0.95 --algorithm.gamma 0.9 --critic.optimizer.lr 1e-5 "
    "--algorithm.whiten_unbiased false",
    "--algorithm dapo --algorithm.dynamic_sampling.max_refills 3 --algorithm.penalties.overlong 2 "
    "--algorithm.divide_by_std false --algorithm.dual_clip 3",
    "--algorithm online_dpo --algorithm.beta 0.2 --reference.path x",
    "--algorithm raft --algorithm.selected_per_prompt 2",
    "--ptx.coef 1 --ptx.sources x --ptx.max_length 64",
    '--environment.path a:B --environment.options {"seed":-1}',
    "--algorithm.kl.target 3 --algorithm.kl.horizon 100",
    "--algorithm.correction.method mask --algorithm.correction.clip 3",
    "--actor.lora.rank 8 --critic.lora.rank 0 --rollout.kv_cache_gib 1 --rollout.max_lag 2 --algorithm.correction {}",
    "--algorithm.kl null --algorithm.penalties null --actor.zero.stage 2",
    "--algorithm.entropy.share 1e-3 --algorithm.entropy.bounds [2,3]",
    "--algorithm grpo --algorithm.entropy.method kl_cov --algorithm.entropy.coef 0.5",
    "--algorithm raft --algorithm.entropy.method adaptive --algorithm.entropy.target 0.3 --algorithm.entropy.step 1e-3",
    "--algorithm online_dpo --rollout.quantization int8",
    "--rollout.vllm.python p --rollout.vllm.arguments [--x] --rollout.kv_cache_gib 1 --rollout.max_lag 1",
    "--rollout.vllm.urls [http://a:1,https://b] --rollout.vllm.api_key ${KEY} --rollout.vllm.folder /shared",
    "--reward.components [rm,{'function':'a:b','weight':0.5}]",
    "--data.sources [a,{'path':'b','weight':0.5,'split_name':'x'}] --actor.optimizer.betas [0.8,0.99]",
]


@pytest.mark.parametrize(("line", "error"), NOT_READ.items())
def test_a_key_that_is_not_read_is_refused_on_the_line_in_a_file_and_through_train(line: str, error: str) -> None:
    expected = f"{error}: leave it out"
    assert refused(parse_config, RLConfig, line.split()) == expected
    _, layers, _ = read_words(line.split(), RLConfig)
    in_file = [dataclasses.replace(layer, origin="c.yaml") for layer in layers]
    assert refused(build_config, RLConfig, in_file) == f"c.yaml: {expected}"
    whole = [dataclasses.replace(layer, content={"rl": layer.content}) for layer in in_file]
    expected = expected.replace("key algorithm", "key rl.algorithm").replace("got critic", "got rl.critic")
    assert refused(build_config, PipelineConfig, whole) == f"c.yaml: {expected}"
    assert refused(parse_config, PipelineConfig, line.replace("--", "--rl.").split()) == expected


@pytest.mark.parametrize(("line", "parts"), RULES.items())
def test_a_key_without_effect_is_refused_by_key_and_value(line: str, parts: tuple[str, str]) -> None:
    message = refused(parse_config, RLConfig, line.split())
    assert all(part in message for part in parts) and ": " in message


@pytest.mark.parametrize("line", READ)
def test_what_is_read_passes_and_what_is_saved_reads_back(line: str, tmp_path: Path) -> None:
    config = parse_config(RLConfig, line.split())
    save_config(config, tmp_path / "c.yaml")
    assert parse_config(RLConfig, ["--config", str(tmp_path / "c.yaml")]) == config


OWNERS = {
    "critic.optimizer.lr": {"ppo", "vapo"},
    "algorithm.gae_lambda": {"ppo"},
    "algorithm.k": {"pass_at_k"},
    "algorithm.label_smoothing": {"cdpo"},
    "algorithm.desirable_weight": {"kto"},
}
"""Algorithms that have a key."""


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((RLConfig, name) for name in RL_ALGORITHMS),
        *((PreferenceStepConfig, name) for name in PREFERENCE_LOSSES),
    ],
)
def test_a_saved_config_has_what_is_read_alone(kind: Any, name: str, tmp_path: Path) -> None:
    config = parse_config(kind, ["--algorithm", name])
    assert config.algorithm.name == name and (config.reference is None) == (name in ("simpo", "orpo"))
    save_config(config, tmp_path / "c.yaml")
    assert parse_config(kind, ["--config", str(tmp_path / "c.yaml")]) == config
    saved = read_config(tmp_path / "c.yaml").keys()
    assert OWNERS.keys() & saved == {key for key, owners in OWNERS.items() if name in owners}
    assert not {"environment.max_turns", "ptx.max_length", "rollout.sampling.seed"} & saved


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
        (SFTConfig, "--distill.teacher x --loss dft", "distill has a loss of its own, got loss dft"),
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
        ("actor", 8192, None, 5e-7),
        ("actor", 4096, LoraConfig(rank=16), 1e-5),
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
        ("--algorithm online_dpo", 128, 1),
        ("--rollout.prompts_per_step 6", 6, 3),
        ("--rollout.prompts_per_step 25", 25, 1),
        ("--rollout.prompts_per_step 25 --rollout.sampling.n 2", 25, 2),
        ("--rollout.prompts_per_step 16 --train.micro_batch_size 8", 16, 2),
        ("--rollout.prompts_per_step 6 --algorithm.mini_batches 6", 6, 6),
        ("--algorithm remax --algorithm.mini_batches 2", 256, 2),
    ],
)
def test_a_rollout_is_cut_into_what_it_divides_into(line: str, prompts: int, mini_batches: int) -> None:
    config = parse_config(RLConfig, line.split())
    assert (config.rollout.prompts_per_step, config.algorithm.mini_batches) == (prompts, mini_batches)
    assert config.algorithm.clip_is_idle == (mini_batches == 1 and not config.algorithm.single_update)


def test_algorithms_of_one_update_are_those_whose_papers_do_not_clip() -> None:
    once = {name for name in RL_ALGORITHMS if parse_config(RLConfig, ["--algorithm", name]).algorithm.updates_once}
    assert once == {"reinforce", "rloo", "remax", "online_dpo", "raft"}
