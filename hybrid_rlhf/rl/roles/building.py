"""Builds the engine of each role from a config, on the ranks that its placement names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.judge import JudgeConfig
from hybrid_rlhf.configs.sections.model import LoraConfig
from hybrid_rlhf.configs.sections.training import OptimizerConfig
from hybrid_rlhf.engines.builder import EngineSpec, build_actor, build_engine, model_images
from hybrid_rlhf.engines.ds_config import read_overrides
from hybrid_rlhf.engines.engine import EngineFacts, Role
from hybrid_rlhf.engines.hybrid import AbsentActor
from hybrid_rlhf.engines.placed import build_critic_copy, build_separate_sampler
from hybrid_rlhf.engines.role_model import AbsentEngine, Actor, Reader, RoleModel
from hybrid_rlhf.engines.sampling_engine import SamplingEngine
from hybrid_rlhf.engines.vllm.sampler import VLLMSampler
from hybrid_rlhf.generation.engine import GenerationEngine
from hybrid_rlhf.loop.setup import (
    require_positions,
    require_same_tokens,
    require_vision,
    resolve,
    warm_start_folder,
)
from hybrid_rlhf.models.pretrained.loading import training_dtype
from hybrid_rlhf.models.pretrained.tokenizers import load_tokenizer
from hybrid_rlhf.rl.images import ImageCatalogue
from hybrid_rlhf.rl.rewards import Reward, build_reward
from hybrid_rlhf.rl.rewards.local_model import LocalModel
from hybrid_rlhf.rl.roles.placing import reference_path_of, residency_of
from hybrid_rlhf.rl.roles.roles import Roles
from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.runtime.placement import CRITIC_COPY, Placement
from hybrid_rlhf.runtime.run import Run
from hybrid_rlhf.runtime.world import World, shared_user_errors


def build_roles(
    config: RLConfig,
    run: Run,
    placement: Placement,
    actor_path: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    updates: int,
    images: ImageCatalogue | None = None,
) -> Roles:
    """The models that the algorithm needs, each on its ranks. Every rank of the run calls.

    Args:
        config: the step.
        run: the run whose ranks share the models.
        placement: the result of `place_roles`.
        actor_path: resolved path of the actor's initial weights.
        tokenizer: tokenizer of the actor.
        updates: number of updates of the actor in the whole run, for its schedule.
        images: the images of the prompts; none: there are none.

    Raises:
        UserError: when a model cannot be loaded, or critic, reference or teacher differ from the actor in
            vocabulary.
    """
    critic_path = _critic_path(config, run, actor_path)
    reference_path = reference_path_of(config, run, actor_path)
    teacher = config.teacher
    teachers = (
        {}
        if teacher is None
        else {name: resolve(config, run, path, key="teacher.path") for name, path in teacher.models.items()}
    )
    for role, path in (("critic", critic_path), ("reference", reference_path), *teachers.items()):
        if path is not None:
            require_same_tokens(role, path, tokenizer, config.model)
            if images is not None:
                require_vision(f"the {role}", path, config.model)
    build = _Builder(config, run, placement, updates)
    actor = build.actor(actor_path, has_images=images is not None)
    critic = None if critic_path is None else build.critic(critic_path, actor)
    reward = build.reward(tokenizer, has_images=images is not None)
    reference = None if reference_path is None else build.frozen("reference", reference_path, role="reference")
    if reference is not None and config.reference.refresh_every and actor.facts.weights != reference.facts.weights:
        raise UserError(
            f"reference.refresh_every copies the actor's weights to the reference, {reference_path} has another shape: "
            "leave reference.path out"
        )
    copy = None if critic is None else build.critic_copy(critic)
    sampler = build.sampler(actor, tokenizer, None if images is None else actor_path)
    return Roles(
        run.world,
        actor,
        reward,
        critic,
        reference,
        sampler,
        copy,
        {
            name: build.frozen(
                name, path, role="teacher" if teacher is not None and teacher.reads_whole else "reference"
            )
            for name, path in teachers.items()
        },
        reference_beside_rewards=placement.reference_beside_rewards,
        images=images,
        close=build.close,
    )


def build_reward_alone(
    config: RLConfig,
    run: Run,
    placement: Placement,
    tokenizer: PreTrainedTokenizerBase,
    images: ImageCatalogue | None = None,
) -> Reward:
    """The reward of a step without the other roles; see `build_roles`."""
    return _Builder(config, run, placement, updates=0).reward(tokenizer, has_images=images is not None)


class _Builder:
    """Builds the engine of each role on its ranks, and an AbsentEngine on the others."""

    def __init__(self, config: RLConfig, run: Run, placement: Placement, updates: int) -> None:
        self._config = config
        self._run = run
        self._placement = placement
        self._updates = updates
        self._rollout = replace(config.rollout, tensor_parallel=placement.sampler.tensor_parallel)
        self._residency = residency_of(config, placement, run.world)
        self._images = functools.cache(lambda path: model_images(path, config.model))
        """What engines of the same path share to read images."""
        self.close: Callable[[], None] = lambda: None
        """Ends the processes that engines have started."""

    def actor(self, path: str, *, has_images: bool) -> Actor:
        config = self._config
        part = self._part("actor")
        actor = None
        samples = not (self._placement.separate_sampler or self._rollout.backend == "vllm")
        with shared_user_errors(self._run.world):
            if part.is_member:
                actor = build_actor(
                    self._actor_spec(path),
                    part,
                    rollout=self._rollout,
                    max_logprob_diff=config.faults.max_logprob_diff,
                    weight_check_every=config.faults.weight_check_every,
                    samples=samples,
                    has_images=has_images,
                    residency=self._residency["actor"],
                )
                if config.ptx is not None:
                    require_positions(actor, config.ptx.max_length, key="ptx.max_length")
        facts = self._facts(actor, part)
        together = self._rollout.tensor_parallel if samples else 1
        own = self._rollout.max_lag > 0
        return AbsentActor("actor", part, facts, tensor_parallel=together, own=own) if actor is None else actor

    def _actor_spec(self, path: str) -> EngineSpec:
        section = self._config.actor
        spec = self._trained("actor", path, section.optimizer, section.lora)
        # selected completions are learned as in SFT
        return replace(spec, learning="sft") if self._config.algorithm.selects else spec

    def sampler(
        self, actor: Actor, tokenizer: PreTrainedTokenizerBase, image_path: str | None = None
    ) -> SamplingEngine | None:
        """A sampler with ranks or processes of its own; `image_path`: of the model that reads the images of prompts."""
        placement = self._placement
        faults = self._config.faults
        if self._rollout.backend == "vllm" and actor.world.is_member:
            sampler = VLLMSampler(
                actor,
                tokenizer,
                rollout=self._rollout,
                logs=self._run.folder / "vllm",
                max_logprob_diff=faults.max_logprob_diff,
            )
            self.close = sampler.close
            return sampler
        if not placement.separate_sampler:
            return None
        with shared_user_errors(self._run.world):
            return build_separate_sampler(
                actor,
                placement,
                world=self._run.world,
                rollout=self._rollout,
                residency=self._residency["sampler"],
                max_logprob_diff=faults.max_logprob_diff,
                weight_check_every=faults.weight_check_every,
                check_weights=faults.check_weights,
                images=None if image_path is None else self._images(image_path),
            )

    def critic(self, path: str, actor: Actor) -> RoleModel:
        config = self._config
        section = self._config.critic
        assert section is not None
        # the head of a reward model is trained on whole completions; before their end it predicts worse than a constant
        fresh_head = section.path is None and warm_start_folder(self._run, "critic") is None
        spec = self._trained("critic", path, section.optimizer, config.critic_lora)
        base = actor.lm if section.share_base and actor.world.is_member else None
        return self._engine(replace(spec, base=base, fresh_head=fresh_head, head_lr=section.head_lr), "critic")

    def critic_copy(self, critic: RoleModel) -> Reader | None:
        if CRITIC_COPY not in self._placement.roles:
            return None
        with shared_user_errors(self._run.world):
            return build_critic_copy(
                critic, self._placement, world=self._run.world, check_weights=self._config.faults.check_weights
            )

    def reward(self, tokenizer: PreTrainedTokenizerBase, *, has_images: bool = False) -> Reward:
        config = self._config
        run = self._run
        return build_reward(
            config.reward.named,
            run.world,
            tokenizer=tokenizer,
            resolve=lambda path: resolve(config, run, path, key="reward.components"),
            load_tokenizer=lambda path: load_tokenizer(
                path,
                trust_remote_code=config.model.trust_remote_code,
                chat_template_kwargs=config.data.chat_template_kwargs,
            ),
            build_engine=lambda name, path: self.frozen(name, path, role="reward"),
            build_judge=self._judge,
            has_images=has_images,
            folder=run.folder,
        )

    def _judge(self, judge: JudgeConfig, path: str) -> LocalModel:
        """The model of a judge in the run, loaded on the ranks that sample: they have the completions."""
        model, device = self._config.model, self._run.world.device
        load = functools.partial(
            GenerationEngine.from_pretrained,
            path,
            dtype=training_dtype(model, device),
            device=device,
            trust_remote_code=model.trust_remote_code,
            cuda_graphs=False,  # captured again in each step, they would take longer than they save
        )
        found = LocalModel(judge, load)
        if self._run.world.is_main:
            logger.info("judge: %s, on each rank that samples", path)
        if any(group[0] == self._run.world.rank for group in self._placement.sampling_groups):
            found.load()
        return found

    def frozen(self, name: str, path: str, *, role: Role) -> RoleModel:
        """A frozen model by its name in the placement: a scorer as reward, a language model as reference."""
        config = self._config
        place = self._placement[name]
        residency = self._residency[name]
        spec = EngineSpec(
            role,
            path,
            config.model,
            residency.zero(place.zero),
            config.seed,
            deepspeed_overrides=read_overrides(config.deepspeed_config),
            heads=None,
            offload_weights=residency.visits("weights"),
            images=self._images(path),
        )
        return self._engine(spec, name)

    def _trained(self, role: Role, path: str, optimizer: OptimizerConfig, lora: LoraConfig | None) -> EngineSpec:
        config = self._config
        zero = self._residency[role].zero(self._placement[role].zero)
        overrides = read_overrides(config.deepspeed_config)
        images = self._images(path)
        return EngineSpec(
            role, path, config.model, zero, config.seed, optimizer, lora, self._updates, overrides, images=images
        )

    def _engine(self, spec: EngineSpec, name: str) -> RoleModel:
        part = self._part(name)
        with shared_user_errors(self._run.world):
            engine = build_engine(spec, part) if part.is_member else None
        facts = self._facts(engine, part)
        return AbsentEngine(spec.role, part, facts) if engine is None else engine

    def _part(self, name: str) -> World:
        return self._run.world.part(self._placement[name].ranks)

    def _facts(self, engine: RoleModel | None, part: World) -> EngineFacts:
        """Facts of a model, broadcast from the first rank that has it."""
        facts = self._run.world.broadcast_object(None if engine is None else engine.facts, source=part.members[0])
        assert facts is not None
        return facts


def _critic_path(config: RLConfig, run: Run, actor_path: str) -> str | None:
    if config.critic is None:
        return None
    start = warm_start_folder(run, "critic") or config.critic_start
    return resolve(config, run, start, key="critic.path") if start else actor_path
