"""Settings of train.py, which runs several steps on one data set; and of plan and calibrate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

from hybrid_rlhf.configs.preference import PreferenceStepConfig
from hybrid_rlhf.configs.reward import RewardConfig
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sections.data import DataSource, require_shares
from hybrid_rlhf.configs.sections.rules import (
    Count,
    Natural,
    Positive,
    Settings,
    require,
    require_template_variables,
    section,
)
from hybrid_rlhf.configs.sft import SFTConfig

StepName = Literal["sft", "reward", "preference", "rl"]
STEP_NAMES: tuple[StepName, ...] = get_args(StepName)
FOLDERS = {"sft": "step1_sft", "reward": "step2_reward", "preference": "preference", "rl": "step3_ppo"}
_OUTPUT = "{output_dir}/"
"""Placeholder in a step's default output_dir for the pipeline's; not a name that a user would choose."""


class LauncherConfig(Settings):
    """Number and location of the processes of a step."""

    num_processes: Count | None = None
    """Processes on this machine; null: one per GPU, or one."""
    hostfile: str | None = None
    """DeepSpeed hostfile for several machines, with lines `host slots=8`."""
    restarts: Natural = 0
    """Number of times that a step which a dead, hung or unreachable rank has ended starts again, from its newest
    checkpoint. With a hostfile, a restart waits up to 10 minutes for a host that does not answer."""


class PipelineDataConfig(Settings):
    """One data set for all steps."""

    sources: list[str | DataSource] = []
    """Paths, or {path, weight, split_name}, for every step without its own data.sources."""
    split: list[float] = [2.0, 4.0, 4.0]
    """Relative sizes of the three steps' parts of the data, without overlap (DeepSpeed-Chat)."""
    chat_template: str | None = None
    """Jinja file that replaces the tokenizer's chat template, for every step without its own data.chat_template."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template, for every step without its own data.chat_template_kwargs."""

    def _check(self) -> None:
        require_shares(self.split)
        require_template_variables(self.chat_template_kwargs)


class PipelineConfig(Settings):
    """Supervised fine-tuning, reward model and RL; or supervised fine-tuning and a preference loss without a reward
    model."""

    starts_steps = True
    """True if the steps run, false if they are planned."""

    base_model: str | None = None
    """Model that SFT starts from, and other steps if there is no SFT step. If null and no step has a model.path: run
    the demo with the embedded SmolLM2-135M-Instruct."""
    output_dir: str = "output"
    """Folder of step1_sft, step2_reward, step3_ppo and preference."""
    seed: Natural | None = None
    """Seed of all steps; null: each step's own."""
    steps: str = "sft,reward,rl"
    """Steps to run, comma-separated: sft, reward, preference, rl; a finished step is skipped."""
    data: PipelineDataConfig = section()
    sft: SFTConfig = section(output_dir=_OUTPUT + FOLDERS["sft"])
    reward: RewardConfig = section(output_dir=_OUTPUT + FOLDERS["reward"])
    preference: PreferenceStepConfig = section(output_dir=_OUTPUT + FOLDERS["preference"])
    rl: RLConfig = section(output_dir=_OUTPUT + FOLDERS["rl"])
    launcher: LauncherConfig = section()

    def _check(self) -> None:
        require(
            self.step_names and set(self.step_names) <= {*STEP_NAMES},
            f"--steps takes sft, reward, preference and rl, comma-separated, got {self.steps!r}: for example "
            "--steps sft,reward",
        )

    @property
    def step_names(self) -> list[str]:
        """The steps to run, in the order of the pipeline."""
        named = [name.strip() for name in self.steps.split(",") if name.strip()]
        return sorted(named, key=lambda name: STEP_NAMES.index(name) if name in STEP_NAMES else -1)  # type: ignore[arg-type]

    @property
    def is_demo(self) -> bool:
        """True if no setting names a model to start from."""
        return self.base_model is None and not any(getattr(self, name).model.path for name in self.step_names)

    def folder(self, name: str) -> str:
        """The folder of a step."""
        folder = str(getattr(self, name).output_dir)
        inside = folder.removeprefix(_OUTPUT)
        return folder if inside == folder else str(Path(self.output_dir) / inside)

    def start(self, name: str) -> str | None:
        """The default model that a step starts from.

        As in InstructGPT, reward model and actor start from the SFT model, if there is one.
        """
        sft = self.folder("sft")
        return sft if name != "sft" and ("sft" in self.step_names or has_model(sft)) else self.base_model


