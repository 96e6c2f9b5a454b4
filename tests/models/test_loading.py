from __future__ import annotations

import json
import logging
import re
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GenerationConfig,
    OPTConfig,
    PreTrainedModel,
)

from hybrid_rlhf.configs.sections.model import LoraConfig, ModelConfig
from hybrid_rlhf.data.chat.conversation import stop_token_ids
from hybrid_rlhf.engines.adapters import AdapterEngine
from hybrid_rlhf.engines.partition import full_tensors
from hybrid_rlhf.functional import operations
from hybrid_rlhf.models.lora import adapters_off, add_lora, choose_trained, lora_merged
from hybrid_rlhf.models.pretrained.loading import load_model, position_limit, training_dtype
from hybrid_rlhf.models.pretrained.saving import save_model
from hybrid_rlhf.models.pretrained.tokenizers import load_tokenizer
from hybrid_rlhf.runtime.observability.logs import logger
from hybrid_rlhf.runtime.world import solo_world
from tests.support.errors import user_error
from tests.support.families import variant
from tests.support.messages import user
from tests.support.models import SMALL, build_model, random_adapter
from tests.support.tiny import VOCABULARY, save_tiny, tiny_config, tiny_model, tiny_tokenizer

CPU = torch.device("cpu")
WORLD = solo_world(CPU)
IDS = torch.randint(3, 200, (2, 9), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS, dtype=torch.bool)


def load(path: Path, architecture: str = "causal_lm", **changes: object):  # type: ignore[no-untyped-def]
    return load_model(str(path), architecture, config=ModelConfig(**changes), dtype=torch.float32)  # type: ignore[arg-type]


def save(folder: Path, lm: PreTrainedModel, **settings: Any) -> None:
    save_model(folder, full_tensors(lm, WORLD), lm=lm, world=WORLD, **{"tokenizer": tiny_tokenizer(), **settings})


def with_tower() -> PreTrainedModel:
    text = {**SMALL, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 50, "attention_dropout": 0.5}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14})
    return Gemma3ForConditionalGeneration(config)


@pytest.mark.parametrize("build", [lambda: build_model("gpt2"), with_tower])
def test_dropout_is_off(build: Callable[[], PreTrainedModel], tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)
    model, _ = load(tmp_path, attention="eager")
    model.train()
    assert torch.equal(model(IDS % 50).logits, model(IDS % 50).logits)


def test_weights_that_no_module_takes_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Transformers hides those of layers that predict further tokens; they were missing in what was saved."""
    variant("qwen3_next").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    extra = ["mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight", "mtp.layers.0.mlp.down_proj.weight"]
    save_file({**load_file(file), **{name: torch.ones(2) for name in extra}}, file, metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING, logger=logger.name):
        load(tmp_path)
        load(tmp_path, "scorer")
        load(tmp_path)
    (record,) = caplog.records
    assert record.message == (
        f"{tmp_path} has weights that no module of Qwen3NextForCausalLM takes, which are neither trained nor in what "
        "is saved: mtp.* (1), mtp.layers.0.* (2)"
    )


def test_an_encoder_is_no_reward_model(tmp_path: Path) -> None:
    BertForSequenceClassification(BertConfig(**SMALL, vocab_size=50, num_labels=1)).save_pretrained(tmp_path)
    with user_error("score per token, .* is a BertForSequenceClassification"):
        load(tmp_path, "scorer")


@pytest.mark.parametrize("family", ["gpt_neox", "mixtral", "qwen3_moe", "llama", "hrm_text"])
def test_saved_weights_have_the_names_of_their_family(family: str, tmp_path: Path) -> None:
    """And their values: files of Mixtral have experts apart, those of HRM join query, key and value."""
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_local_experts": 3,
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    }
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape)).save_pretrained(tmp_path / "theirs")
    model = load(tmp_path / "theirs")[0]
    save(tmp_path / "ours", model)
    theirs, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[name], ours[name]) for name in ours)
    assert torch.equal(load(tmp_path / "ours")[0](IDS).logits, model(IDS).logits)


@pytest.mark.parametrize(
    ("family", "rotary", "limit"),
    [("gpt2", None, 31), ("opt", None, 31), ("llama", "default", None), ("llama", "dynamic", 31)],
)
def test_tables_of_positions_are_known(family: str, rotary: str | None, limit: int | None) -> None:
    settings: dict[str, Any] = {"n_positions" if family == "gpt2" else "max_position_embeddings": 31}
    if rotary is not None:
        settings["rope_parameters"] = {"rope_type": rotary, "rope_theta": 1e4, "factor": 4.0}
    assert position_limit(build_model(family, **settings)) == limit


def test_threads_load_models_one_after_another(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at once left transformers' classes without the method that ties weights: later models had no head."""
    running, most = list[int](), list[int]()
    build = AutoModelForCausalLM.from_pretrained

    def counted(*given: Any, **named: Any) -> Any:
        running.append(1)
        most.append(len(running))
        time.sleep(0.05)
        try:
            return build(*given, **named)
        finally:
            running.pop()

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", counted)
    with ThreadPoolExecutor(4) as threads:
        models = [loaded[0] for loaded in threads.map(load, [model_folder] * 4)]
    assert most == [1] * 4
    assert all(torch.equal(model(IDS).logits, models[0](IDS).logits) for model in models)


