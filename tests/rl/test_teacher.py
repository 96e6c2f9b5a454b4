"""On-policy distillation: what a teacher adds to the advantages, whose gradient that is, and runs with a teacher."""

from __future__ import annotations

import copy
import itertools
import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from hybrid_rlhf.configs.algorithms import RL_ALGORITHMS, GRPOConfig
from hybrid_rlhf.configs.rl import TeacherConfig
from hybrid_rlhf.functional.distillation import divergence
from hybrid_rlhf.functional.losses import LossSum
from hybrid_rlhf.models.distillation import Teacher
from hybrid_rlhf.models.policy import Policy, TopTokens
from hybrid_rlhf.rl.algorithms import ALGORITHMS
from hybrid_rlhf.rl.algorithms.grpo import GRPO
from hybrid_rlhf.rl.metrics import rollout_metrics
from hybrid_rlhf.rl.roles import Roles
from hybrid_rlhf.rl.rollouts import served_teacher
from hybrid_rlhf.rl.rollouts.advantages import ScoreScaling, estimate_advantages
from hybrid_rlhf.rl.rollouts.teaching import Teaching
from hybrid_rlhf.rl.types import Batch, Rollout, TeacherPrompts
from hybrid_rlhf.rl.updates.policy_loss import MiniBatch, PolicyLoss
from hybrid_rlhf.runtime.liveness.signals import STOPPED_EXIT_CODE
from hybrid_rlhf.runtime.world import solo_world
from tests.support.errors import refused
from tests.support.faults import Point, run_step
from tests.support.marks import slow
from tests.support.rl import chat_row, rollout_of
from tests.support.servers import json_server
from tests.support.serving import KEY, server_process
from tests.support.steps import MODULES, run_outputs, step_line, write_lines, write_rows
from tests.support.tiny import save_tiny, tiny_model, tiny_tokenizer

CPU = solo_world(torch.device("cpu"))


def scored(*, has_reward: bool = True, seed: int = 0) -> Rollout:
    """Completions of three prompts, some with a gap; NaN outside the mask."""
    chance = torch.Generator().manual_seed(seed)
    time = torch.arange(9)
    mask = (time >= 1) & (time < 1 + torch.randint(1, 7, (6, 1), generator=chance))
    mask &= (torch.rand(mask.shape, generator=chance) > 0.2) | (time == 1)
    old, teacher, values = (
        torch.where(mask, -3 * torch.rand(mask.shape, generator=chance), torch.nan) for _ in range(3)
    )
    scores = torch.randn(6, generator=chance) if has_reward else torch.zeros(6)
    return rollout_of(
        mask,
        mask,
        groups=torch.tensor([0, 0, 1, 1, 2, 2]),
        scores=scores,
        penalties=torch.zeros(6),
        greedy_scores=torch.zeros(6),
        greedy_penalties=torch.zeros(6),
        old_logprobs=old,
        teacher_logprobs=teacher,
        old_values=values,
        components={"r": scores} if has_reward else {},
    )


def estimated(rollout: Rollout, name: str, *, coef: float, gamma: float = 0.0) -> Batch:
    """The batch by an algorithm without a KL penalty."""
    learner = ALGORITHMS[name](replace(RL_ALGORITHMS[name](), kl=None))
    scaling = ScoreScaling("none")
    teacher = TeacherConfig(path="teacher", coef=coef, position_gamma=gamma)
    return estimate_advantages(rollout, learner, scaling=scaling, kl_coef=0.0, world=CPU, teacher=teacher)


