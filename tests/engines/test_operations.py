"""Operations of training by the formula, and those that torch counts while a tiny model trains."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from hybrid_rlhf.configs.sections.model import LoraConfig, ModelConfig
from hybrid_rlhf.configs.sections.training import ZeroConfig
from hybrid_rlhf.engines.builder import EngineSpec, build_actor, build_engine
from hybrid_rlhf.engines.operations import Operations, training_operations
from hybrid_rlhf.models.lora import add_lora
from hybrid_rlhf.models.policy import Policy, Scorer
from hybrid_rlhf.runtime.world import World
from tests.support.engines import actor_spec
from tests.support.families import variant
from tests.support.tiny import tiny_model, tiny_scorer

ROWS, LENGTH, RESPONSE = 3, 24, 5


def counted(lm: PreTrainedModel, response: int) -> int:
    """Operations of a forward and a backward of rows without padding, by torch."""
    lm.set_attn_implementation("eager")  # of torch's others the counter does not know all
    lm.set_experts_implementation("eager")
    lm.enable_input_require_grads()  # else the first layer's products have no gradient of their inputs
    ids = torch.randint(3, 100, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    wanted = torch.arange(LENGTH).expand(ROWS, -1) >= LENGTH - response
    mask = torch.ones_like(wanted)
    with FlopCounterMode(display=False) as counter:
        if lm.get_output_embeddings() is None:
            Scorer(lm)(ids, mask).sum().backward()
        else:
            Policy(lm)(ids, mask, wanted)[0].sum().backward()
    return counter.get_total_flops()


def expected(lm: PreTrainedModel, response: int) -> float:
    """By the formula, with what is computed beyond it: the half of attention that is masked, the logits again in a
    backward, the scorer's head."""
    operations = training_operations(lm)
    ((window, of_pair),) = operations.attention
    assert window == math.inf
    rows = torch.tensor([LENGTH] * ROWS)
    more = of_pair * ROWS * LENGTH * (LENGTH - 1) / 2
    if (head := lm.get_output_embeddings()) is not None:
        more += 2 * head.weight.numel() * ROWS * response
    else:
        more += 6 * lm.config.hidden_size * ROWS * LENGTH
    return operations.of_rows(rows, head_tokens=ROWS * response) + more


@pytest.mark.parametrize("response", [RESPONSE, LENGTH - 1])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("kind", ["dense", "tied", "mixture", "scorer"])
def test_operations_are_those_that_training_makes(kind: str, lora: bool, response: int) -> None:
    """Of all tokens in the head, all experts, or six for each frozen weight, the utilisation would be too high."""
    lm: Any = {
        "dense": tiny_model,
        "tied": partial(tiny_model, tie_word_embeddings=True),
        "mixture": partial(variant, "qwen3_moe"),
        "scorer": tiny_scorer,
    }[kind]()
    if lora:
        targets = ["q_proj", "o_proj"]  # peft computes the whole product of an expert's factors
        add_lora(lm, LoraConfig(rank=4, target_modules=targets), "scorer" if kind == "scorer" else "causal_lm", seed=0)
    assert expected(lm, response) == counted(lm, response)


def test_a_window_limits_attention() -> None:
    """By pairs of tokens: alternating layers of Gemma 3, of which every second has a window."""
    lm = variant("gemma3", num_hidden_layers=2, sliding_window=4, layer_types=["sliding_attention", "full_attention"])
    operations = training_operations(lm)
    of_pair = 6 * 2 * lm.config.num_attention_heads * lm.config.head_dim
    assert dict(operations.attention) == {4.0: of_pair, math.inf: of_pair}
    pairs = sum(1 for query in range(9) for key in range(query + 1) if query - key < 4) + 9 * 10 / 2
    rest = operations._replace(attention=())
    lengths = torch.tensor([9])
    assert operations.of_rows(lengths, head_tokens=3) == rest.of_rows(lengths, head_tokens=3) + of_pair * pairs


def test_operations_do_not_depend_on_the_partition(model_folder: Path, world: World) -> None:
    """ZeRO-3 leaves empty weights; a frozen model trains nothing."""
    plain, sharded = (build_actor(actor_spec(model_folder, stage=stage, lora=4), world) for stage in (0, 3))
    assert plain.operations == sharded.operations == plain.facts.operations
    assert plain.operations.token > 0 and plain.operations.head_token > 0
    frozen = build_engine(EngineSpec("reference", str(model_folder), ModelConfig(), ZeroConfig(), 0), world)
    assert frozen.operations == Operations()
