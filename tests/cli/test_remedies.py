"""What the messages of commands name can be typed: `CommandLine` and `refused` check every error of other tests."""

from __future__ import annotations

import pytest

from hybrid_rlhf.configs.pipeline import PipelineConfig
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.runtime.command_line import parse_config
from tests.support.errors import refused
from tests.support.remedies import named_keys, require_accepted


def test_keys_and_values_of_a_message_are_found() -> None:
    """The check cannot pass because it sees nothing."""
    found = dict(named_keys("zero.stage 0 in x.json: set zero.stage to 2, or give --actor.lora.rank 8 and --json"))
    assert found == {"zero.stage": "2", "actor.lora.rank": "8"}
    assert [*named_keys("unknown option --data.pth: the nearest is data.sources")] == [("data.sources", "")]
    for message in ("a: give --zero.stage 2", "a: give --rollout.backend nonsense", "set train.max_step to 3"):
        with pytest.raises(AssertionError, match="names "):
            require_accepted(message, [RLConfig])


def test_a_key_that_is_gone_names_its_successor_through_train() -> None:
    message = refused(parse_config, PipelineConfig, ["--rl.rollout.partial", "true"])
    assert message.startswith("unknown option --rl.rollout.partial: rl.rollout.max_lag is the number of steps")
