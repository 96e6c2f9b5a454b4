"""GGUF files: every family that can be written computes the same after it is read back, others are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, GemmaTokenizer, PreTrainedModel

from hybrid_rlhf.generation import GenerationEngine, SamplingParams
from hybrid_rlhf.models.head_check import module_logprobs
from hybrid_rlhf.models.pretrained import sources
from hybrid_rlhf.models.pretrained.gguf import writing
from hybrid_rlhf.models.pretrained.gguf.positions import read_scaling
from hybrid_rlhf.models.pretrained.gguf.reading import read_gguf, read_gguf_config
from hybrid_rlhf.models.pretrained.gguf.writing import write_gguf
from hybrid_rlhf.models.pretrained.sources import resolve_model
from hybrid_rlhf.models.pretrained.tokenizers import load_tokenizer
from hybrid_rlhf.planning import shapes
from hybrid_rlhf.planning.shapes import read_config
from hybrid_rlhf.runtime.world import solo_world
from tests.support.errors import user_error
from tests.support.model_types import tiny_of_type
from tests.support.models import build_model
from tests.support.tiny import VOCABULARY, tiny_config, tiny_model, tiny_tokenizer

pytest.importorskip("gguf")
PROBE = list(range(3, 40))
GEMMA2: dict[str, Any] = {"head_dim": 256, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 256}


def family(name: str, **changes: Any) -> PreTrainedModel:
    """A random model whose settings are those that the family's files state."""
    found = {
        "llama": {},
        "mistral": {"sliding_window": None},
        "qwen2": {},
        "qwen3": {"head_dim": 128},
        "gemma2": GEMMA2,
        "gemma3_text": {"head_dim": 256, "query_pre_attn_scalar": 256},
        "phi3": {},
    }[name]
    return build_model(name, **{"max_position_embeddings": 256, **found, **changes})


def mixture(name: str, **changes: Any) -> PreTrainedModel:
    """A random mixture of experts."""
    return tiny_of_type(name, vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2, pad_token_id=2, **changes)


def write(file: Path, lm: PreTrainedModel, weights: Any = "f32", *, tokenizer: Any = None) -> float:
    """Write a file; the change of log-probs."""
    return write_gguf(file, lm, tokenizer or tiny_tokenizer(), weights=weights, name="tiny")


def assert_same(found: PreTrainedModel, expected: PreTrainedModel) -> None:
    """Two models compute the same."""
    pair = (module_logprobs(lm.eval(), PROBE) for lm in (found, expected))
    torch.testing.assert_close(*pair, atol=1e-4, rtol=1e-4)


def rotary(kind: str, **settings: Any) -> dict[str, Any]:
    """Settings of scaled positions, of a model whose original context is shorter than the probe."""
    known = {} if kind == "linear" else {"original_max_position_embeddings": 16}
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, **known, **settings}}


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": [1.0, 2.0, 3.0, 4.0], "short_factor": [1.0] * 4}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
MORE: dict[str, Callable[[], PreTrainedModel]] = {
    "mixtral": lambda: mixture("mixtral"),
    "qwen2_moe": lambda: mixture("qwen2_moe", shared_expert_intermediate_size=80),
    "qwen3_moe": lambda: mixture("qwen3_moe", norm_topk_prob=True),
    "phi3 with windows": lambda: family("phi3", sliding_window=7),
    "phi3, some elements rotated": lambda: family(
        "phi3", rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    ),
    "phi3, longrope": lambda: family("phi3", rope_parameters=LONGROPE, original_max_position_embeddings=64),
    "llama, linear": lambda: tiny_model(**rotary("linear")),
    "qwen2, yarn": lambda: family("qwen2", **rotary("yarn")),
    "qwen3, yarn": lambda: family("qwen3", **rotary("yarn")),
    "llama, llama3": lambda: tiny_model(**rotary("llama3", **LLAMA3)),
    "mixtral, llama3": lambda: mixture("mixtral", **rotary("llama3", **LLAMA3)),
}
"""What transformers reads in part or not at all, and our own reader completes."""


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3"])
def test_a_family_computes_the_same_after_it_is_read_back(name: str, tmp_path: Path) -> None:
    lm, file = family(name), tmp_path / "model.gguf"
    assert write(file, lm) < 1e-4
    read = AutoModelForCausalLM.from_pretrained(str(tmp_path), gguf_file=file.name, dtype=torch.float32)
    assert_same(read, lm)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize("name", MORE)
