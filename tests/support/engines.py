"""Training engines of a tiny actor: settings, one update, and a sequence of updates, generation and saving."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from hybrid_rlhf.configs.sections.model import LoraConfig, ModelConfig
from hybrid_rlhf.configs.sections.training import OptimizerConfig, ZeroConfig
from hybrid_rlhf.engines import builder
from hybrid_rlhf.engines.builder import EngineSpec, build_actor
from hybrid_rlhf.engines.hybrid import HybridEngine
from hybrid_rlhf.engines.partition import full_tensors
from hybrid_rlhf.functional.losses import sft_loss
from hybrid_rlhf.generation import SamplingParams
from hybrid_rlhf.generation.model.decoder import Decoder
from hybrid_rlhf.generation.weights.probe import probe_logits
from hybrid_rlhf.loop.saving import save_adapter
from hybrid_rlhf.models.head_check import probe_tokens
from hybrid_rlhf.models.lora import has_lora
from hybrid_rlhf.models.pretrained.saving import save_model
from hybrid_rlhf.runtime.world import World
from tests.support.tiny import tiny_tokenizer

PROMPTS = [[5, 6, 7], [9, 8], [4, 4, 4, 4]]


def moments_in_8_bits_here() -> None:
    """Let this process train with moments in 8 bits on its CPU, which is refused for its speed only."""
    builder._require_optimizer = lambda section, device: None


def actor_spec(
    path: Path,
    *,
    stage: int = 0,
    lora: int = 0,
    dtype: str = "float32",
    lr: float = 1e-2,
    quantization: Literal["nf4"] | None = None,
    optimizer: Literal["adamw", "adamw_8bit", "muon"] = "adamw",
    tensor_parallel: int = 1,
    **zero: bool,
) -> EngineSpec:
    """An actor that trains from the model of a folder, at a constant learning rate."""
    return EngineSpec(
        "actor",
        str(path),
        ModelConfig(dtype=dtype, quantization=quantization, tensor_parallel=tensor_parallel),
        ZeroConfig(stage=stage, **zero),
        0,  # type: ignore[arg-type]
        OptimizerConfig(
            name=optimizer,
            lr=lr,
            schedule="constant",
            warmup_fraction=0.0,
            max_grad_norm=0.0 if optimizer == "muon" else 1.0,
        ),
        LoraConfig(rank=lora) if lora else None,
        10,
    )


def token_rows() -> torch.Tensor:
    """Four rows of random tokens, the same in each call."""
    return torch.randint(3, 200, (4, 10), generator=torch.Generator().manual_seed(0))


def train_step(engine: Any, world: World) -> float:
    """One update on four rows, shared over the ranks; the loss of all."""
    ids = token_rows()[world.rank :: world.size].to(world.device)
    mask = torch.ones_like(ids, dtype=torch.bool)
    total = 0.0
    for row in range(len(ids)):
        logprobs, _ = engine(ids[row : row + 1], mask[row : row + 1], mask[row : row + 1])
        loss = sft_loss(logprobs, mask=mask[row : row + 1])
        engine.backward(loss.total, count=36)
        total += float(loss.total.detach())
    engine.step()
    return float(world.all_reduce(torch.tensor(total, device=world.device)))


def state_of(engine: HybridEngine) -> list[torch.Tensor]:
    """Copies of this rank's weights, gradients, master weights and optimizer states."""
    tensors = []
    for parameter in engine.module.parameters():
        tensors.append(getattr(parameter, "ds_tensor", parameter))
        tensors += [] if parameter.grad is None else [parameter.grad]
    optimizer = engine._engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    for group in inner.param_groups:
        tensors += group["params"]
    for states in inner.state.values():
        tensors += [value for value in states.values() if isinstance(value, torch.Tensor)]
    return [tensor.detach().clone() for tensor in tensors]


def accumulate(engine: Any, world: World) -> None:
    """Gradients of four rows, shared over the ranks, in one pass; their update is still to come."""
    ids = token_rows()[world.rank :: world.size].to(world.device)
    mask = torch.ones_like(ids, dtype=torch.bool)
    engine.backward(sft_loss(engine(ids, mask, mask)[0], mask=mask).total, count=36)


def training_logprobs(engine: Any, ids: Tensor) -> Tensor:
    """Log-probs of whole rows in the training forward, [B, T], without gradients."""
    mask = torch.ones_like(ids, dtype=torch.bool)
    with torch.no_grad():
        return engine(ids, mask, mask)[0]  # type: ignore[no-any-return]


def differences(engine: Any, completions: list[list[Any]], prompts: list[list[int]] = PROMPTS) -> list[float]:
    """Of the log-probs that sampling reports from those of the training forward."""
    apart = []
    for prompt, samples in zip(prompts, completions, strict=True):
        for sample in samples:
            logprobs = training_logprobs(engine, torch.tensor([prompt + sample.token_ids]))[0, len(prompt) :]
            apart += (logprobs - torch.tensor(sample.logprobs)).abs().tolist()
    return apart


def train_generate_save(world: World, path: Path, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Train, generate, train, save."""
    engine = build_actor(actor_spec(path, **settings), world)
    losses = [train_step(engine, world)]
    before = state_of(engine)
    with engine.inference(stop_token_ids=()) as generation:
        completions = generation.generate(PROMPTS[world.rank :], SamplingParams(max_new_tokens=6, temperature=0.0))
    same = all(map(torch.equal, before, state_of(engine)))
    released = all(p.numel() == 0 for p in engine.module.parameters() if hasattr(p, "ds_tensor") and not p.ds_persist)
    save_model(folder, full_tensors(engine.lm, world), lm=engine.lm, tokenizer=tiny_tokenizer(), world=world)
    if has_lora(engine.lm):
        save_adapter(folder / "adapter", engine)
    losses += [train_step(engine, world), train_step(engine, world)]
    return {
        "losses": losses,
        "same": same,
        "released": released,
        "completions": [samples[0].token_ids for samples in completions],
    }


def route_to_expert_0(decoder: Decoder, tokens: int) -> None:
    """Bias the router of layer 1 so that it selects expert 0 for `tokens` more probe tokens, those with the smallest
    score margin."""
    experts, inputs = decoder._weights.layers[1].experts, list[Tensor]()
    assert experts is not None
    route = experts.route

    def recorded(x: Tensor, kernels: ModuleType | None) -> tuple[Tensor, Tensor]:
        inputs.append(x)
        return route(x, kernels)

    vars(experts)["route"] = recorded
    probe_logits(decoder, probe_tokens(decoder.architecture.vocab_size))
    del vars(experts)["route"]
    top_k = route(inputs[0])[1].shape[1]
    scores = functional.linear(torch.cat(inputs), experts.router).softmax(dim=-1)
    margins = scores.topk(top_k).values[:, -1] - scores[:, 0]
    bias = margins[margins > 0].sort().values[tokens - 1] + 1e-6
    experts._correction = bias * torch.eye(scores.shape[1])[0]
