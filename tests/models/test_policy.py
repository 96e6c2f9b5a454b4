"""Log-probs, values and scores against Hugging Face's own forward, for each family, padded and alone."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from hybrid_rlhf.functional.logprobs import token_logprobs
from hybrid_rlhf.functional.masking import last_index, position_ids
from hybrid_rlhf.models import head_check
from hybrid_rlhf.models import policy as policy_module
from hybrid_rlhf.models.families import HeadConvention, head_convention, keep_float32_logits
from hybrid_rlhf.models.head_check import require_own_logits
from hybrid_rlhf.models.policy import Policy, Scorer, backbone_hidden, model_rows, scores_at_end, wide_logits
from tests.support.errors import user_error
from tests.support.models import HEAD_FAMILIES, build_model, padded_rows


@pytest.mark.parametrize("family", HEAD_FAMILIES)
@torch.no_grad()
def test_logprobs_are_those_of_hugging_face_and_padding_changes_nothing(family: str) -> None:
    model = build_model(family)
    policy = Policy(model)
    ids, mask = padded_rows([9, 5, 7])
    logprobs, entropy = policy(ids, mask, mask, 0.7)
    for row, length in enumerate([9, 5, 7]):
        alone = ids[row : row + 1, :length]
        logits = model(input_ids=alone).logits[:, :-1]
        expected = token_logprobs(logits / 0.7, labels=alone[:, 1:])
        torch.testing.assert_close(logprobs[row : row + 1, 1:length], expected, atol=2e-5, rtol=1e-4)
        expected = torch.distributions.Categorical(logits=logits / 0.7).entropy()
        torch.testing.assert_close(entropy[row : row + 1, 1:length], expected, atol=2e-5, rtol=1e-4)
        assert (logprobs[row, length:] == 0).all() and logprobs[row, 0] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", HEAD_FAMILIES)
def test_every_head_of_the_table_passes_the_check(family: str, dtype: torch.dtype) -> None:
    require_own_logits(build_model(family).to(dtype))


@pytest.mark.parametrize("family", HEAD_FAMILIES)
@torch.no_grad()
def test_logits_of_a_bfloat16_model_stay_in_float32(family: str) -> None:
    model = build_model(family).to(torch.bfloat16)
    ids, mask = padded_rows([9, 5, 7])
    convention = head_convention(model.config)
    for wanted, error in ((True, 1e-5), (False, None)):
        keep_float32_logits(model, wanted)
        found, _ = Policy(model)(ids, mask, mask, 0.7)
        hidden = backbone_hidden(model, model_rows(model, ids, mask, mask))
        places = mask & (position_ids(mask) > 0)
        head = model.get_output_embeddings()
        bias = getattr(head, "bias", None)
        states = hidden.float() if convention.softcap is None else (hidden * convention.scale).float()
        logits = torch.nn.functional.linear(states, head.weight.float(), None if bias is None else bias.float())
        logits = logits * (convention.scale if convention.softcap is None else 1.0)
        if convention.softcap is not None:
            logits = convention.softcap * torch.tanh(logits / convention.softcap)
        expected = token_logprobs(logits[None] / 0.7, labels=ids[places][None])[0]
        if error is None:
            assert float((found[places] - expected).abs().max()) > 1e-4, "rounded to bfloat16"
        else:
            torch.testing.assert_close(found[places], expected, atol=error, rtol=error)


def test_a_head_that_does_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_module, "head_convention", lambda config: HeadConvention())
    for dtype in (torch.float32, torch.bfloat16):
        with user_error("must agree with the logits of GraniteForCausalLM to .* nats, they differ by"):
            require_own_logits(build_model("granite", logits_scaling=0.05).to(dtype))
    monkeypatch.setattr(head_check, "backbone_of", lambda lm: lm)
    with user_error("need the hidden states below the head, LlamaForCausalLM has no"):
        require_own_logits(build_model("llama"))


def test_only_wanted_tokens_are_computed_and_carry_gradient() -> None:
    policy = Policy(build_model("llama"))
    ids, mask = padded_rows([8, 6])
    wanted = torch.zeros_like(mask)
    wanted[0, 3:5] = True
    logprobs, _ = policy(ids, mask, wanted)
    assert ((logprobs != 0) == wanted).all()
    whole, _ = policy(ids, mask, mask)
    torch.testing.assert_close(logprobs[wanted], whole[wanted])


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2", "bloom", "qwen2", "gpt_neox"])
@torch.no_grad()
def test_the_score_of_a_row_is_its_score_in_any_padded_batch(family: str) -> None:
    model = build_model(family, AutoModelForSequenceClassification, num_labels=1)
    scorer = Scorer(model)
    lengths = [9, 4, 7, 1]
    for left in (False, True):
        ids, mask = padded_rows(lengths, left=left)
        ids[0, 4] = 2  # eos, which is pad, in the middle of a row
        scores = scores_at_end(scorer(ids, mask), mask)
        for row, length in enumerate(lengths):
            alone = ids[row : row + 1][mask[row : row + 1]].view(1, length)
            expected = scores_at_end(scorer(alone, torch.ones_like(alone, dtype=torch.bool)), torch.ones(1, length))
            torch.testing.assert_close(scores[row : row + 1], expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_scores_agree_with_the_sequence_classifier_that_users_load() -> None:
    model = build_model("llama", AutoModelForSequenceClassification, num_labels=1)
    ids, mask = padded_rows([9, 4, 7])
    scores = scores_at_end(Scorer(model)(ids, mask), mask)
    torch.testing.assert_close(scores, model(input_ids=ids, attention_mask=mask.long()).logits[:, 0], atol=1e-5, rtol=0)
    assert last_index(mask).tolist() == [8, 3, 6]


@torch.no_grad()
def test_a_module_that_generates_keeps_its_logits_in_float32() -> None:
    model = build_model("granite").to(torch.bfloat16)
    ids, mask = padded_rows([9])
    with wide_logits(model):
        found = model(input_ids=ids).logits
    hidden = backbone_hidden(model, model_rows(model, ids, mask, mask))
    exact = hidden.float() @ model.get_output_embeddings().weight.float().t() / 4.0
    torch.testing.assert_close(found[0, :-1], exact, atol=1e-5, rtol=1e-5)
    assert model(input_ids=ids).logits.dtype is torch.bfloat16, "outside it the model is as it was"
    keep_float32_logits(model, False)
    with wide_logits(model):
        assert model(input_ids=ids).logits.dtype is torch.bfloat16