def test_experts_and_scaled_positions_are_read_back(name: str, tmp_path: Path) -> None:
    lm, file = MORE[name](), tmp_path / "model.gguf"
    assert write(file, lm) < 1e-4
    found, _ = read_gguf(file)
    assert type(found) is type(lm)
    assert_same(found, lm)


def test_phi_4_has_no_window(tmp_path: Path) -> None:
    """Its files state a window of 0 tokens, by which llama.cpp knows it."""
    lm, file = family("phi3", sliding_window=None), tmp_path / "model.gguf"
    assert write(file, lm) < 1e-4
    from gguf import GGUFReader

    assert GGUFReader(file).fields["phi3.attention.sliding_window"].contents() == 0
    read, _ = read_gguf(file)
    assert read.config.sliding_window is None
    assert_same(read, lm)


def test_factors_of_another_scaling_than_llama_3s_are_kept(tmp_path: Path) -> None:
    """A file of another program: its factors are what it computes."""
    lm, file = tiny_model(**rotary("llama3", **LLAMA3)), tmp_path / "model.gguf"
    write(file, lm)
    config = read_gguf_config(file)
    factors = torch.tensor([1.0, 1.5, 2.5, 3.0])
    read_scaling(config, {}, {"rope_freqs.weight": factors})
    assert config.rope_parameters["rope_type"] == "longrope"
    read = AutoModelForCausalLM.from_config(config)
    plain = AutoModelForCausalLM.from_config(tiny_config()).model.rotary_emb.inv_freq
    torch.testing.assert_close(read.model.rotary_emb.inv_freq, plain / factors)
    assert read.model.rotary_emb.attention_scaling == 1.0


def test_routers_stay_float32_in_a_small_type(tmp_path: Path) -> None:
    """As llama.cpp reads them."""
    from gguf import GGUFReader

    write(tmp_path / "m.gguf", mixture("qwen2_moe"), "q8_0")
    types = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(tmp_path / "m.gguf").tensors}
    assert types["blk.0.ffn_gate_inp.weight"] == types["blk.0.ffn_gate_inp_shexp.weight"] == "F32"
    assert types["blk.0.ffn_gate_exps.weight"] == types["blk.0.ffn_up_shexp.weight"] == "Q8_0"


@pytest.mark.parametrize(("weights", "least", "most"), [("f16", 0, 0.01), ("bf16", 1e-4, 0.1), ("q8_0", 1e-4, 0.1)])
def test_a_type_rounds_the_weights_and_shrinks_the_file(
    weights: Any, least: float, most: float, tmp_path: Path
) -> None:
    lm = tiny_model(hidden_size=64, intermediate_size=96)
    write(tmp_path / "wide.gguf", lm)
    change = write(tmp_path / "model.gguf", lm, weights)
    assert least <= change < most
    assert (tmp_path / "model.gguf").stat().st_size < 0.75 * (tmp_path / "wide.gguf").stat().st_size


def test_the_engine_completes_and_tokenizes_as_with_the_folder(tmp_path: Path, model_folder: Path) -> None:
    lm, tokenizer = tiny_model(), tiny_tokenizer()
    file = tmp_path / "tiny.gguf"
    write(file, lm)
    world = solo_world(torch.device("cpu"))
    read = load_tokenizer(resolve_model(str(file), world=world, cache_dir=str(tmp_path / "cache")))
    assert read.chat_template == tokenizer.chat_template
    assert (read.eos_token, read.bos_token) == (tokenizer.eos_token, tokenizer.bos_token)
    text = "<|im_start|>user\nwhat is 12 + 30?<|im_end|>\n"
    assert read(text)["input_ids"] == tokenizer(text)["input_ids"]
    greedy = SamplingParams(max_new_tokens=8, temperature=0.0)
    folder = resolve_model(str(file), world=world, cache_dir=str(tmp_path / "cache"))
    found, expected = (
        GenerationEngine.from_pretrained(path, dtype=torch.float32).generate([PROBE], greedy)[0][0].token_ids
        for path in (folder, str(model_folder))
    )
    assert found == expected


