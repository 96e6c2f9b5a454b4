"""Other continuations of a sample from one of its tokens, by the weights of its step, with scores."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hybrid_rlhf.configs.sections.rules import require
from hybrid_rlhf.data.chat.conversation import stop_token_ids
from hybrid_rlhf.data.chat.reasoning import text_decoder
from hybrid_rlhf.rl.images import digests_of
from hybrid_rlhf.rl.replay.recorded import require_in_completion, require_one_turn
from hybrid_rlhf.rl.replay.replaying import ReplayedStep
from hybrid_rlhf.rl.replay.rescoring import SampleScore, completed, score_completions
from hybrid_rlhf.rl.rollouts.sampler import RolloutSampler

_BRANCH_STEP = 2**33
"""Key of the random streams of branches, distinct from steps and evaluations, so that a branch is reproduced bit for
bit."""


@dataclass(frozen=True)
class Branch:
    """A completion with the sample's tokens up to one of them and newly sampled tokens after it."""

    text: str
    """Text from the branch on, without special tokens."""
    token_ids: list[int]
    """Tokens from the branch on."""
    stopped: bool
    """True if the completion ended by itself."""
    score: SampleScore
    """Score of the whole completion."""


def branch(replayed: ReplayedStep, index: int, *, token: int, text: str | None = None, n: int = 4) -> list[Branch]:
    """Continue a sample from a token. Every rank calls.

    The weights are those at the start of the step; with a policy lag, older ones sampled a part of its tokens.

    Args:
        replayed: the step.
        index: index of the sample.
        token: position among the tokens of prompt and completion; the tokens before it are kept.
        text: text at the start of the continuations.
        n: number of continuations.

    Raises:
        UserError: if the position is not in the completion, or leaves no room for a token.
    """
    session = replayed.session
    record = replayed.record(index)
    config = session.config
    tokenizer = session.tokenizer
    world = session.run.world
    prompt = record.ids[: record.prompt_length]
    require_one_turn(config)
    require_in_completion(record, token)
    text_ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
    beginning = [*record.ids[record.prompt_length : token], *text_ids]
    sampling = config.rollout.sampling
    left = sampling.max_new_tokens - len(beginning)
    require(
        left >= 1,
        f"a completion has at most {sampling.max_new_tokens} tokens (rollout.sampling.max_new_tokens), the branch "
        f"begins with {len(beginning)}: give an earlier branch.token, or less text",
    )
    sampling = replace(
        sampling, n=n, max_new_tokens=left, min_new_tokens=max(0, sampling.min_new_tokens - len(beginning))
    )
    roles = session.parts.roles
    sampler = RolloutSampler(
        roles.sampler,
        replace(config.rollout, sampling=sampling),
        world=world,
        stop_token_ids=stop_token_ids(tokenizer, roles.actor.facts.eos_token_ids),
        seed=config.seed,
        timers=session.run.timers,
        tokenizer=tokenizer,
        images=roles.images,
    )
    rollout = replayed.batch.rollout
    assert rollout.prompt_rows is not None
    row = session.prompts[int(rollout.numbered(world).gather(rollout.prompt_rows)[index])]
    given = {"input_ids": [*prompt, *beginning], "images": row.get("images")}
    sampled = sampler.sample([given], step=_BRANCH_STEP, first=token)
    held = [ids[mask].tolist() for ids, mask in zip(sampled.input_ids, sampled.response_mask, strict=True)]
    stopped = sampled.stopped.tolist()
    scores = score_completions(
        roles.reward,
        completed(prompt, [[*beginning, *ids] for ids in held], stopped, digests_of(row)),
        row,
        roles.images_of,
        tokenizer=tokenizer,
        planner=session.parts.planner,
    )
    shown = text_decoder(tokenizer)
    new = sampled.numbered(world).bring(list(zip(held, stopped, strict=True)), everywhere=True)
    return [
        Branch(shown([*text_ids, *ids]), [*text_ids, *ids], ended, score)
        for (ids, ended), score in zip(new, scores, strict=True)
    ]
