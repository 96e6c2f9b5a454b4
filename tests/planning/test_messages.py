"""The small exchanges of a step: as many as the planner prices between hosts."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hybrid_rlhf.planning.costs.step import MESSAGES
from hybrid_rlhf.planning.machines.layers import TimedModel, save_timed_models
from hybrid_rlhf.rl.build import RL
from hybrid_rlhf.runtime.observability.timers import Timers
from hybrid_rlhf.runtime.world import World
from tests.support.ranks import run_ranks

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
RANKS = 2
UPDATES = 4


class Counts:
    """Collectives of this process by phase and kind, once `watch` has replaced torch's functions."""

    def __init__(self) -> None:
        self.counted: Counter[tuple[str, str]] = Counter()
        self._phases = ["loop"]

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        """Count from now on."""
        for name in ("all_reduce", "all_gather", "broadcast", "all_to_all_single"):
            self._count(patch, name, getattr(distributed_c10d, name))
        timed = Timers.__call__

        @contextlib.contextmanager
        def call(timers: Timers, name: str) -> Iterator[None]:
            self._phases.append(name)
            with timed(timers, name):
                yield
            self._phases.remove(name)

        patch.setattr(Timers, "__call__", call)

    def _count(self, patch: pytest.MonkeyPatch, name: str, real: Any) -> None:
        def counting(*arguments: Any, **options: Any) -> Any:
            self.counted[self._phases[-1], name] += 1
            return real(*arguments, **options)

        patch.setattr(distributed_c10d, name, counting)
        patch.setattr(dist, name, counting)


def counted_step(world: World, folder: str) -> dict[str, int]:
    """Collectives of the third of four steps of PPO, as `phase kind`; the main rank writes models and rows."""
    counts, place = Counts(), Path(folder)
    by_step: list[dict[str, int]] = []

    def told(step: int, metrics: Any) -> None:
        by_step.append({" ".join(key): number for key, number in counts.counted.items()})
        counts.counted.clear()

    if world.is_main:
        save_timed_models(place, TimedModel(2, 64), template=TEMPLATE)
        rows = [json.dumps({"prompt": f"{number:032}"}) for number in range(16 * 5)]
        (place / "rows.jsonl").write_text("\n".join(rows))
    world.barrier()
    run = RL(
        model=place / "actor",
        reward=str(place / "reward"),
        data={"sources": [str(place / "rows.jsonl")], "eval_fraction": 0.0, "cache_dir": str(place / "cache")},
        callbacks=[told],
        output_dir=str(place / "run"),
        rollout={"prompts_per_step": 16, "max_prompt_tokens": 64, "sampling": {"max_new_tokens": 16}},
        algorithm={"name": "ppo", "mini_batches": UPDATES},
        train={"max_steps": 4},
        logging={"sinks": []},
    )
    with pytest.MonkeyPatch.context() as patch:
        counts.watch(patch)
        with contextlib.redirect_stdout(open(os.devnull, "w")):
            run.train()
    return by_step[-2]


@pytest.mark.slow
def test_a_step_makes_the_exchanges_that_the_planner_prices(tmp_path: Path) -> None:
    """Over a link of 20 ms they are most of a step of a small model; the plan knew of none."""
    folder = tmp_path / "run"
    folder.mkdir()
    counted = run_ranks(counted_step, RANKS, tmp_path / "ranks", str(folder))[0]
    priced = {
        "loop all_reduce": sum(MESSAGES[name].reductions for name in ("loop", "weight_sync")),
        "loop all_gather": MESSAGES["gather"].gathers + MESSAGES["loop"].gathers,
        "loop broadcast": 2,  # an object, beside the samplers' completions
        "scoring all_reduce": MESSAGES["values"].reductions,
        "scoring all_gather": 2 * MESSAGES["scoring"].gathers + MESSAGES["values"].gathers,
        "training all_gather": MESSAGES["training"].gathers,
        # besides the gradients of actor and critic
        "training all_reduce": MESSAGES["training"].reductions + (MESSAGES["training"].per_update + 2) * UPDATES,
        # these are priced by their bytes
        "scoring all_to_all_single": 3,
        "training all_to_all_single": 1,
    }
    assert counted == priced