def test_the_plan_reads_the_config_of_the_folder_once_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header has the vocabulary, whose reading takes half of a plan; both must describe one model."""
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "tiny.gguf", tiny_model())
    read_config.cache_clear()
    header = read_config(str(tmp_path / "tiny.gguf"))
    folder = resolve_model(str(tmp_path / "tiny.gguf"), world=solo_world(torch.device("cpu")))
    read_config.cache_clear()
    monkeypatch.setattr(shapes, "read_gguf_config", pytest.fail)
    found = read_config(str(tmp_path / "tiny.gguf"))
    assert Path(folder).is_relative_to(tmp_path)
    left_out = {
        "_name_or_path",
        "architectures",
        "dtype",
        "quantization_config",
        "transformers_version",
    }  # of a saved model alone
    shared = [{k: v for k, v in config.to_dict().items() if k not in left_out} for config in (header, found)]
    assert shared[0] == shared[1]


def test_a_file_that_another_run_dequantises_meanwhile_is_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two runs could not rename its own folder, and ended with a traceback."""
    file = tmp_path / "tiny.gguf"
    write(file, tiny_model())

    def resolve() -> str:
        return resolve_model(str(file), world=solo_world(torch.device("cpu")), cache_dir=str(tmp_path / "cache"))

    def read(source: Path) -> Any:
        monkeypatch.undo()
        resolve()
        return read_gguf(source)

    monkeypatch.setattr(sources, "read_gguf", read)
    folder = Path(resolve())
    assert (folder / "config.json").is_file() and [*folder.parent.iterdir()] == [folder]


def test_a_sentencepiece_vocabulary_is_read_back(tmp_path: Path) -> None:
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *"▁helowrd", "he", "ll", "▁w"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = GemmaTokenizer(vocab=vocabulary, merges=[("h", "e"), ("l", "l"), ("▁", "w")])
    lm = family("gemma3_text", vocab_size=len(vocabulary) + 3)
    write(tmp_path / "model.gguf", lm, tokenizer=tokenizer)


def test_what_the_format_cannot_express_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    cases = [
        (build_model("opt"), "got OPTForCausalLM"),
        (tiny_model(**rotary("dynamic")), "without rotary positions of the kind dynamic"),
        (family("qwen2", **rotary("llama3", **LLAMA3)), "without rotary positions of the kind llama3"),
        (family("qwen2", **rotary("yarn", attention_factor=1.0)), "attention_scaling of its rotary positions"),
        (family("qwen3", **rotary("yarn", beta_slow=2.0)), "inv_freq of its rotary positions changes"),
        (family("mistral", sliding_window=4), "without sliding window"),
        (family("gemma2", attn_logit_softcapping=20.0), "attn_logit_softcapping 20.0 becomes 50.0"),
        (mixture("qwen3_moe", norm_topk_prob=False), "norm_topk_prob False becomes True"),
        (mixture("qwen2_moe", mlp_only_layers=[1]), "no name for the weight model.layers.1.mlp.gate_proj"),
    ]
    for lm, rule in cases:
        with user_error(rule):
            write(tmp_path / "model.gguf", lm)
        assert not list(tmp_path.iterdir())


def test_a_file_with_other_weights_is_not_given_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout that llama.cpp does not have."""
    plain = lambda name, weight, family, config: weight.detach().float().contiguous()  # noqa: E731
    monkeypatch.setattr(writing, "written_weight", plain)
    with user_error(r"must compute what the model does, the weight .*q_proj.* changes"):
        write(tmp_path / "model.gguf", tiny_model())
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_of_another_kind_is_refused(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    with user_error("got Digits and ByteLevel"):
        write(tmp_path / "model.gguf", tiny_model(), tokenizer=tokenizer)