@pytest.mark.parametrize(
    ("name", "has_reward"), [("grpo", True), ("grpo", False), ("gdpo", True), ("remax", True), ("ppo", True)]
)
def test_each_token_gets_its_own_log_ratio_after_whitening(name: str, has_reward: bool) -> None:
    """Catches a log-ratio that earlier tokens share, one that is whitened, or one that a critic would learn; the metric
    is its mean over tokens, and equal groups are those of a reward."""
    rollout = scored(has_reward=has_reward)
    plain = estimated(replace(rollout, teacher_logprobs=None), name, coef=0.7)
    batch = estimated(rollout, name, coef=0.7)
    assert rollout.old_logprobs is not None and rollout.teacher_logprobs is not None
    mask = rollout.response_mask
    log_ratio = torch.where(mask, rollout.teacher_logprobs - rollout.old_logprobs, 0.0)
    torch.testing.assert_close(batch.advantages, plain.advantages + 0.7 * log_ratio, atol=1e-5, rtol=0)
    assert torch.equal(batch.rewards, plain.rewards)
    assert has_reward or not plain.advantages.any()
    if name == "ppo":
        assert batch.returns is not None and plain.returns is not None and torch.equal(batch.returns, plain.returns)
    metrics = rollout_metrics(batch, CPU)
    assert metrics["teacher/kl"] == pytest.approx(-float(log_ratio[mask].mean()), rel=1e-5)
    assert ("rollout/frac_reward_zero_std" in metrics) == has_reward, "else every such run is warned about it"


TOKENS = 3
SEQUENCES = list(itertools.product(range(TOKENS), repeat=2))


def policy(first: Tensor, second: Tensor) -> Tensor:
    """[9, 2] log-probs of both tokens of every sequence; the second depends on the first."""
    chosen = torch.tensor(SEQUENCES)
    return torch.stack([first.log_softmax(0)[chosen[:, 0]], second.log_softmax(1)[chosen[:, 0], chosen[:, 1]]], dim=1)


def expected_gradient(parameters: list[Tensor], teacher: Tensor, name: str) -> tuple[Tensor, ...]:
    """The exact mean, over the sequences that the policy samples, of the gradient of an algorithm's loss; a prompt and
    two tokens."""
    current, teacher_logprobs = (pad(logprobs, (1, 0)) for logprobs in (policy(*parameters), teacher))
    zeros, mask = torch.zeros(9), torch.tensor([[False, True, True]]).expand(9, 3)
    known = {"scores": zeros, "penalties": zeros, "groups": zeros.long(), "teacher_logprobs": teacher_logprobs}
    rollout = rollout_of(torch.ones_like(mask), mask, old_logprobs=current.detach(), **known)
    batch = estimated(rollout, name, coef=1.0)
    chances = current.detach().sum(dim=1, keepdim=True).exp()
    learner = ALGORITHMS[name](RL_ALGORITHMS[name]())
    loss = learner.loss(current, batch, weights=chances, tokens_per_completion=2.0)
    return torch.autograd.grad(loss.total, parameters)


@pytest.mark.parametrize("name", ["reinforce", "grpo", "cispo", "sapo"])
def test_the_expected_gradient_is_that_of_the_reverse_kl_at_each_token(name: str) -> None:
    """A closed form on a categorical policy. Catches the sign, the forward KL, and credit for later tokens, whose
    gradient is that of the KL of whole sequences."""
    chance = torch.Generator().manual_seed(4)
    first, second, *teacher = (
        torch.randn(shape, generator=chance, dtype=torch.float64) for shape in (3, (3, 3), 3, (3, 3))
    )
    parameters = [first.requires_grad_(), second.requires_grad_()]
    found = expected_gradient(parameters, policy(*teacher), name)
    of_first, of_second = (
        (student.softmax(-1) * (student.log_softmax(-1) - of.log_softmax(-1))).sum(-1)
        for student, of in zip(parameters, teacher, strict=True)
    )
    chances = first.softmax(0)
    at_each_token, of_sequences = (of_first + (of * of_second).sum() for of in (chances.detach(), chances))
    expected = torch.autograd.grad(at_each_token, parameters, retain_graph=True)
    for mine, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, wanted.to(mine), atol=1e-6, rtol=1e-5)
    other = torch.autograd.grad(of_sequences, parameters)
    assert (other[0] - expected[0]).abs().max() > 0.01, "the two can be told apart"


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    save_tiny(folder, tiny_model(3))
    return folder


ALONE = (
    "--algorithm grpo --reward.components [] --algorithm.kl null --ptx null --reference.refresh_every 0 "
    "--actor.ema_decay 0 --algorithm.score_scaling none --rollout.sampling.n 4"
).split()


