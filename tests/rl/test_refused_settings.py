"""Settings of RL that cannot be, and what is said of them."""

from __future__ import annotations

import shlex

import pytest

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.runtime.command_line import parse_config

STREAMING = "--rollout.streaming.max_lag 2"
REFUSED = {
    "--algorithm grpo --rollout.sampling.n 1": "algorithm grpo compares completions of one prompt, got "
    "rollout.sampling.n 1: give 2 or more",
    "--algorithm online_dpo --rollout.sampling.n 4": "algorithm online_dpo learns from pairs, got "
    "rollout.sampling.n 4: give 2",
    "--algorithm raft --algorithm.kl.coef 0.1": "algorithm raft selects by scores, got algorithm.kl.where reward: give "
    "--algorithm.kl.where loss and --algorithm.kl.estimator k3",
    "--algorithm.dynamic_sampling true": "algorithm.dynamic_sampling compares completions of one prompt, got "
    "rollout.sampling.n 1: give 2 or more",
    "--algorithm raft --algorithm.selected_per_prompt 8": "algorithm.selected_per_prompt must be below "
    "rollout.sampling.n 8, got 8: lower it",
    "--algorithm dapo --reference.refresh_every 4": "algorithm dapo without algorithm.kl has no reference, got "
    "reference.path None and refresh_every 4: leave the section out",
    "--algorithm.kl.target 3 --algorithm.kl.coef 0": "algorithm.kl.coef must be above 0, got 0.0: give --algorithm.kl "
    "null for no penalty",
    "--algorithm.correction.low 0.5": "algorithm.correction.method truncate masks nothing, got "
    "algorithm.correction.low 0.5: leave it out",
    "--algorithm.correction.method truncate --algorithm.correction.count_masked false": "algorithm.correction.method "
    "truncate masks nothing, got algorithm.correction.count_masked False: leave it out",
    "--algorithm.correction.method mask --algorithm.correction.low 2": "algorithm.correction.low must be in [0, 1], "
    "got 2.0: leave it out",
    "--algorithm.correction.reject.high 0.5": "algorithm.correction.reject.high must be 1 or more, got 0.5: raise it, "
    "for example to 1.001",
    "--algorithm.penalties.overlong_fraction 2": "algorithm.penalties.overlong_fraction must be in [0, 1], got 2.0: "
    "give for example 0.2",
    "--algorithm.entropy.bounds [2,1]": "algorithm.entropy.bounds is [low, high], got [2.0, 1.0]: exchange them",
    "--algorithm rloo --algorithm.entropy.method kl_cov": "algorithm.entropy.method kl_cov penalizes changes since the "
    "first update of a rollout, got one update: give algorithm.mini_batches or algorithm.epochs 2 or more, or method "
    "clip_cov",
    "--algorithm raft --algorithm.entropy.share 0.1": "algorithm raft has equal advantages, which covary with nothing, "
    "got algorithm.entropy.method clip_cov: give adaptive, or leave it out",
    "--algorithm gpro": "algorithm must be one of ppo, reinforce, rloo, remax, reinforce_pp, "
    "reinforce_pp_baseline, grpo, dr_grpo, dapo, gdpo, pass_at_k, gspo, gmpo, cispo, sapo, vespo, "
    "vapo, online_dpo, raft, got gpro: the nearest is grpo",
    "--algorithm sapo --algorithm.gate_temperatures [0,1]": "algorithm.gate_temperatures must be above 0, got "
    "[0.0, 1.0]: raise it, for example to [1.0, 1.05]",
    "--teacher.coef 2": "teacher.path must name a model, got none: give --teacher.path FOLDER",
    "--algorithm raft --teacher.path x": "teacher gives each token an advantage, got algorithm raft, which selects "
    "completions: give another, such as grpo",
    "--reward.components [runs/teacher,rm]": "reward.components: a reward model must not have the name of a role, got "
    "teacher: give the component a name",
    "--algorithm pass_at_k --algorithm.k 8": "algorithm.k must be below rollout.sampling.n 8, got 8: lower it",
    "--rollout.async_sampling.policy_lag 0 --rollout.kv_cache_gib 1": "policy_lag must be 1 or more, got 0",
    "--rollout.async_sampling.policy_lag 1 --rollout.keep_weights true": "keep_weights True: leave it out",
    "--rollout.async_sampling.policy_lag 1 --rollout.tensor_parallel 2": "tensor_parallel 2: give 1",
    "--rollout.async_sampling.policy_lag 1 --rollout.backend module": "backend module: leave it out",
    "--rollout.partial.extra_prompts 0": "must be in (0, 1], got 0",
    "--rollout.partial.max_lag 0": "max_lag must be 1 step or more, got 0",
    "--rollout.partial.max_lag 1 --rollout.backend module": "rollout.backend module has no inference weights",
    "--rollout.partial.max_lag 1 --environment.path x.py:X": "got the section environment",
    f"{STREAMING} --rollout.quantization int8": "got rollout.quantization int8: leave it out",
    f"{STREAMING} --rollout.partial.extra_prompts 0.5": "rollout.partial",
    f"{STREAMING} --rollout.async_sampling.policy_lag 1": "rollout.async_sampling",
    f"{STREAMING} --rollout.backend module": "rollout.backend module: leave it out",
    f"{STREAMING} --placement separation --actor.ema_decay 0.9": "actor.ema_decay 0.9: leave one out",
    "--environment.path calculator": "must be module:Class",
    "--environment.path a:B --environment.max_turns 0": "max_turns must be 1 or more",
    "--environment.path a:B --environment.timeout_seconds 0": "timeout_seconds must be above 0",
    "--environment.path a:B --environment.options 3": "must be dict",
    "--environment.path a:B --environment.options '{1: 2}'": "options are names",
    "--environment.program a:b --environment.options '{d: {1: 2}}'": "options are names",
    "--environment.path a:B --environment.options '{d: .nan}'": "options are names",
    "--environment.options '{tries: 2}'": "environment.path must be module:Class",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_cannot_be_is_refused(line: str) -> None:
    with pytest.raises(UserError) as error:
        parse_config(RLConfig, shlex.split(line))
    assert REFUSED[line] in str(error.value)