def test_saved_models_load_with_the_auto_classes_and_are_equal(model_folder: Path, tmp_path: Path) -> None:
    model, _ = load(model_folder)
    tiny_model(7).save_pretrained(tmp_path)  # an earlier save, whose single file transformers would prefer to shards
    save(tmp_path, model, max_shard_bytes=20_000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1, "a small limit gives several shards"
    assert not list(tmp_path.glob(".*"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    weights = again.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    torch.testing.assert_close(again(IDS).logits, model.eval()(IDS).logits)  # fused layers round otherwise
    assert load_tokenizer(str(tmp_path)).chat_template == tiny_tokenizer().chat_template
    scorer, fresh = load(model_folder, "scorer")
    assert fresh and scorer.score.weight.shape == (1, 32)
    save(tmp_path / "s", scorer)
    assert not load(tmp_path / "s", "scorer")[1]
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "s")
    assert torch.equal(loaded.score.weight, scorer.score.weight)
    assert json.loads((tmp_path / "s" / "config.json").read_text())["architectures"] == [
        "LlamaForSequenceClassification"
    ]


def lora_model(model_folder: Path, rank: int = 4):  # type: ignore[no-untyped-def]
    model, _ = load(model_folder)
    add_lora(model, LoraConfig(rank=rank), "causal_lm", seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


def test_settings_of_generation_that_transformers_warns_of_are_saved_with_other_ends(
    model_folder: Path, tmp_path: Path
) -> None:
    """Vicuna's temperature without do_sample, for example."""
    shutil.copytree(model_folder, tmp_path / "theirs")
    settings = {"temperature": 0.9, "top_p": 0.6, "eos_token_id": 2}
    (tmp_path / "theirs" / "generation_config.json").write_text(json.dumps(settings))
    model = load(tmp_path / "theirs")[0]
    assert model.generation_config is not None
    model.generation_config.eos_token_id = [2, 0]
    save(tmp_path / "ours", model)
    saved = GenerationConfig.from_pretrained(tmp_path / "ours")
    assert (saved.temperature, saved.top_p, saved.eos_token_id) == (0.9, 0.6, [2, 0])


@torch.no_grad()
def test_merged_adapters_compute_what_unmerged_ones_do_and_leave_no_trace(model_folder: Path, tmp_path: Path) -> None:
    model = lora_model(model_folder)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    unmerged = model(IDS).logits
    base = load(model_folder)[0](IDS).logits
    assert (unmerged - base).abs().max() > 1e-2
    with lora_merged(model):
        torch.testing.assert_close(model(IDS).logits, unmerged, atol=1e-5, rtol=1e-5)
    assert torch.equal(model(IDS).logits, unmerged)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with adapters_off(model):
        assert torch.equal(model(IDS).logits, base)
    save(tmp_path, model)
    torch.testing.assert_close(
        AutoModelForCausalLM.from_pretrained(tmp_path)(IDS).logits, unmerged, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("lora", [None, LoraConfig(target_modules=["v_proj"])])
def test_an_adapter_beside_the_weights_is_not_trained_on(lora: LoraConfig | None, tmp_path: Path) -> None:
    """transformers adds the adapter to the model. Full training then raised an error, and LoRA saved wrong weights."""
    random_adapter(tiny_model(), tmp_path, 0, ["q_proj"])
    model = load(save_tiny(tmp_path, tiny_model()))[0]
    rule = f"has no adapter beside its weights, {tmp_path} has one: merge it with hybrid-rlhf export"
    with user_error(rule):
        choose_trained(model, lora, "causal_lm", learns=True, seed=0)
    with user_error(rule):
        AdapterEngine(model, world=WORLD)
    choose_trained(model, None, "causal_lm", learns=False, seed=0)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)(IDS).logits
    assert (expected - tiny_model()(IDS).logits).abs().max() > 0.1
    save(tmp_path / "merged", model)
    torch.testing.assert_close(load(tmp_path / "merged")[0](IDS).logits, expected, atol=1e-4, rtol=1e-4)


def test_only_adapters_learn_and_all_linear_leaves_the_head_alone(model_folder: Path) -> None:
    model = lora_model(model_folder)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    assert not any("lm_head" in name for name in trained)
    scorer, _ = load(model_folder, "scorer")
    add_lora(scorer, LoraConfig(rank=2), "scorer", seed=0)
    assert scorer.score.weight.requires_grad


def test_adapters_change_nothing_of_a_bfloat16_model_before_they_learn(model_folder: Path) -> None:
    plain, adapted = (
        load_model(str(model_folder), "causal_lm", config=ModelConfig(), dtype=torch.bfloat16)[0] for _ in range(2)
    )
    choose_trained(adapted, LoraConfig(rank=4), "causal_lm", learns=True, seed=0)
    assert {name: b.dtype for name, b in plain.named_buffers()} == {
        name: b.dtype for name, b in adapted.named_buffers()
    }
    assert {p.dtype for p in adapted.parameters()} == {torch.bfloat16}
    long = torch.arange(250)[None] % 200
    assert torch.equal(plain(long).logits, adapted(long).logits)


def test_a_tokenizer_of_several_templates_is_saved_over_itself(model_folder: Path, tmp_path: Path) -> None:
    model, tokenizer = load(model_folder)[0], tiny_tokenizer()
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": "{{ messages }}"}
    for _ in range(2):
        save(tmp_path / "m", model, tokenizer=tokenizer)
    assert load_tokenizer(str(tmp_path / "m")).chat_template["tool_use"] == "{{ messages }}"
    assert not list((tmp_path / "m").glob(".*"))


def test_lora_refuses_the_head_and_unknown_modules(model_folder: Path, tmp_path: Path) -> None:
    for names, rule in (
        (["lm_head"], "must not match the head"),
        (["q_proj", "v_prj"], "no module .* v_prj"),
        (["q_proj", "embed_tokens"], "must not match an embedding tied to the head"),
    ):
        model, _ = load(model_folder)
        with user_error(rule):
            add_lora(model, LoraConfig(rank=2, target_modules=names), "causal_lm", seed=0)
    tiny_model(tie_word_embeddings=False).save_pretrained(tmp_path)
    add_lora(load(tmp_path)[0], LoraConfig(rank=2, target_modules=["q_proj", "embed_tokens"]), "causal_lm", seed=0)


@pytest.mark.parametrize("lora", [False, True])
def test_a_cpus_products_are_those_of_transformers(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, lora: bool
) -> None:
    calls: list[int] = []
    own = operations.onednn_linear

    def note(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        calls.append(len(weight))
        return own(x, weight, bias)

    monkeypatch.setattr(operations, "_LEAST_PRODUCTS", 1)
    monkeypatch.setattr(operations, "onednn_linear", note)
    model, _ = load(model_folder)
    if lora:
        add_lora(model, LoraConfig(rank=2), "causal_lm", seed=0)
    ours = model(input_ids=IDS).logits
    assert len(calls) >= 7 * model.config.num_hidden_layers
    theirs = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    torch.testing.assert_close(ours, theirs(input_ids=IDS).logits)


def test_tokenizers_are_checked(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "no_pad")
    assert load_tokenizer(str(tmp_path / "no_pad")).pad_token_id == 2
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "no_eos")
    tiny_config().save_pretrained(tmp_path / "none")
    OPTConfig().save_pretrained(tmp_path / "empty")  # transformers builds a tokenizer without a vocabulary
    for name, rule in (
        ("no_eos", "must have an EOS token"),
        ("none", "a model folder must have tokenizer files"),
        ("empty", "must have tokenizer files, .*/empty has none"),
    ):
        with user_error(rule):
            load_tokenizer(str(tmp_path / name))


def test_float16_is_refused_on_a_cpu() -> None:
    with user_error("float16 needs a GPU"):
        training_dtype(ModelConfig(dtype="float16"), CPU)
    assert training_dtype(ModelConfig(), CPU) is torch.float32
    assert training_dtype(ModelConfig(), torch.device("cuda")) is torch.bfloat16


THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' + ('<think>' if thinking else '') + (style or '') }}"
    "{% endif %}"
)


@pytest.mark.parametrize("several", [False, True])
def test_variables_of_a_template_become_its_defaults(tmp_path: Path, several: bool) -> None:
    tokenizer = tiny_tokenizer({"default": THINKING, "tool_use": THINKING} if several else THINKING)  # type: ignore[arg-type]
    tokenizer.save_pretrained(tmp_path / "first")

    def opening(tokenizer: Any, **variables: Any) -> str:
        text = tokenizer.apply_chat_template([user("q")], tokenize=False, add_generation_prompt=True, **variables)
        return text.rpartition("assistant\n")[2]

    values = {"thinking": True, "style": 'it\'s "so"\n{{ x }}'}
    for _ in range(2):  # the same again changes nothing
        tokenizer = load_tokenizer(str(tmp_path / "first"), chat_template_kwargs=values)
        assert opening(tokenizer) == '<think>it\'s "so"\n{{ x }}'
        template = tokenizer.chat_template
        tokenizer.save_pretrained(tmp_path / "first")
    assert load_tokenizer(str(tmp_path / "first")).chat_template == template, "saved with the model"
    assert opening(tokenizer, thinking=False, style="") == "", "a renderer that gives its own is heard"
    again = load_tokenizer(str(tmp_path / "first"), chat_template_kwargs={"thinking": False})
    assert opening(again).startswith("it's"), "the newest settings win"


def test_a_template_may_come_from_a_file(tmp_path: Path) -> None:
    tiny_tokenizer(None).save_pretrained(tmp_path / "base")
    (tmp_path / "chat.jinja").write_text(THINKING)
    tokenizer = load_tokenizer(str(tmp_path / "base"), chat_template=str(tmp_path / "chat.jinja"))
    assert tokenizer.chat_template == THINKING
    mistakes = {None: " does not exist", "\n": " is empty", "a\n{{ b }": ":2 has an error (unexpected '}')"}
    for content, mistake in mistakes.items():
        if content is not None:
            (tmp_path / "bad.jinja").write_text(content)
        with user_error("chat_template must name a file with a Jinja template, .*bad.jinja" + re.escape(mistake)):
            load_tokenizer(str(tmp_path / "base"), chat_template=str(tmp_path / "bad.jinja"))
    with user_error("chat_template_kwargs .* has none"):
        load_tokenizer(str(tmp_path / "base"), chat_template_kwargs={"thinking": True})


def test_the_end_of_the_template_s_turn_stops_answers_too() -> None:
    tokenizer = tiny_tokenizer()
    assert stop_token_ids(tokenizer, [5, 2]) == (2, 5)
    tokenizer.eos_token = "<|endoftext|>"
    assert stop_token_ids(tokenizer, None) == (0, 2), "a base model's eos is not what its template ends turns with"