def line_of(output: Path, model: Path, rows: Path, teacher: Path, *more: str) -> list[str]:
    """A run of six rollouts; `ALONE` in `more`: without a reward."""
    return step_line("ppo", output, model, rows, "--teacher.path", str(teacher), *more)


def metric(output: Path, name: str) -> list[float]:
    return [line[name] for line in run_outputs(output)["metrics"] if name in line]


def test_a_student_approaches_its_teacher_without_a_reward(
    model_folder: Path, teacher_folder: Path, tmp_path: Path
) -> None:
    """Catches a teacher that is not read in training or in evaluations, and one that is the actor."""
    rows = write_rows(tmp_path / "rows.jsonl")
    more = "--actor.optimizer.lr 3e-3 --rollout.offload_frozen true --rollout.sampling.n 16 --train.epochs 4 "
    more += "--train.max_steps 12 --train.eval_every 12"
    run = tmp_path / "run"
    assert run_step(MODULES["ppo"], 1, line_of(run, model_folder, rows, teacher_folder, *ALONE, *more.split())) == [0]
    held_out = metric(run, "eval/teacher_kl")
    assert len(held_out) == 2 and held_out[-1] < 0.8 * held_out[0], held_out
    assert metric(run, "teacher/kl")[0] > 0.5 and set(metric(run, "objective/scores")) == {0.0}
    assert not metric(run, "objective/kl"), "no reference"
    log = (run / "log.txt").read_text()
    assert "teacher: 1 x log(p_teacher / p_actor) of each token is added to its advantage, which is 0 without" in log


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ([*ALONE, *"--algorithm.entropy.share 0.2 --algorithm.entropy.bounds [0,9]".split()], "policy/selected_tokens"),
        slow(
            "--algorithm ppo --teacher.coef 0.5 --algorithm.entropy.method adaptive --algorithm.entropy.target 5.2 "
            "--algorithm.entropy.step 0.01".split(),
            "policy/entropy_coef",
        ),
    ],
    ids=["alone, clip_cov", "ppo, adaptive"],
)
def test_a_run_that_stops_within_a_step_resumes(
    more: list[str], name: str, model_folder: Path, teacher_folder: Path, tmp_path: Path
) -> None:
    """Catches teacher log-probs, a coefficient of the entropy or a selection of tokens that is not of the checkpoint:
    all metrics and weights are the same."""
    rows = write_rows(tmp_path / "rows.jsonl")
    more = [*more, "--train.max_steps", "4", "--train.eval_every", "0"]
    whole, cut = (line_of(tmp_path / name, model_folder, rows, teacher_folder, *more) for name in ("whole", "cut"))
    assert run_step(MODULES["ppo"], 1, whole) == [0]
    point = Point("hybrid_rlhf.rl.updates.updater:Updater._update_actor", 10, 0, signal=signal.SIGTERM)
    assert run_step(MODULES["ppo"], 1, cut, point) == [STOPPED_EXIT_CODE]
    assert run_step(MODULES["ppo"], 1, [*cut, "--resume", "auto"]) == [0]
    assert run_outputs(tmp_path / "cut") == run_outputs(tmp_path / "whole")
    values = metric(tmp_path / "whole", name)
    assert len(values) == 4 and max(values) > 0


class Alone:
    """A policy on its own, in place of an engine."""

    device = torch.device("cpu")
    router_agreement = None

    def __init__(self, lm: PreTrainedModel, kind: type[Policy] | type[Teacher] = Policy) -> None:
        self.lm, self.module = lm, kind(lm)

    def __call__(self, *rows: Any, **more: Any) -> Any:
        return self.module(*rows, **more)

    def with_router_losses(self, loss: LossSum, weights: Tensor) -> LossSum:
        return loss


FORMS = [("forward", 3), ("reverse", 3), ("jensen_shannon", 3), ("forward", 0), ("reverse", 0), ("jensen_shannon", 0)]


