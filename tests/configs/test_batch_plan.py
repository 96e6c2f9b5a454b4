from __future__ import annotations

import re
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.model import ModelConfig
from hybrid_rlhf.configs.sections.training import LoopConfig, MicroBatches
from hybrid_rlhf.loop.batch_plan import BatchPlan, plan_batch, plan_rollout
from tests.support.errors import refused

small = st.integers(1, 12)


def planned(plan: Callable[[int], BatchPlan], size: int) -> tuple[BatchPlan | None, list[int]]:
    """The plan of a size; or None and the sizes that the error names, which have one."""
    try:
        return plan(size), []
    except UserError as error:
        nearest = [int(n) for n in re.findall(r"\d+", str(error).split("nearest")[1])]
        assert nearest and all(map(plan, nearest))
        return None, nearest


@given(st.integers(1, 200), small, st.one_of(st.none(), small))
def test_a_plan_multiplies_out_or_names_sizes_that_do(rows: int, ranks: int, micro: int | None) -> None:
    found, nearest = planned(
        lambda size: plan_batch(global_batch_size=size, ranks=ranks, micro_batches=MicroBatches(micro)), rows
    )
    if found is None:
        assert min(abs(size - rows) for size in nearest) < ranks * (micro or 1)
    else:
        assert found.global_batch_size == rows and (micro is None or rows % (ranks * micro) == 0)


def test_the_plan_says_what_a_micro_batch_is() -> None:
    plan = plan_batch(global_batch_size=4, ranks=1, micro_batches=MicroBatches(rows=1))
    assert plan.describe() == "batch plan: 4 rows per update over 1 rank, micro-batches of 1 row"


def test_micro_batches_are_smaller_on_a_cpu_unless_they_are_set() -> None:
    """8,192 tokens take gigabytes of a host and save no time there."""
    assert LoopConfig().micro_batches("cpu") == MicroBatches(tokens=2048)
    assert LoopConfig().micro_batches("cuda") == MicroBatches(tokens=8192, forward_factor=4)
    given = LoopConfig(micro_batch_tokens=100)
    for device, factor in (("cpu", 1), ("cuda", 4)):
        sizes = MicroBatches(tokens=200, ranks=2, forward_factor=factor)
        assert given.micro_batches(device, ModelConfig(sequence_parallel=2)) == sizes
    assert LoopConfig(micro_batch_size=3).micro_batches("cuda").forward_factor == 1


def test_the_error_says_rule_value_and_fix() -> None:
    assert refused(plan_batch, global_batch_size=32, ranks=3, micro_batches=MicroBatches(rows=4)) == (
        "train.global_batch_size must be a multiple of 3 ranks x 4 rows = 12, got 32: the nearest are 24 and 36"
    )


@given(st.integers(1, 60), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.sampled_from([None, 1, 2]))
def test_a_rollout_divides_or_names_prompt_counts_that_do(
    prompts: int, samples: int, mini: int, ranks: int, micro: int | None
) -> None:
    found, _ = planned(
        lambda count: plan_rollout(
            prompts_per_step=count,
            completions_per_prompt=samples,
            mini_batches=mini,
            ranks=ranks,
            micro_batches=MicroBatches(micro),
        ),
        prompts,
    )
    assert found is None or found.global_batch_size * mini == prompts * samples
