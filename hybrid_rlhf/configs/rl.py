"""Settings of the RL step: an actor learns from its own completions and their rewards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from annotated_types import Interval

from hybrid_rlhf.configs.algorithms import RL_ALGORITHMS, AlgorithmConfig, PPOConfig
from hybrid_rlhf.configs.credentials import check_url, is_own_host, require_placeholder
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.sections.algorithm import CorrectionConfig, PolicyGradientConfig
from hybrid_rlhf.configs.sections.data import DataConfig, DataSource
from hybrid_rlhf.configs.sections.environment import EnvironmentConfig
from hybrid_rlhf.configs.sections.model import CriticLoraConfig, LoraConfig
from hybrid_rlhf.configs.sections.placement import (
    TEACHER_PREFIX,
    RolePlacements,
    has_separate_sampler,
    is_automatic,
    is_role,
    read_placement,
)
from hybrid_rlhf.configs.sections.rewards import RewardComponentConfig, require_distinct_names
from hybrid_rlhf.configs.sections.rollout import RolloutConfig
from hybrid_rlhf.configs.sections.rules import (
    Count,
    Natural,
    NonNegative,
    Positive,
    RowTokens,
    Settings,
    Share,
    ShareBelowOne,
    advanced,
    require,
    require_defaults,
    section,
    setting,
    whole_number,
)
from hybrid_rlhf.configs.sections.run import FaultsConfig, StepConfig
from hybrid_rlhf.configs.sections.training import LoopConfig, OptimizerConfig, ZeroConfig, require_trainable


class PromptDataConfig(DataConfig):
    """Sources of prompts."""


class PtxConfig(Settings):
    """Pretraining loss mixed into the actor's updates (PPO-ptx of InstructGPT)."""

    coef: Annotated[float, Interval(gt=0), "give its weight, or --ptx null for no such loss"] = 0.0
    """Weight of the pretraining loss (InstructGPT: 27.8)."""
    sources: list[str | DataSource] = []
    """Pretraining text (a `text` column) or conversations: paths, or {path, weight, split_name}."""
    max_length: RowTokens = 1024
    """Longest row, in tokens (1024: TRL's SFT default)."""

    def _check(self) -> None:
        require(self.sources, "ptx.sources must name pretraining text, got none: give --ptx.sources FILE")


class ActorConfig(Settings):
    """Training of the actor, which starts from model.path."""

    lora: LoraConfig | None = None
    optimizer: OptimizerConfig = section(schedule="constant")
    zero: ZeroConfig = setting({}, mutable=True)
    ema_decay: ShareBelowOne = advanced(0.0)
    """Decay per update of a moving average of the actor, which is evaluated and saved as actor_ema (DeepSpeed-Chat:
    0.992); 0: none."""


class CriticConfig(Settings):
    """Initialization and training of the critic."""

    path: str | None = None
    """Model to start from, with its head; null: the layers of the first reward model, or of the actor if there is none,
    with a zero-initialised head."""
    lora: CriticLoraConfig | None = None
    """Adapters of the critic; null: the actor's settings."""
    optimizer: OptimizerConfig = section(schedule="constant")
    zero: ZeroConfig | None = setting(None, mutable=True)
    """Sharding of the critic; null: the actor's settings."""
    gae_lambda: Share = 1.0
    """Lambda of the critic's targets; algorithm.gae_lambda is the actor's (VC-PPO, arXiv 2503.01491)."""
    head_lr: NonNegative | None = advanced(None)
    """Peak learning rate of the head; null: optimizer.lr, but at least 0.1 / hidden size for a zero-initialised
    head."""
    share_base: bool = False
    """The critic has its own adapters on the actor's weights; needs LoRA."""
    warmup_steps: Natural = advanced(0)
    """Number of initial steps in which only the critic is trained."""


class ReferenceModelConfig(Settings):
    """The frozen reference of the KL penalty. Under ZeRO-3 it is sharded like the actor."""

    path: str | None = None
    """Model folder or hub name; null: the initial actor."""
    refresh_every: Natural = advanced(0)
    """Steps between copies of the actor's weights to the reference; 0: never."""


MOST_SERVED_TOKENS = 20
"""Most likely tokens that servers tell for each token of a prompt."""