@pytest.mark.parametrize(("kind", "k"), FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("template", [False, True])
def test_the_gradient_of_a_divergence_is_that_of_a_loop_over_tokens(
    kind: Any, k: int, dtype: torch.dtype, template: bool
) -> None:
    """Catches tokens of another place, a weight that is not of the row's length, a temperature of one model alone, and
    a teacher that reads the actor's prompt in place of its own."""
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 1, 1, 0, 1, 0]]).bool()
    real = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]]).bool()
    ids = torch.randint(5, 60, real.shape, generator=torch.Generator().manual_seed(2)) * real
    prompts = [torch.tensor(of) for of in ([7, 8, 9, 10], [11, 12])]
    known = {"teacher_prompts": TeacherPrompts(torch.cat(prompts), torch.tensor([4, 2]))} if template else {}
    rollout = rollout_of(real, mask, input_ids=ids, old_logprobs=torch.zeros(ids.shape), **known)
    actor, teacher = Alone(tiny_model(1).to(dtype)), tiny_model(3).to(dtype)
    config = TeacherConfig(path="t", loss=kind, top_k=k, beta=0.3, coef=0.5)
    temperature, size = 0.7, actor.lm.config.vocab_size
    read = rollout.as_taught()
    if k:
        with torch.no_grad():
            masks = read.input_ids, read.attention_mask, read.response_mask
            found = Policy(teacher)(*masks, temperature, top=TopTokens(k, size))[0]
        teaching = Teaching(config, Roles(CPU, actor, None, teachers={"t": None}), range(size))  # type: ignore[arg-type]
        if k == 3:
            assert teaching.top == TopTokens(3, size)
        rollout = replace(rollout, **teaching.split(found, rollout), teacher_prompts=None)
    loss = PolicyLoss(
        actor,  # type: ignore[arg-type]
        GRPO(GRPOConfig(kl=None, loss_normalization="sequence")),
        temperature=temperature,
        max_tokens=9,
        teacher=config,
        teaches=None if k else Alone(teacher, Teacher),  # type: ignore[arg-type]
    )
    batch = Batch(rollout, torch.zeros(ids.shape), torch.zeros(ids.shape))
    total = loss(batch, MiniBatch(tokens=20.0, sequences=4.0))[0]
    grads = torch.autograd.grad(total.total, [*actor.lm.parameters()])

    plain, wide = (copy.deepcopy(of).double() for of in (actor.lm, teacher))
    expected = torch.zeros((), dtype=torch.float64)
    apart = 0.0
    for row, ids_of_row in enumerate(ids):
        begin, length = int(mask[row].int().argmax()), int(real[row].sum())
        own = ids_of_row[:length]
        taught = torch.cat([prompts[row], own[begin:]]) if template else own
        shift = len(taught) - len(own)
        logprobs, target = (
            (of(text[None]).logits[0] / temperature).log_softmax(-1) for of, text in ((plain, own), (wide, taught))
        )
        for place in mask[row].nonzero().flatten().tolist():
            p, q = target[place + shift - 1].detach(), logprobs[place - 1]
            if k:
                top, tokens = p.topk(k)
                p, q = (torch.cat([of, (1 - of.exp().sum()).log()[None]]) for of in (top, q[tokens]))
            of_token = divergence(q, teacher=p, kind=kind, beta=0.3)
            expected = expected + 0.5 * 20 / (4 * int(mask[row].sum())) * of_token
            apart += float(of_token.detach())
    wanted = torch.autograd.grad(expected, [*plain.parameters()])
    size_of = max(float(of.abs().max()) for of in wanted)
    # the chain of tens of products in the forward and backward of two layers, each rounded once; norms are in float32
    # also in a model of float64, whose head test_several_labels_of_a_state_have_the_gradient_of_whole_logits compares
    bound = 200 * torch.finfo(dtype).eps
    assert float(total.stats["teacher"]) == pytest.approx(apart, rel=max(bound, 1e-5))
    for mine, of_loop in zip(grads, wanted, strict=True):
        torch.testing.assert_close(mine.double(), of_loop, atol=bound * size_of, rtol=0)


def domain_rows(file: Path) -> Path:
    """Prompts of two domains, with a solution each."""
    rows = [{"prompt": f"say {i % 9}", "source": "ab"[i % 2], "solution": f"it is {i % 9}"} for i in range(60)]
    return write_lines(file, rows)


DIVERGENCE = "--teacher.loss reverse --teacher.top_k 5"
TEMPLATE = "{prompt} ({solution})"


