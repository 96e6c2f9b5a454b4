"""`hybrid-rlhf export`: the folder or file that it writes is the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hybrid_rlhf.cli.saved_models import export
from hybrid_rlhf.models.head_check import module_logprobs
from tests.support.commands import refusal
from tests.support.tiny import tiny_config, tiny_model, tiny_tokenizer

PROBE = list(range(3, 40))


def logprobs(folder: Path) -> torch.Tensor:
    """Of a folder, by Hugging Face."""
    return module_logprobs(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), PROBE)


def test_the_home_of_nobody_is_a_folder(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    export.main([str(model_folder), "--output", "~nosuch/out"])
    assert (tmp_path / "~nosuch" / "out" / "config.json").is_file()


def test_dtype_shards_and_card(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source"
    tiny_model().save_pretrained(source)
    tiny_tokenizer().save_pretrained(source)
    (source / "README.md").write_text("# Mine\n")
    output = tmp_path / "out"
    export.main([str(source), "--output", str(output), "--dtype", "bfloat16", "--shard_gib", "0.00001"])
    assert len(list(output.glob("model-*.safetensors"))) > 1
    assert json.loads((output / "config.json").read_text())["dtype"] == "bfloat16"
    weights = {name: value for file in output.glob("*.safetensors") for name, value in load_file(file).items()}
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    torch.testing.assert_close(logprobs(output), logprobs(model_folder), atol=0.1, rtol=0.1)
    assert (output / "README.md").read_text() == "# Mine\n" and (output / "tokenizer.json").is_file()
    assert f"{output}: bfloat16, " in capsys.readouterr().out
    assert not list(tmp_path.glob(".*"))


def test_an_adapter_is_merged(model_folder: Path, tmp_path: Path) -> None:
    model = get_peft_model(
        tiny_model(), LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    )
    expected = module_logprobs(model.eval(), PROBE)
    model.save_pretrained(tmp_path / "adapter")
    line = [str(model_folder), "--output", str(tmp_path / "out"), "--adapter", str(tmp_path / "adapter")]
    export.main(line)
    torch.testing.assert_close(logprobs(tmp_path / "out"), expected, atol=1e-4, rtol=1e-4)
    assert (expected - logprobs(model_folder)).abs().max() > 0.1
    assert not list((tmp_path / "out").glob("adapter*"))


def test_a_gguf_file_is_written_and_measured(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gguf")
    output = tmp_path / "model.gguf"
    export.main([str(model_folder), "--output", str(output), "--format", "gguf", "--dtype", "q8_0"])
    assert output.is_file() and "q8_0, read back; log-probs change by" in capsys.readouterr().out


def test_a_reward_model_keeps_its_head(tmp_path: Path) -> None:
    torch.manual_seed(1)
    scorer = AutoModelForSequenceClassification.from_config(tiny_config(num_labels=1))
    scorer.save_pretrained(tmp_path / "reward")
    tiny_tokenizer().save_pretrained(tmp_path / "reward")
    export.main([str(tmp_path / "reward"), "--output", str(tmp_path / "out"), "--dtype", "float32"])
    read = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(read.score.weight, scorer.score.weight)


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ([], "a model must be named"),
        (["MODEL"], "--output must name what to write"),
        (["MODEL", "--output", "MODEL"], "--output must not exist"),
        (["MODEL", "--output", "OUT", "--format", "gguf"], "output of format gguf ends with .gguf"),
        (["MODEL", "--output", "OUT.gguf"], "output of format safetensors does not end with .gguf"),
        (["MODEL", "--output", "OUT", "--dtype", "q8_0"], "dtype q8_0 is for format gguf"),
        (["MODEL", "--output", "OUT", "--adapter", "MODEL"], "adapter_config.json"),
        (["REWARD", "--output", "OUT.gguf", "--format", "gguf"], "causal LMs of the families"),
        (["LARGE", "--output", "OUT", "--dtype", "float16"], "weights must fit --dtype"),
        (["MODEL", "--output", "OUT", "--adapter", "ADAPTER"], "must fit LlamaForCausalLM"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    words: list[str], rule: str, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"MODEL": model_folder, "OUT": tmp_path / "out", "OUT.gguf": tmp_path / "out.gguf"}
    places |= {name: tmp_path / name.lower() for name in ("REWARD", "LARGE", "ADAPTER")}
    if "REWARD" in words:
        AutoModelForSequenceClassification.from_config(tiny_config(num_labels=1)).save_pretrained(places["REWARD"])
    if "LARGE" in words:
        model = tiny_model()
        model.model.layers[0].mlp.up_proj.weight.data[0, 0] = 1e6
        model.save_pretrained(places["LARGE"])
    if "ADAPTER" in words:
        other = get_peft_model(tiny_model(hidden_size=64), LoraConfig(r=4, target_modules=["q_proj"]))
        other.save_pretrained(places["ADAPTER"])
    for name in ("REWARD", "LARGE"):
        if name in words:
            tiny_tokenizer().save_pretrained(places[name])
    assert rule in refusal(export.main, [places.get(word, word) for word in words], capsys)
    assert not list(tmp_path.glob("out*")) and not list(tmp_path.glob(".out*"))