class TeacherConfig(Settings):
    """On-policy distillation: a teacher reads the actor's own completions. Its log-prob of each token is a part of the
    token's advantage, or the divergence from its distribution a part of the loss."""

    path: str | None = None
    """Teacher: a model folder or hub name, with the actor's vocabulary. Under ZeRO-3 it is sharded like the actor. null
    with a prompt_template: the actor itself, before the updates of each rollout."""
    per_source: dict[str, str] = {}
    """Teachers by the value of a column of the row, such as one for each domain (MOPD, arXiv 2601.02780); teacher.path
    is that of all other rows."""
    url: str | None = None
    """Teacher in place of path: address of `hybrid-rlhf serve` or vLLM, which tells log-probs at temperature 1."""
    api_key: str | None = None
    """Key of the server, as ${NAME} of an environment variable."""
    source_column: str = "source"
    """Column of the row that per_source reads."""
    prompt_template: str | None = None
    """Text of the last user turn that the teacher reads, with {prompt} for the row's own and {NAME} for columns: a
    solution, a demonstration, feedback (self-distillation, arXiv 2601.19897, 2601.18734, 2601.20802)."""
    loss: Literal["sampled", "forward", "reverse", "jensen_shannon"] = "sampled"
    """sampled: log p(teacher) - log p(actor) of the sampled token is added to its advantage; else a term of the loss:
    forward KL(teacher || actor), reverse KL(actor || teacher), or jensen_shannon."""
    top_k: Natural = 0
    """Number of the teacher's most likely tokens that the divergence distinguishes, the others being one; 0: the whole
    vocabulary."""
    beta: Annotated[float, Interval(gt=0, lt=1)] = 0.5
    """Weight of the teacher in the mixture of jensen_shannon."""
    coef: Positive = 1.0
    """Weight of the teacher's part of advantages or loss (1: thinkingmachines.ai/blog/on-policy-distillation)."""
    position_gamma: NonNegative = 0.0
    """Additional weight of the first sampled tokens, which falls to 0 with the sum of |log p(teacher) - log p(actor)|
    before a token (IW-OPD, arXiv 2606.22600: 0.5); 0: all count alike."""

    def _check(self) -> None:
        require(
            self.models or self.prompt_template is not None or self.url is not None,
            "teacher.path must name a model, got none: give --teacher.path FOLDER",
        )
        if self.url is not None:
            check_url(self.url, key="teacher.url", remedy="give it as api_key")
            require(
                not self.models and (self.loss == "sampled" or 0 < self.top_k <= MOST_SERVED_TOKENS),
                f"teacher.url is one teacher that tells at most {MOST_SERVED_TOKENS} tokens, got {len(self.models)} "
                f"models besides and top_k {self.top_k}: leave path and per_source out, and give --teacher.top_k 20",
            )
        require_placeholder(self.api_key, key="teacher.api_key")
        require(
            self.url is not None or self.api_key is None, "teacher.api_key is for teacher.url, got none: leave it out"
        )
        sampled = self.loss == "sampled"
        require(
            not (sampled and self.top_k),
            f"teacher.top_k is for a divergence, got {self.top_k} with loss sampled: give --teacher.loss reverse",
        )
        require(
            sampled or not self.position_gamma,
            f"teacher.position_gamma weighs sampled tokens, got {self.position_gamma:g} with loss {self.loss}: leave "
            "one out",
        )
        require(
            not self.reads_whole or (self.path is not None and not self.per_source),
            f"teacher.loss {self.loss} over the whole vocabulary needs one frozen teacher, got path {self.path} and "
            f"{len(self.per_source)} in per_source: give --teacher.top_k 64",
        )

    @property
    def models(self) -> dict[str, str]:
        """The frozen models by the name of their role; values of per_source with the same model share it."""
        names = {self.path: "teacher"} if self.path is not None else {}
        for value, path in self.per_source.items():
            names.setdefault(path, f"{TEACHER_PREFIX}{value}")
        return {name: path for path, name in names.items()}

    @property
    def divergence(self) -> Literal["forward", "reverse", "jensen_shannon"] | None:
        """The divergence that is a term of the loss; None: the sampled token's log-ratio is in its advantage."""
        return None if self.loss == "sampled" else self.loss

    @property
    def reads_whole(self) -> bool:
        """True if the teacher reads each micro-batch of the updates, for its whole distribution."""
        return self.loss != "sampled" and not self.top_k