def test_a_teacher_reads_the_rows_of_its_source_after_its_own_prompt() -> None:
    """Catches a row of another domain's teacher, a template without the columns, and log-probs of other tokens."""
    roles = Roles(CPU, None, None, teachers={"teacher": None, "teacher.b": None})  # type: ignore[arg-type, dict-item]
    config = TeacherConfig(path="x", per_source={"b": "y", "c": "x"}, prompt_template=TEMPLATE, loss="reverse", top_k=2)
    assert config.models == {"teacher": "x", "teacher.b": "y"}
    teaching = Teaching(config, roles, tiny_tokenizer())
    rows = [
        chat_row("one", source="b", solution="1"),
        chat_row("two", source="c", solution="22"),
        chat_row("3", solution=3),
    ]
    lengths = [len(row["input_ids"]) for row in rows]
    real = torch.arange(max(lengths) + 4) < torch.tensor(lengths)[:, None] + torch.tensor([[4], [2], [3]])
    mask = real & (torch.arange(real.shape[1]) >= torch.tensor(lengths)[:, None])
    ids = torch.randint(5, 60, real.shape)
    rollout = teaching.assigned(rows, rollout_of(real, mask, input_ids=ids))
    assert rollout.teachers is not None and rollout.teachers.tolist() == [1, 0, 0]
    read = rollout.as_taught()
    for row, text in enumerate(["one (1)", "two (22)", "3 (3)"]):
        prompt = chat_row(text)["input_ids"]
        own = ids[row][mask[row]].tolist()
        assert read.input_ids[row][read.attention_mask[row]].tolist() == prompt + own
        assert read.input_ids[row][read.response_mask[row]].tolist() == own
    found = read.input_ids[:, :, None].float() + torch.arange(5) / 8
    columns = teaching.split(found, rollout)
    assert torch.equal(columns["teacher_logprobs"][mask], ids[mask].float())
    assert torch.equal(columns["teacher_top"][mask], ids[mask][:, None] + torch.tensor([1, 2]) / 8)
    assert torch.equal(columns["teacher_tokens"][mask], ids[mask][:, None].expand(-1, 2).int())
    again = Rollout.from_tensors(Rollout.joined([rollout.rows([2]), rollout.rows([0, None])]).tensors())
    assert again.as_taught().input_ids[0].tolist()[:12] == read.input_ids[2].tolist()[:12]
    rule = refused(teaching.require_usable, [chat_row("x", source="b")], longest=9)
    assert rule.startswith("teacher.prompt_template must have")
    alone = Teaching(replace(config, path=None, prompt_template=None), roles, tiny_tokenizer())
    assert "got a row with 'd': add it" in refused(alone.require_usable, [chat_row("x", source="d")], longest=9)


@pytest.mark.parametrize(
    "more",
    [
        "--teacher.loss forward --teacher.top_k 5",
        "--teacher.loss jensen_shannon",
        slow("--teacher.loss reverse --teacher.top_k 5"),
        slow("--teacher.position_gamma 0.5"),
    ],
)
def test_a_student_approaches_its_teacher_by_each_form(
    more: str, model_folder: Path, teacher_folder: Path, tmp_path: Path
) -> None:
    """Catches a sign, and a term of the loss without a gradient."""
    line = f"{more} --actor.optimizer.lr 3e-3 --rollout.sampling.n 8 --train.max_steps 6 --train.eval_every 6"
    rows, run = write_rows(tmp_path / "rows.jsonl"), tmp_path / "run"
    assert run_step(MODULES["ppo"], 1, line_of(run, model_folder, rows, teacher_folder, *ALONE, *line.split())) == [0]
    name = "teacher/divergence" if "loss" in more else "teacher/kl"
    apart = metric(run, name)
    assert apart[-1] < 0.8 * apart[0], apart


