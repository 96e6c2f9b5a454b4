from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_rlhf.configs.batch_plan import plan_batch, plan_rollout
from hybrid_rlhf.configs.errors import UserError

small = st.integers(1, 12)


@given(st.integers(1, 200), small, st.one_of(st.none(), small))
def test_a_plan_multiplies_out_or_names_sizes_that_do(rows: int, ranks: int, micro: int | None) -> None:
    def plan(size: int):  # type: ignore[no-untyped-def]
        return plan_batch(
            global_batch_size=size, ranks=ranks, micro_batch_size=micro, micro_batch_tokens=1000, max_length=100
        )

    try:
        found = plan(rows)
    except UserError as error:
        nearest = [int(n) for n in re.findall(r"\d+", str(error).split("nearest")[1])]
        assert nearest and all(plan(size).global_batch_size == size for size in nearest)
        assert min(abs(size - rows) for size in nearest) < ranks * (micro or 1)
    else:
        assert found.ranks * found.micro_batch_size * found.accumulation_steps == rows
        if micro is None:
            assert found.micro_batch_size <= 10


def test_the_micro_batch_is_the_largest_that_fits() -> None:
    plan = plan_batch(global_batch_size=64, ranks=2, micro_batch_size=None, micro_batch_tokens=1000, max_length=100)
    assert plan.micro_batch_size == 8
    assert plan.describe() == "batch plan: 64 rows an update = 2 ranks x 4 micro-batches x 8 rows"
    long = plan_batch(global_batch_size=4, ranks=1, micro_batch_size=None, micro_batch_tokens=10, max_length=100)
    assert long.micro_batch_size == 1


def test_the_error_says_rule_value_and_fix() -> None:
    with pytest.raises(UserError) as caught:
        plan_batch(global_batch_size=32, ranks=3, micro_batch_size=4, micro_batch_tokens=1, max_length=1)
    assert str(caught.value) == (
        "train.global_batch_size must be a multiple of 3 ranks x 4 rows = 12, got 32: the nearest are 24 and 36"
    )


@given(st.integers(1, 60), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_a_rollout_divides_or_names_prompt_counts_that_do(prompts: int, samples: int, mini: int, ranks: int) -> None:
    def plan(count: int):  # type: ignore[no-untyped-def]
        return plan_rollout(
            prompts_per_step=count, samples_per_prompt=samples, mini_batches=mini, ranks=ranks, micro_batch_size=None,
            micro_batch_tokens=1000, max_length=10,
        )  # fmt: skip

    try:
        found = plan(prompts)
    except UserError as error:
        nearest = [int(n) for n in re.findall(r"\d+", str(error).split("nearest")[1])]
        assert nearest and all(plan(count) for count in nearest)
    else:
        assert found.global_batch_size * mini == prompts * samples