class RewardSumConfig(Settings):
    """The reward of completions. Under ZeRO-3, reward models are sharded like the critic, or like the actor without a
    critic."""

    components: list[str | RewardComponentConfig] = []
    """Reward models (paths), or {model | function | urls | verifier | judge, weight, ...}, whose weighted scores are
    summed."""

    def _check(self) -> None:
        require_distinct_names(self.named)
        for component in self.named:
            require(
                component.model is None or not is_role(component.label),
                f"reward.components: a reward model must not have the name of a role, got {component.label}: give the "
                "component a name",
            )

    @property
    def named(self) -> list[RewardComponentConfig]:
        """The components; a plain string becomes a component with this reward model."""
        alone = "model" if len(self.components) == 1 else None
        return [
            RewardComponentConfig(name=alone, model=component) if isinstance(component, str) else component
            for component in self.components
        ]

    @property
    def first_model(self) -> str | None:
        """The reward model that a critic starts from: the only component, if it is a path; otherwise None."""
        first = self.components[0] if len(self.components) == 1 else None
        return first if isinstance(first, str) else None


class RLFaultsConfig(FaultsConfig):
    """Which faults end a run."""

    max_logprob_diff: Positive | None = advanced(None)
    """Largest allowed difference in nats between log-probs of the sampler and of training, on fixed tokens after a
    weight sync (`weight_check_every`) and on average over a rollout with current weights; the run stops if it is
    exceeded. null: 0.002 in float32, 0.1 in lower precision, 0.5 quantised, more if logits are large."""
    weight_check_every: Count = advanced(8)
    """Number of weight syncs of which one compares the inference weights with the training forward; the first two syncs
    of a run, and of its resumption, are always compared. With vLLM: every sync."""
    check_weights: bool = advanced(False)
    """Compare checksums of all weights that a sampler on separate ranks (placement) receives, in each weight sync; the
    first two syncs are always compared."""


def _mini_batches(values: Mapping[str, Any]) -> int:
    """Default number of mini-batches: the largest up to the algorithm's that divides a rollout."""
    rows = whole_number(values["rollout.prompts_per_step"]) * whole_number(values["rollout.sampling.n"])
    most = whole_number(values["algorithm.mini_batches"])
    unit = whole_number(values["train.micro_batch_size"]) or 1
    divisors = [count for count in range(1, most + 1) if rows and rows % (count * unit) == 0]
    return max(divisors, default=1)