@pytest.mark.parametrize("template", ["", TEMPLATE])
def test_all_tokens_are_the_whole_vocabulary(
    template: str, model_folder: Path, teacher_folder: Path, tmp_path: Path
) -> None:
    """Two ways to the same loss: log-probs of all tokens from scoring, and states in the updates, also of models that
    ranks share."""
    rows = domain_rows(tmp_path / "rows.jsonl")
    line = "--teacher.loss reverse --train.max_steps 2 --train.eval_every 0 --actor.optimizer.eps 1e-3".split()
    line += ["--teacher.prompt_template", template] if template else []
    runs = [tmp_path / name for name in ("whole", "top")]
    ranks = 2 if template else 1
    for run, size, more in zip(
        runs, (ranks, 1), (["--actor.zero.stage", str(3 * (ranks > 1))], ["--teacher.top_k", "999"]), strict=True
    ):
        line_of_run = line_of(run, model_folder, rows, teacher_folder, *ALONE, *line, *more)
        assert run_step(MODULES["ppo"], size, line_of_run) == [0] * size
    for key in ("teacher/divergence", "actor/grad_norm"):
        whole, top = (metric(run, key) for run in runs)
        assert len(whole) == 2 and top == pytest.approx(whole, rel=1e-3)


def test_a_run_of_specialists_that_stops_within_a_step_resumes_on_two_ranks_too(
    model_folder: Path, teacher_folder: Path, tmp_path: Path
) -> None:
    """Catches a column of the teachers that is not of the checkpoint, and rows that another rank's teacher misses."""
    rows = domain_rows(tmp_path / "rows.jsonl")
    more = f"{DIVERGENCE} --train.max_steps 3 --train.eval_every 0 --actor.optimizer.eps 1e-3".split()
    more += ["--teacher.per_source", f"{{b: {model_folder}}}", "--teacher.prompt_template", TEMPLATE]
    whole, cut, split = (
        line_of(tmp_path / name, model_folder, rows, teacher_folder, *ALONE, *more)
        for name in ("whole", "cut", "split")
    )
    assert run_step(MODULES["ppo"], 1, whole) == [0]
    point = Point("hybrid_rlhf.rl.updates.updater:Updater._update_actor", 6, 0, signal=signal.SIGTERM)
    assert run_step(MODULES["ppo"], 1, cut, point) == [STOPPED_EXIT_CODE]
    assert run_step(MODULES["ppo"], 1, [*cut, "--resume", "auto"]) == [0]
    assert run_outputs(tmp_path / "cut") == run_outputs(tmp_path / "whole")
    assert run_step(MODULES["ppo"], 2, [*split, "--actor.zero.stage", "3"]) == [0, 0]
    for name in ("teacher/divergence", "teacher/kl"):
        assert metric(tmp_path / "split", name) == pytest.approx(metric(tmp_path / "whole", name), rel=1e-4)


@pytest.mark.parametrize("more", ["", slow("--actor.lora.rank 4 --rollout.max_lag 1")])
def test_a_model_teaches_itself_with_a_solution(more: str, model_folder: Path, tmp_path: Path) -> None:
    """Catches a teacher with the actor's prompt: the divergence would be 0."""
    rows, run = domain_rows(tmp_path / "rows.jsonl"), tmp_path / "run"
    line = [*ALONE, *f"{DIVERGENCE} --train.max_steps 2 --train.eval_every 0 {more}".split()]
    line = step_line("ppo", run, model_folder, rows, *line, "--teacher.prompt_template", TEMPLATE)
    assert run_step(MODULES["ppo"], 1, line) == [0]
    assert min(metric(run, "teacher/divergence")) > 1e-4


def test_the_first_tokens_weigh_more_by_what_has_come_before() -> None:
    """The closed form of IW-OPD; with gamma 0 the advantages are those without."""
    rollout = scored()
    assert rollout.old_logprobs is not None and rollout.teacher_logprobs is not None
    plain, weighted = (estimated(rollout, "grpo", coef=0.7, gamma=gamma).advantages for gamma in (0.0, 0.5))
    for row, mask in enumerate(rollout.response_mask):
        log_ratio = (rollout.teacher_logprobs - rollout.old_logprobs)[row][mask]
        before = 0.0
        for place, value in zip(mask.nonzero().flatten().tolist(), log_ratio.tolist(), strict=True):
            weight = 0.5 * (1 - before / float(log_ratio.abs().sum()))
            assert float(weighted[row, place] - plain[row, place]) == pytest.approx(0.7 * weight * value, abs=1e-5)
            before += abs(value)


