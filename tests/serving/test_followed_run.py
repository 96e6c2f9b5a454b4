"""A server that follows a run: what a checkpoint has trained, however it was sharded, and the answers that have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybrid_rlhf.configs.sections.training import CheckpointConfig
from hybrid_rlhf.engines.builder import build_actor
from hybrid_rlhf.engines.partition import full_tensors
from hybrid_rlhf.engines.saved.checkpoints import CheckpointWriter, LoopState
from hybrid_rlhf.engines.saved.training_state import TrainingState
from hybrid_rlhf.generation import GenerationEngine, SamplingParams
from hybrid_rlhf.runtime.files.checkpoint_folder import newest_valid
from hybrid_rlhf.runtime.world import World
from hybrid_rlhf.serving.followed_run import read_trained
from tests.support.clock import wait_until
from tests.support.engines import actor_spec, train_step
from tests.support.errors import user_error
from tests.support.marks import faults, slow
from tests.support.ranks import run_ranks
from tests.support.runs import rl_line, run_python, sft_line
from tests.support.services import Server
from tests.support.serving import server_process
from tests.support.tiny import tiny_model

PROMPT = [7, 8, 9, 30]
LENGTH = '[{name: length, function: "tests.support.board:length_reward"}]'
GREEDY = SamplingParams(max_new_tokens=20, temperature=0.0, min_new_tokens=20)


def trained(world: World, path: Path, folder: Path, settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The weights after three steps, adapters merged, of which there is a checkpoint."""
    engine = build_actor(actor_spec(path, **settings), world)
    for _ in range(3):
        train_step(engine, world)
    writer = CheckpointWriter(folder, {"actor": TrainingState(engine)}, world, CheckpointConfig(save_async=False))
    lora = actor_spec(path, **settings).lora
    config = {} if lora is None else {"lora.rank": lora.rank, "lora.alpha": lora.alpha}
    writer.save(LoopState(3, {}), config=config)
    return {name: value.clone() for name, value in full_tensors(engine.lm, world) if value is not None}


@pytest.mark.parametrize(
    "settings",
    [
        {"stage": 3, "dtype": "bfloat16"},
        {"stage": 2, "tensor_parallel": 2},
        {"stage": 3, "lora": 4},
    ],
    ids=str,
)
def test_every_sharding_is_read(settings: dict[str, Any], model_folder: Path, tmp_path: Path) -> None:
    """Partitions of two ranks, parts of weights along both dimensions, and the factors of an adapter; by no model of
    another size."""
    expected = run_ranks(trained, 2, tmp_path / "w", model_folder, tmp_path / "run", settings)[0]
    checkpoint = newest_valid(tmp_path / "run")
    assert checkpoint is not None
    lm = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    before = {name: value.clone() for name, value in lm.named_parameters()}
    with torch.no_grad():
        factors = read_trained(lm, checkpoint)
        assert bool(factors) == ("lora" in settings)
        for name, change in factors.items():
            lm.get_parameter(name).add_(change.up @ change.down)
    assert not torch.equal(
        lm.get_parameter("model.layers.0.mlp.up_proj.weight"), before["model.layers.0.mlp.up_proj.weight"]
    )
    for name, value in lm.named_parameters():
        torch.testing.assert_close(value.data.to(expected[name].dtype), expected[name], atol=1e-6, rtol=0, msg=name)
    for other, rule in (
        (tiny_model(num_hidden_layers=1), "of the served model"),
        # a larger weight holds every element of a smaller one, in other places
        (tiny_model(intermediate_size=16), "elements in .* instead of .*: serve the model that the run began with"),
    ):
        with user_error(rule):
            read_trained(other, checkpoint)
    (checkpoint / "manifest.json").unlink()
    assert newest_valid(tmp_path / "run") is None, "it is not complete"


@pytest.mark.parametrize("kind", [slow("weights"), faults("adapter")])
def test_a_run_is_followed_to_its_newest_checkpoint(
    kind: str, model_folder: Path, pair_rows: Path, tmp_path: Path
) -> None:
    """Requests for the model have the weights of the run's checkpoint, or its adapter: those that it saves at its
    end."""
    run = tmp_path / "run"
    log = tmp_path / "log.txt"
    with (
        log.open("w") as errors,
        server_process(f"{model_folder} --model_name m --follow {run}", errors=errors) as (_, url),
    ):
        server = Server(url)
        wait_until(lambda: f"{run} has no complete checkpoint yet" in log.read_text())
        assert server.client.models.retrieve("m").version == "0"
        if kind == "weights":
            line = sft_line(
                run, model_folder, pair_rows, "--data.eval_fraction 0 --train.max_steps 2 --optimizer.lr 0.05"
            )
        else:
            more = "--algorithm.name grpo --actor.lora.rank 4 --actor.optimizer.lr 0.05 --reward.components"
            line = rl_line(run, model_folder, pair_rows, more, LENGTH)
        done = run_python([*line, "--train.save_every", "2"])
        assert done.returncode == 0, done.stderr
        saved = AutoModelForCausalLM.from_pretrained(run if kind == "weights" else run / "actor")
        wait_until(lambda: server.client.models.retrieve("m").version == "step_2")
        assert f"serving the {kind} of {run / 'checkpoints' / 'step_2'}" in log.read_text()
        answer = server.complete(PROMPT, max_tokens=20, temperature=0, extra_body={"min_tokens": 20})
        engine = GenerationEngine.from_model(saved, stop_token_ids=[2])
        assert answer.system_fingerprint == "step_2"
        assert answer.choices[0].token_ids == engine.generate([PROMPT], GREEDY)[0][0].token_ids
        assert [(entry.id, hasattr(entry, "parent")) for entry in server.client.models.list()] == [("m", False)]
