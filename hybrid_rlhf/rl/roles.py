"""The models that take part in an RL step, and how they are built from a config."""

from __future__ import annotations

from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.rl import RLConfig, frozen_zero
from hybrid_rlhf.configs.sections.model import LoraConfig
from hybrid_rlhf.configs.sections.training import OptimizerConfig, ZeroConfig
from hybrid_rlhf.engines.builder import EngineSpec, build_actor, build_engine
from hybrid_rlhf.engines.deepspeed_internals import full_shape
from hybrid_rlhf.engines.ds_config import read_overrides
from hybrid_rlhf.engines.engine import ModelEngine, Role
from hybrid_rlhf.engines.hybrid import HybridEngine
from hybrid_rlhf.engines.partition import base_parameters
from hybrid_rlhf.loop.setup import (
    require_positions,
    require_same_tokens,
    resolve,
    warm_start_folder,
)
from hybrid_rlhf.models.pretrained.tokenizers import load_tokenizer
from hybrid_rlhf.rl.rewards import Reward, build_reward
from hybrid_rlhf.runtime.run import Run


@dataclass(frozen=True)
class Roles:
    """Actor, reward, critic and reference; some algorithms need no critic or reference."""

    actor: HybridEngine
    reward: Reward
    critic: ModelEngine | None = None
    reference: ModelEngine | None = None
    """None also where the reference is the actor without its adapters."""

    @property
    def learners(self) -> dict[str, ModelEngine]:
        """The trained models by name."""
        return {"actor": self.actor} | ({} if self.critic is None else {"critic": self.critic})

    @property
    def packs(self) -> bool:
        """Whether no role pads its micro-batches."""
        return all(role.packs for role in (self.actor, self.critic, self.reward, self.reference) if role is not None)


def build_roles(
    config: RLConfig, run: Run, actor_path: str, tokenizer: PreTrainedTokenizerBase, *, updates: int
) -> Roles:
    """The models that the algorithm needs, on the run's ranks.

    Args:
        config: the step.
        run: the run whose ranks share the models.
        actor_path: resolved path of the actor's initial weights.
        tokenizer: tokenizer of the actor.
        updates: updates of the actor in the whole run, for its schedule.

    Raises:
        UserError: when a model cannot be loaded, or critic or reference differ from the actor in vocabulary.
    """
    if not config.reward.components and config.environment is None:
        raise UserError("reward.components must name a reward model or function, got none: set --reward.components")
    critic_path, reference_path = _critic_path(config, run, actor_path), _reference_path(config, run, actor_path)
    for role, path in (("critic", critic_path), ("reference", reference_path)):
        if path is not None:
            require_same_tokens(role, path, tokenizer, config.model)
    overrides = read_overrides(config.deepspeed_config)

    def trained(
        role: Role, path: str, zero: ZeroConfig, optimizer: OptimizerConfig, lora: LoraConfig | None
    ) -> EngineSpec:
        return EngineSpec(role, path, config.model, zero, config.seed, optimizer, lora, updates, overrides)

    section = config.actor
    actor = build_actor(
        trained("actor", actor_path, section.zero, section.optimizer, section.lora),
        run.world,
        rollout=config.rollout,
        max_logprob_diff=config.faults.max_logprob_diff,
    )
    if config.ptx is not None:
        require_positions(actor, config.ptx.max_length, key="ptx.max_length")
    critic, reference = None, None
    if critic_path is not None and config.critic is not None:
        base = actor.lm if config.critic.share_base else None
        # the head of a reward model is trained on whole completions; before their end it predicts worse than a constant
        fresh_head = config.critic.path is None and warm_start_folder(run, "critic") is None
        spec = trained("critic", critic_path, config.critic_zero, config.critic.optimizer, config.critic_lora)
        critic = build_engine(replace(spec, base=base, fresh_head=fresh_head, head_lr=config.critic.head_lr), run.world)
    reward = build_reward(
        config.reward.named,
        run.world,
        tokenizer=tokenizer,
        resolve=lambda path: resolve(config, run, path, key="reward.components"),
        load_tokenizer=lambda path: load_tokenizer(
            path,
            trust_remote_code=config.model.trust_remote_code,
            chat_template_kwargs=config.data.chat_template_kwargs,
        ),
        build_engine=lambda path: frozen_engine(config, run, "reward", path),
    )
    if reference_path is not None and not config.reads_without_adapters(reference_path, actor_path):
        reference = frozen_engine(config, run, "reference", reference_path)
        if config.reference.refresh_every:
            _require_alike(actor, reference, reference_path)
    return Roles(actor, reward, critic, reference)


def _require_alike(actor: ModelEngine, reference: ModelEngine, path: str) -> None:
    """Raise UserError unless the actor's weights can be copied to the reference."""
    mine, other = (
        {name: full_shape(weight) for name, weight in base_parameters(engine.lm)} for engine in (actor, reference)
    )
    if mine != other:
        raise UserError(
            f"reference.refresh_every copies the actor's weights to the reference, {path} has another shape: "
            "leave reference.path out"
        )


def frozen_engine(config: RLConfig, run: Run, role: Role, path: str) -> ModelEngine:
    """A frozen model on the run's ranks.

    Args:
        config: the step; decides sharding and offload of the weights.
        run: the run whose ranks share the model.
        role: reward or critic for a scorer, reference or actor for a language model.
        path: resolved path of the model.

    Raises:
        UserError: when it cannot be loaded.
    """
    sibling = config.actor.zero if role in ("actor", "reference") else config.critic_zero
    zero = frozen_zero(sibling, offload=config.rollout.offload_frozen)
    overrides = read_overrides(config.deepspeed_config)
    spec = EngineSpec(role, path, config.model, zero, config.seed, deepspeed_overrides=overrides, heads=None)
    return build_engine(replace(spec, offload_weights=config.rollout.offload_frozen and zero.stage < 3), run.world)


def _critic_path(config: RLConfig, run: Run, actor_path: str) -> str | None:
    if config.critic is None:
        return None
    start = warm_start_folder(run, "critic") or config.critic_start
    return resolve(config, run, start, key="critic.path") if start else actor_path


def _reference_path(config: RLConfig, run: Run, actor_path: str) -> str | None:
    if not config.uses_reference:
        return None
    # After a warm start the reference is still the model that the actor was first trained from.
    start = config.reference.path or (run.warm_start and config.model.path)
    return resolve(config, run, str(start), key="reference.path") if start else actor_path