STEPS: dict[str, type] = {"sft": SFTConfig, "reward": RewardConfig, "preference": PreferenceStepConfig, "rl": RLConfig}
"""The config of each step."""
MACHINES = ("b200", "h200", "h100", "a100", "a100-40g", "a800", "l40s", "a10g", "4090", "3090", "mi300x")
"""With data sheets (planning/machine.py)."""


class DemoConfig(PipelineConfig):
    """Supervised fine-tuning, reward model and PPO on an embedded model of 135M parameters and embedded conversations,
    sized for two CPU cores. The defaults are those of the demo."""


class PlanConfig(PipelineConfig):
    """Memory of each phase of each step, and the placement of the roles of RL that is predicted to be the fastest."""

    starts_steps = False

    machine: str = "this"
    """Machine to plan for. this: the local machine, as measured by hybrid-rlhf calibrate. Of data sheets:
    b200, h200, h100, a100, a100-40g, a800, l40s, a10g, 4090, 3090, mi300x, or a YAML file with a data sheet."""
    ranks: Count | None = None
    """Number of ranks on all hosts; null: the number that a run would start."""
    hosts: Count | None = None
    """Number of hosts, with the same number of ranks each; null: the minimum for the machine's GPUs per host."""
    link_gib_per_second: Positive | None = None
    """Bandwidth between hosts, in GiB per second per host and direction; null: that of the machine's usual network."""
    prompt_tokens: Positive | None = None
    """Mean length of the prompts; null: half of rl.rollout.max_prompt_tokens."""
    completion_tokens: Positive | None = None
    """Mean length of the completions; null: half of rl.rollout.sampling.max_new_tokens. Lengths have a long tail."""
    candidates: Natural = 0
    """Placements to list beside the best of each style, fastest first, each with the reason why it lost."""

    def _check(self) -> None:
        require(
            self.machine in ("this", *MACHINES) or self.machine.endswith((".yaml", ".yml")),
            f"--machine must be this (the local machine), {', '.join(MACHINES[:-1])} or {MACHINES[-1]}, or a YAML file "
            f"with a data sheet, got {self.machine}: give one of them",
        )


class CalibrateConfig(Settings):
    """Measures the compute and communication speed of this machine once, for hybrid-rlhf plan."""

    retired = {"quick": "a calibration takes less than a minute"}

    ranks: Count | None = None
    """Ranks that measure the link between them; null: 4 processes on a CPU, one per GPU otherwise."""
    hostfile: str | None = None
    """DeepSpeed hostfile of several machines: also measure the link between them. Run it on the first of them."""
    renew: bool = False
    """Measure again, even if measurements of this machine exist."""
    cache_dir: str | None = None
    """Folder of the measurements; null: ~/.cache/hybrid_rlhf."""


def step_config(name: str, config: PipelineConfig) -> Any:
    """The config of a step, completed with the paths and data of the pipeline."""
    step: Any = getattr(config, name)
    shared = ["chat_template", "chat_template_kwargs", *([] if step.data.sources else ["sources", "split"])]
    data = replace(step.data, **{name: getattr(step.data, name) or getattr(config.data, name) for name in shared})
    seed = step.seed if config.seed is None else config.seed
    model = replace(step.model, path=step.model.path or config.start(name))
    step = replace(step, output_dir=config.folder(name), data=data, seed=seed, model=model)
    # An environment or a teacher may be the reward: a reward model is used besides only if this pipeline trains one.
    needed = "reward" in config.step_names or (name == "rl" and step.environment is None and step.teacher is None)
    if name == "rl" and not step.reward.components and needed:
        step = replace(step, reward=replace(step.reward, components=[config.folder("reward")]))
    return step


def has_model(folder: str) -> bool:
    """Return True if a folder has the model of a step."""
    return (Path(folder) / "config.json").is_file()