def test_a_served_teacher_teaches_as_one_of_the_run(
    model_folder: Path, teacher_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches log-probs of other tokens, prompts or temperatures than those that the run's own teacher reads."""
    monkeypatch.setenv("TEACHER_KEY", KEY)
    rows = domain_rows(tmp_path / "rows.jsonl")
    line = f"{DIVERGENCE} --train.max_steps 2 --train.eval_every 0 --actor.optimizer.eps 1e-3".split()
    line = [*ALONE, *line, "--teacher.prompt_template", TEMPLATE]
    own, served = (tmp_path / name for name in ("own", "served"))
    assert run_step(MODULES["ppo"], 1, line_of(own, model_folder, rows, teacher_folder, *line)) == [0]
    with server_process(f"{teacher_folder}") as (_, url):
        line += ["--teacher.url", f"{url}/v1", "--teacher.api_key", "${TEACHER_KEY}"]
        assert run_step(MODULES["ppo"], 2, step_line("ppo", served, model_folder, rows, *line)) == [0, 0]
    for name in ("teacher/divergence", "teacher/kl"):
        assert metric(served, name) == pytest.approx(metric(own, name), rel=1e-3)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("busy once", None),
        ("down", "teacher.url must be a server that answers, "),
        ("silent", "teacher.url must tell the log-probs of each token and of the 1 most likely ones, "),
        ("other tokens", "the teacher must share the actor's tokens, "),
        ("short", "a teacher must have room for rollout.max_prompt_tokens, rollout.sampling.max_new_tokens and"),
        ("unsteady", "a teacher must answer the same tokens alike, "),
    ],
)
def test_a_served_teacher_is_asked_again_and_must_answer_alike(
    fault: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a request that is not repeated, and a teacher of noise or of other tokens that is believed."""
    asked: list[str] = []
    tokenizer = tiny_tokenizer()

    def answer(method: str, path: str, body: bytes) -> tuple[int, Any]:
        asked.append(path)
        if fault == "down" or (fault == "busy once" and asked.count(path) == 1):
            return 503, {}
        content = json.loads(body) if body else {}
        if path == "/v1/models":
            return 200, {"data": [{"id": "m", "max_model_len": 9 if fault == "short" else 10}]}
        if path == "/tokenize":
            ids = tokenizer(content["prompt"], add_special_tokens=False)["input_ids"]
            return 200, {"tokens": ids[1:] if fault == "other tokens" else ids}
        shift = asked.count(path) / 4 if fault == "unsteady" else 0.0
        if fault == "silent" and len(content["prompt"]) < 4:
            return 200, {
                "choices": [{"prompt_logprobs": [None, *[{"9": {"logprob": -0.5}}] * (len(content["prompt"]) - 1)]}]
            }
        likely = [{str(token): {"logprob": -1.0 - shift}, "9": {"logprob": -0.5}} for token in content["prompt"][1:]]
        return 200, {"choices": [{"prompt_logprobs": [None, *likely]}]}

    monkeypatch.setattr(served_teacher, "retry_delay_seconds", lambda tries: 0.0)
    with json_server(answer) as url:
        teacher = served_teacher.ServedTeacher(TeacherConfig(url=url, loss="forward", top_k=1), k=1)
        if expected is not None and fault != "silent":
            assert refused(teacher.require_same, tokenizer, longest=9).startswith(expected)
            return
        teacher.require_same(tokenizer, longest=9)
        teacher = served_teacher.ServedTeacher(
            TeacherConfig(url=url, loss="forward", top_k=1), k=1
        )  # as a run makes it
        real = torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
        mask = real & torch.tensor([False, True, True])
        rollout = rollout_of(real, mask, input_ids=torch.tensor([[5, 6, 7], [5, 8, 0]]))
        if expected is not None:
            assert refused(teacher, rollout).startswith(expected)
            return
        found = teacher(rollout)
        assert torch.equal(found[mask], torch.tensor([[-1.0, -0.5, 9.0]]).expand(3, 3)) and not found[~mask].any()