class RLConfig(StepConfig):
    """RL: trains an actor on its own completions and their rewards, with PPO, GRPO or another algorithm."""

    following = {"algorithm.mini_batches": _mini_batches}
    retired = {
        "adapters": "adapters on one base train through `hybrid-rlhf train-server`, see docs/adapters.md",
        **dict.fromkeys(
            (
                *("rollout.async_sampling", "rollout.async_sampling.policy_lag"),
                *("rollout.partial", "rollout.partial.extra_prompts", "rollout.partial.max_lag"),
                *("rollout.streaming", "rollout.streaming.max_lag", "rollout.streaming.replay_order"),
            ),
            "rollout.max_lag is the number of steps by which sampling may be ahead, see docs/lag.md",
        ),
        "train.global_batch_size": "give rollout.prompts_per_step and algorithm.mini_batches",
        "rollout.streaming.recompute_kv": "it is rollout.recompute_kv",
    }

    output_dir: str = setting("output/step3_ppo", mutable=True)
    """Folder of the run: actor/, critic/, config.yaml, metrics.jsonl, samples.jsonl, checkpoints."""
    algorithm: AlgorithmConfig = setting(PPOConfig, variants=RL_ALGORITHMS)
    data: PromptDataConfig = section()
    actor: ActorConfig = section()
    critic: CriticConfig | None = setting(None, needs="needs_critic")
    reference: ReferenceModelConfig = section()
    teacher: TeacherConfig | None = advanced(None)
    reward: RewardSumConfig = section()
    environment: EnvironmentConfig | None = None
    rollout: RolloutConfig = section()
    ptx: PtxConfig | None = None
    placement: RolePlacements | None = setting(None, mutable=True, read=read_placement)
    """Ranks of each role (docs/placement.md): flattening (all roles on all ranks), interleaving (reference and reward
    models on disjoint ranks), separation (sampler and frozen models on separate ranks), ranks by role, such as
    {sampler: {ranks: 4-7, tensor_parallel: 2}}, or auto (chosen by the planner, after hybrid-rlhf calibrate). null:
    flattening."""
    train: LoopConfig = section()
    faults: RLFaultsConfig = setting({}, mutable=True)

    def _check(self) -> None:
        if self.algorithm.needs_critic and self.critic is None:
            object.__setattr__(self, "critic", CriticConfig())
        if self.rollout.endpoint is not None and self.environment is None:
            object.__setattr__(self, "environment", EnvironmentConfig())
        self._check_algorithm()
        self._check_environment()
        self._check_sampler()
        self._check_curriculum()
        self._check_models()

    def _check_algorithm(self) -> None:
        """Check what the algorithm needs of the other sections."""
        algorithm = self.algorithm
        name = algorithm.name
        n = self.rollout.sampling.n
        require(
            algorithm.needs_critic or self.critic is None,
            f"algorithm {name} has no critic, got the section critic: leave it out",
        )
        least = algorithm.fewest_completions
        require(
            n >= least,
            f"algorithm {name} compares completions of one prompt, got rollout.sampling.n {n}: give {least} or more",
        )
        for part in self.reward.named:
            require(
                part.judge is None or not part.judge.compares_group or n > 1,
                f"reward component {part.label} compares completions of one prompt, got rollout.sampling.n {n}: give "
                "2 or more",
            )
        require(
            not algorithm.learns_pairs or n == 2,
            f"algorithm {name} learns from pairs, got rollout.sampling.n {n}: give 2",
        )
        require(
            algorithm.dynamic_sampling is None or n >= 2,
            f"algorithm.dynamic_sampling compares completions of one prompt, got rollout.sampling.n {n}: give 2 or "
            "more",
        )
        for key in ("selected_per_prompt", "k"):  # numbers of completions that RAFT or pass@k choose
            value = getattr(algorithm, key, 0)
            require(value < n, f"algorithm.{key} must be below rollout.sampling.n {n}, got {value}: lower it")
        require(
            self.teacher is None or (isinstance(algorithm, PolicyGradientConfig) and algorithm.uses_sampler_policy),
            f"teacher gives each token an advantage, got algorithm {name}, which selects completions: give another, "
            "such as grpo",
        )
        require(
            not self.rollout.routing_replay or algorithm.uses_sampler_policy,
            f"rollout.routing_replay is for losses on the policy that sampled, got algorithm {name}, which learns from "
            "completions of any policy: leave it out",
        )
        require(
            self.uses_reference or self.reference == ReferenceModelConfig(),
            f"algorithm {name} without algorithm.kl has no reference, got reference.path {self.reference.path} and "
            f"refresh_every {self.reference.refresh_every}: leave the section out",
        )

    def _check_environment(self) -> None:
        """Check the rules for episodes of several turns, of a class or of programs inside and outside of the run."""
        environment = self.environment
        endpoint = self.rollout.endpoint
        if environment is None:
            return
        require(
            environment.path is None or endpoint is None,
            f"rollout.endpoint is for programs, got environment.path {environment.path}: leave one out",
        )
        if environment.path is None and environment.program is None:
            if endpoint is None:
                raise UserError(
                    "environment.path must be module:Class or path/to/file.py:Class, got None: give the class, "
                    "environment.tools, environment.program, or --rollout.endpoint true"
                )
            require(
                is_own_host(endpoint.host) or endpoint.api_key is not None,
                "rollout.endpoint.api_key must be given where other machines connect, got none with "
                f"rollout.endpoint.host {endpoint.host}: give ${{NAME}} of an environment variable",
            )
        require(
            environment.path is not None or self.algorithm.takes_sequences,
            f"a program has episodes of several sequences, got algorithm {self.algorithm.name}, which counts "
            "completions: give another, such as grpo",
        )

    def _check_sampler(self) -> None:
        """Check where completions are sampled, and with which weights; those of other weights get a correction."""
        rollout = self.rollout
        alone = has_separate_sampler(self.placement)
        require(
            not self.faults.check_weights or alone,
            "faults.check_weights compares weights that a sampler with ranks of its own receives, got placement "
            f"{self._given_placement}: leave it out, or give --placement separation",
        )
        require(
            rollout.backend != "vllm" or self._samples_on_actor,
            "rollout.backend vllm samples in processes of its own, got placement "
            f"{self._given_placement}: leave the sampler out of it",
        )
        require(
            not (rollout.samples_otherwise and self.algorithm.reads_sampler),
            "algorithm.old_logprobs sampler needs a sampler with the weights and arithmetic of training, got "
            "rollout.max_lag, rollout.quantization, vLLM or a grammar: leave one out",
        )
        if rollout.samples_otherwise and not self.algorithm.allows_other_sampler:
            if not isinstance(self.algorithm, PolicyGradientConfig):
                raise UserError(
                    "samples of other weights than those that train need algorithm.correction, got algorithm "
                    f"{self.algorithm.name} without: give another, or leave out rollout.max_lag, "
                    "rollout.quantization, rollout.vllm and rollout.sampling.response_format"
                )
            correction = CorrectionConfig(**self.algorithm.default_correction)
            object.__setattr__(self, "algorithm", replace(self.algorithm, correction=correction))
        if rollout.max_lag and (alone or rollout.backend == "vllm"):
            rule = f"rollout.max_lag {rollout.max_lag} with a sampler that works while the actor trains"
            unread = ["rollout.quantization", "rollout.offload_states", "actor.ema_decay"]
            require_defaults(self, unread, rule, others={"rollout.keep_weights": True} if alone else {})

    def _check_models(self) -> None:
        """Check how the weights of actor and critic are trained, stored and split."""
        actor = self.actor
        critic = self.critic
        model = self.model
        require(
            model.expert_parallel == 1 or self._samples_on_actor,
            f"model.expert_parallel {model.expert_parallel} needs all roles on all ranks, got placement "
            f"{self._given_placement}: leave one out",
        )
        require_trainable(model, actor.optimizer, actor.lora, section="actor.lora", stage=actor.zero.stage)
        if critic is not None:
            require_trainable(
                model, critic.optimizer, self.critic_lora, section="critic.lora", stage=self.critic_zero.stage
            )
        if model.quantization is not None:  # actor and sampler share base weights in 4 bits
            key = f"model.quantization {model.quantization}"
            unread = ["rollout.quantization", "rollout.dtype", "reference.refresh_every"]
            rule = f"{key} keeps the base weights of all models, from which the actor's sampler samples"
            require_defaults(self, unread, rule, others={"rollout.backend": "module"})
            require(
                self._samples_on_actor,
                f"{key} samples from the weights of the actor on its ranks, got placement {self._given_placement}: "
                "leave one out",
            )
        if model.tensor_parallel > 1:
            key = f"model.tensor_parallel {model.tensor_parallel}"
            require(
                self.placement is None,
                f"{key} has all models on all ranks, got placement {self._given_placement}: leave one out",
            )
            unread = ["rollout.backend", "reference.refresh_every"]
            require_defaults(self, unread, f"{key} reads and writes weights in parts")
        if critic is not None and critic.share_base:
            self._check_shared_base(critic)
        if self.teacher is not None:
            self._check_teacher(self.teacher)

    def _check_teacher(self, teacher: TeacherConfig) -> None:
        """Check where a teacher's divergence and its own prompts are computed."""
        model = self.model
        require(
            teacher.loss == "sampled" or model.sequence_parallel == model.tensor_parallel == 1,
            f"teacher.loss {teacher.loss} needs a rank for each row, got model.sequence_parallel "
            f"{model.sequence_parallel} and tensor_parallel {model.tensor_parallel}: set them to 1",
        )
        require(
            not teacher.reads_whole or (self.placement is None and not self.rollout.offload_frozen),
            f"teacher.loss {teacher.loss} over the whole vocabulary has the teacher beside the actor, got placement "
            f"{self._given_placement} and rollout.offload_frozen {self.rollout.offload_frozen}: leave them out, or "
            "give --teacher.top_k 64",
        )
        require(
            teacher.url is None or self.rollout.sampling.temperature == 1,
            "teacher.url tells log-probs at temperature 1, got rollout.sampling.temperature "
            f"{self.rollout.sampling.temperature:g}: give 1",
        )
        require(
            teacher.prompt_template is None or self.environment is None or self.environment.path is not None,
            "teacher.prompt_template takes the place of a row's prompt, got the prompts of programs: leave it out",
        )

    def _check_shared_base(self, critic: CriticConfig) -> None:
        """Check the rules for a critic of adapters on the actor's weights."""
        require(
            self.actor.lora is not None and self.critic_lora is not None,
            "critic.share_base needs adapters on both, got none on the "
            f"{'actor' if self.actor.lora is None else 'critic'}: give --actor.lora.rank 16",
        )
        require(
            critic.path is None,
            f"critic.share_base starts the critic from the actor's weights, got critic.path {critic.path}: leave "
            "one out",
        )
        stage = max(self.actor.zero.stage, self.critic_zero.stage)
        require(
            stage < 3,
            f"critic.share_base needs whole weights, got zero.stage {stage}: take stage 2, or leave share_base out",
        )

    def _check_curriculum(self) -> None:
        """Check that prompts are visited several times, and have a pass rate."""
        if self.rollout.curriculum is None:
            return
        n = self.rollout.sampling.n
        epochs = self.train.passes
        require(
            n >= 2,
            f"rollout.curriculum takes the pass rate of a prompt's completions, got rollout.sampling.n {n}: give 2 or "
            "more",
        )
        require(
            epochs is None or epochs >= 2,
            f"rollout.curriculum skips prompts by their earlier visits, got train.epochs {epochs}: give 2 or more",
        )

    def require_reward(self) -> None:
        """Raise UserError unless the step has a reward, or a teacher and an algorithm that needs no reward beside it.

        The pipeline adds the reward model that it trains after `_check`, so a run calls this at its start.
        """
        if self.has_reward:
            return
        algorithm = self.algorithm
        require(
            self.teacher is not None,
            "reward.components must name a reward model or function, got none: set --reward.components",
        )
        require(
            not algorithm.needs_critic,
            f"algorithm {algorithm.name} trains a critic on rewards, got teacher without reward.components: give some, "
            "or another algorithm, such as grpo",
        )
        require(
            algorithm.dynamic_sampling is None,
            "algorithm.dynamic_sampling takes prompts whose scores differ, got teacher without reward.components: give "
            "some, or --algorithm.dynamic_sampling null",
        )
        require(
            self.rollout.curriculum is None,
            "rollout.curriculum skips prompts by their scores, got teacher without reward.components: leave it out",
        )
        require(
            algorithm.kl is None or algorithm.kl.where == "loss",
            "algorithm.kl.where reward needs a reward, got teacher without reward.components: give some, or "
            "--algorithm.kl null",
        )

    @property
    def _samples_on_actor(self) -> bool:
        """True if the placement leaves the sampler on the actor's ranks."""
        return not has_separate_sampler(self.placement) and not is_automatic(self.placement)

    @property
    def _given_placement(self) -> str | dict[str, Any] | None:
        """The placement in the form of config files."""
        return None if self.placement is None else self.placement.as_given()

    @property
    def critic_zero(self) -> ZeroConfig:
        """Sharding of the critic and the reward models: that of the critic's section, or the actor's."""
        return self.actor.zero if self.critic is None or self.critic.zero is None else self.critic.zero

    @property
    def critic_lora(self) -> LoraConfig | None:
        """Adapters of the critic, from its section or the actor's; None if all its weights are trained."""
        if self.critic is None or self.critic.lora is None:
            return self.actor.lora
        return self.critic.lora if self.critic.lora.rank else None

    @property
    def has_reward(self) -> bool:
        """True if completions are scored: by reward components, or by an environment."""
        return bool(self.reward.components) or self.environment is not None

    @property
    def uses_reference(self) -> bool:
        """True if the reference's log-probs are needed."""
        return self.algorithm.uses_reference

    @property
    def learned_per_prompt(self) -> int:
        """Maximum number of completions per prompt that are trained on."""
        return int(getattr(self.algorithm, "selected_per_prompt", self.rollout.sampling.n))

    def reads_without_adapters(self, reference_path: str | None, actor_path: str | None) -> bool:
        """Return True if the reference is the actor without its adapters; it must then not follow the actor."""
        return self.actor.lora is not None and reference_path == actor_path and not self.reference.refresh_every

    @property
    def critic_start(self) -> str | None:
        """The model that the critic starts from; None if it starts like the actor."""
        if self.critic is None or self.critic.share_base:
            return None
        return self.critic.path or self.reward.first_model
