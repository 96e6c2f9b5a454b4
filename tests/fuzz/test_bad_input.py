"""Every mistake is answered by one line that says the rule, the value and the fix; here each with the whole line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import torch

from hybrid_rlhf.configs.cli import parse_config
from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.inference import GenerateConfig
from hybrid_rlhf.configs.pipeline import PipelineConfig
from hybrid_rlhf.configs.ppo import PPOConfig
from hybrid_rlhf.configs.sections import LoraConfig, ModelConfig
from hybrid_rlhf.configs.sft import SFTConfig
from hybrid_rlhf.data.chat import encode_prompt
from hybrid_rlhf.data.rows import head_place, labelled_row, preference_row, prompt_row, sft_row, stepwise_row
from hybrid_rlhf.data.sources import open_source
from hybrid_rlhf.engines.ds_config import read_overrides
from hybrid_rlhf.models.loading import load_model
from hybrid_rlhf.models.lora import add_lora
from hybrid_rlhf.models.sources import resolve_model
from hybrid_rlhf.models.tokenizers import load_tokenizer
from hybrid_rlhf.runtime.world import solo_world
from tests.fuzz.cases import DATA, FILES, LINES

ROOT = Path(__file__).parents[2]
CONFIGS: dict[str, Any] = {"sft": SFTConfig, "ppo": PPOConfig, "pipeline": PipelineConfig, "generate": GenerateConfig}
ROWS: dict[str, Callable[..., Any]] = {
    "sft": sft_row, "pair": preference_row, "prompt": prompt_row,
    "label": labelled_row, "steps": stepwise_row,
    "head": lambda place, row: head_place(place, row, ["helpful", "harmless"]),
}  # fmt: skip
Change = Callable[[Path], Any]


def answer(read: Callable[[], Any], folder: Path) -> str:
    """The line, with D for the folder."""
    with pytest.raises(UserError) as refused:
        read()
    return str(refused.value).replace(str(folder), "D")


def number(case: object) -> str:
    return ""  # cases are told apart by their number


@pytest.mark.parametrize(("config", "line", "expected"), LINES, ids=number)
def test_a_line(config: str, line: list[str], expected: str, tmp_path: Path) -> None:
    assert answer(lambda: parse_config(CONFIGS[config], line), tmp_path) == expected


@pytest.mark.parametrize(("content", "expected"), FILES, ids=number)
def test_a_config_file(content: str | bytes, expected: str, tmp_path: Path) -> None:
    write(tmp_path / "c.yaml", content)
    assert answer(lambda: parse_config(SFTConfig, ["--config", str(tmp_path / "c.yaml")]), tmp_path) == expected


@pytest.mark.parametrize(("name", "content", "kind", "expected"), DATA, ids=number)
def test_a_data_file(name: str, content: str | bytes, kind: str, expected: str, tmp_path: Path) -> None:
    write(tmp_path / name, content)
    assert answer(lambda: read_rows(tmp_path / name, ROWS[kind]), tmp_path) == expected


def write(file: Path, content: str | bytes) -> None:
    file.write_bytes(content if isinstance(content, bytes) else content.encode())


def read_rows(source: Path | str, adapter: Callable[..., Any] = sft_row) -> list[Any]:
    return [adapter(place, row) for place, row in open_source(str(source))]


def loop(place: Path) -> None:
    place.symlink_to(place)


def damaged_data_set(place: Path) -> None:
    datasets.Dataset.from_list([{"text": "a"}]).save_to_disk(place)
    (place / "state.json").write_text("{}")


def damaged_text(place: Path) -> None:
    """A column of text that is not UTF-8."""
    buffers = [None, pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0"), pyarrow.py_buffer(b"\xff")]
    table = pyarrow.table({"text": pyarrow.Array.from_buffers(pyarrow.string(), 1, buffers)})
    pyarrow.parquet.write_table(table, place)


def parquet(columns: dict[str, Any], features: str | None = None) -> Change:
    table = pyarrow.table(columns)
    if features is not None:
        table = table.replace_schema_metadata({"huggingface": f'{{"info": {{"features": {features}}}}}'})
    return lambda place: pyarrow.parquet.write_table(table, place)


SOURCE = "a data source is a file, a folder or a hub name"
PLACES = [
    ("absent.jsonl", lambda place: None, f"{SOURCE}, D/absent.jsonl does not exist: check the path"),
    ("x\0.jsonl", lambda place: None, rf"{SOURCE}, D/x\x00.jsonl does not exist: check the path"),
    ("pipe.jsonl", os.mkfifo, f"{SOURCE}, D/pipe.jsonl is a pipe or a device: check the path"),
    ("loop.jsonl", loop, f"{SOURCE}, D/loop.jsonl does not exist: check the path"),
    ("r.jsonl", Path.mkdir, "a data folder is one that save_to_disk wrote, D/r.jsonl is not: name a file in it"),
    ("set", damaged_data_set, "a data folder is one that save_to_disk wrote, D/set is not: name a file in it"),
    (
        "r.parquet",
        damaged_text,
        "D/r.parquet is not Parquet ('utf-8' codec can't decode byte 0xff in position 0: invalid start byte): "
        "check the file",
    ),
    ("r.parquet", parquet({"text": [b"x"]}), "D/r.parquet: row 1: column 'text' is text, got a bytes: mend the row"),
    (
        "r.parquet",
        parquet({"text": ["x"]}, features="[1]"),
        "D/r.parquet is not Parquet (argument of type 'int' is not iterable): check the file",
    ),
    (
        "r.parquet",
        parquet({"prompt": [1]}),
        "D/r.parquet: row 1: a row needs messages or prompt + completion or prompt + chosen or text, found columns "
        "prompt: rename or add them",
    ),
]


@pytest.mark.parametrize(("name", "make", "expected"), PLACES, ids=number)
def test_a_place_of_data(name: str, make: Change, expected: str, tmp_path: Path) -> None:
    make(tmp_path / name)
    assert answer(lambda: read_rows(tmp_path / name), tmp_path) == expected


NAMES = [
    ("/dev/zero", f"{SOURCE}, /dev/zero is a pipe or a device: check the path"),
    (
        "~nosuch/r.jsonl",
        f"{SOURCE}, ~nosuch/r.jsonl cannot be read (Could not determine home directory): check the path",
    ),
    ("https://me:pass@host/r.jsonl", f"{SOURCE}, got https://***@host/r.jsonl: download it first"),
    ("json", f"{SOURCE}, json is none: name the file"),
    (
        "x" * 5000 + ".jsonl",
        f"{SOURCE}, {'x' * 351}...{'x' * 342}.jsonl cannot be read (File name too long): check the path",
    ),
]


@pytest.mark.parametrize(("name", "expected"), NAMES, ids=number)
def test_a_name_of_data(name: str, expected: str, tmp_path: Path) -> None:
    assert answer(lambda: read_rows(name), tmp_path) == expected


def edit(name: str, **changes: Any) -> Change:
    """Other values in a JSON file; ... takes one out."""

    def change(folder: Path) -> None:
        content = {**json.loads((folder / name).read_text()), **changes}
        content = {key: value for key, value in content.items() if value is not ...}
        (folder / name).write_text(json.dumps(content))

    return change


def put(name: str, content: str | bytes) -> Change:
    return lambda folder: write(folder / name, content)


def cut(name: str, size: int) -> Change:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def config(**changes: Any) -> Change:
    return edit("config.json", **changes)


def tokens(**changes: Any) -> Change:
    return edit("tokenizer_config.json", **changes)


def template(text: str | bytes) -> Change:
    return put("chat_template.jinja", text)


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


WEIGHTS, INDEX, GENERATION = "model.safetensors", "model.safetensors.index.json", "generation_config.json"
HEADER = "D/m/model.safetensors is no whole safetensors file (Error while deserializing header"
UNKNOWN = "D/m is no model that transformers knows"
CHECK = "check the path and its config.json"
CANNOT, AGAIN = "transformers cannot load D/m as a causal_lm", "copy the model again, or choose another"
NO_TOKENIZER, BESIDE = "D/m has no tokenizer that transformers can load", "save one beside the model"
REFUSES = "the chat template refuses the roles ['user']"
AUTO = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}
MODELS = [
    (
        pickled,
        "weights are safetensors, D/m has only pytorch_model.bin: where you trust it, convert it once with "
        "from_pretrained(FOLDER) and save_pretrained(NEW_FOLDER) of transformers",
    ),
    (
        lambda m: (m / WEIGHTS).unlink(),
        "a model folder has a model.safetensors, D/m has no weights: copy the model again",
    ),
    (put(WEIGHTS, b""), f"{HEADER}: header too small): copy it again"),
    (cut(WEIGHTS, 30_000), f"{HEADER}: incomplete metadata, file not fully covered): copy it again"),
    (cut(WEIGHTS, 50), f"{HEADER}: invalid header length): copy it again"),
    (put(WEIGHTS, "version https://git-lfs.github.com/spec/v1\n"), f"{HEADER}: header too large): copy it again"),
    (put(INDEX, "{}"), f"{INDEX} maps weights to files beside it, D/m/{INDEX} does not: copy the model again"),
    (
        put(INDEX, '{"weight_map": {"a": "../x"}}'),
        f"{INDEX} maps weights to files beside it, D/m/{INDEX} does not: copy the model again",
    ),
    (put(INDEX, '{"weight_map": {"a": "x"}}'), f"{INDEX} names x, D/m has none: copy the model again"),
    (
        lambda m: (m / "config.json").unlink(),
        "a model folder has a config.json, D/m has none: name the folder that save_pretrained wrote",
    ),
    (
        put("config.json", "{"),
        "a model's config.json must be JSON, D/m/config.json:1 is not (Expecting property name enclosed in double "
        "quotes): mend it",
    ),
    (put("config.json", "[]"), "a model's config.json must be a JSON object, D/m/config.json holds a list: mend it"),
    (put("config.json", "{}".encode("utf-16")), "D/m/config.json is UTF-16: save it as UTF-8"),
    (
        put("config.json", '{"model_type": "llama", "model_type": "gpt2"}'),
        "a model's config.json must be JSON, D/m/config.json:1 is not (a key is given once, 'model_type' is repeated): "
        "mend it",
    ),
    (
        put("config.json", "{}"),
        f"{UNKNOWN} (Unrecognized model in D/m. Should have a `model_type` key in its config.json.): {CHECK}",
    ),
    (
        config(model_type="nope"),
        f"{UNKNOWN} (The checkpoint you are trying to load has model type `nope` but Transformers does not recognize "
        "this architecture. This could be because of an issue with the checkpoint, or because your version of "
        f"Transformers is out of date.): {CHECK}",
    ),
    (config(model_type=["llama"]), f"{UNKNOWN} (unhashable type: 'list'): {CHECK}"),
    (
        config(model_type="nope", auto_map=AUTO),
        f"{UNKNOWN} (it comes with Python code of its own, which is not run): set trust_remote_code to true if you "
        "trust those who wrote it",
    ),
    (config(num_attention_heads=0), f"{UNKNOWN} (integer modulo by zero): {CHECK}"),
    (
        config(num_hidden_layers=10**9),
        "num_hidden_layers of a model is at most 10,000, D/m has 1000000000: mend config.json",
    ),
    (config(hidden_size=64), f"{CANNOT} (its weights have other shapes than its config.json says): {AGAIN}"),
    (
        config(num_hidden_layers=3),
        "D/m lacks 9 weights of its architecture, for example model.layers.2.input_layernorm.weight: copy it again",
    ),
    (
        config(num_hidden_layers=1),
        "config.json of D/m has 1 layers, its weights have more (model.layers.1.input_layernorm.weight): mend it",
    ),
    (config(hidden_act="nope"), f"{CANNOT} ('nope'): {AGAIN}"),
    (
        config(vocab_size=100),
        "the embedding of D/m has 100 tokens, its tokenizer has 'Ń' with id 258: save the tokenizer that belongs to "
        "it, or resize_token_embeddings",
    ),
    (
        tokens(eos_token="<stop>"),
        "the embedding of D/m has 259 tokens, its tokenizer has '<stop>' with id 259: save the tokenizer that belongs "
        "to it, or resize_token_embeddings",
    ),
    (
        tokens(eos_token=None),
        "a tokenizer needs an eos token, D/m has none: set tokenizer.eos_token and save it beside the model",
    ),
    (put("tokenizer.json", "{}"), f"{NO_TOKENIZER} ('added_tokens'): {BESIDE}"),
    (put("tokenizer.json", "[]"), f"{NO_TOKENIZER} ('str' object cannot be interpreted as an integer): {BESIDE}"),
    (
        put("tokenizer_config.json", "{"),
        f"{NO_TOKENIZER} (Expecting property name enclosed in double quotes: line 1 column 2 (char 1)): {BESIDE}",
    ),
    (
        tokens(model_max_length="x"),
        f"{NO_TOKENIZER} ('>' not supported between instances of 'int' and 'str'): {BESIDE}",
    ),
    (
        tokens(tokenizer_class="Nope", auto_map={"AutoTokenizer": ["code.T", None]}),
        f"{NO_TOKENIZER} (it comes with Python code of its own, which is not run): set trust_remote_code to true if "
        "you trust those who wrote it",
    ),
    (
        template("{% for %}"),
        "the chat template does not compile (line 1: Expected an expression, got 'end of statement block'): fix it "
        "beside the tokenizer, or give data.chat_template",
    ),
    (template("{{ raise_exception('no\nuser') }}"), f"{REFUSES} (no user): reorder the turns"),
    (
        template("{% for i in range(10 ** 9) %}x{% endfor %}"),
        f"{REFUSES} (Range too big. The sandbox blocks ranges larger than MAX_RANGE (100000).): reorder the turns",
    ),
    (
        template("{{ ''.__class__.__mro__ }}"),
        f"{REFUSES} (access to attribute '__class__' of 'str' object is unsafe.): reorder the turns",
    ),
    (
        template("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"),
        f"{REFUSES} (maximum recursion depth exceeded): reorder the turns",
    ),
    (
        put(GENERATION, "[]"),
        f"a model's {GENERATION} must be a JSON object, D/m/{GENERATION} holds a list: mend it",
    ),
    (
        put(GENERATION, '{"eos_token_id": "x"}'),
        f"eos_token_id is a number or a list of numbers, D/m/{GENERATION} has 'x': mend it",
    ),
]


def load(path: Path | str, lora: LoraConfig | None = None) -> None:
    """As a step does, up to where it would train."""
    resolved = resolve_model(str(path), world=solo_world(torch.device("cpu")))
    encode_prompt([{"role": "user", "content": "q"}], load_tokenizer(resolved))
    model, _ = load_model(resolved, "causal_lm", config=ModelConfig(), dtype=torch.float32)
    if lora is not None:
        add_lora(model, lora, "causal_lm", seed=0)


@pytest.mark.parametrize(("change", "expected"), MODELS, ids=number)
def test_a_model_folder(change: Change, expected: str, model_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(model_folder, tmp_path / "m")
    change(tmp_path / "m")
    assert answer(lambda: load(tmp_path / "m"), tmp_path) == expected


MODEL_NAMES = [
    ("/absent/m", "a model is a folder, a .gguf file or a hub name, /absent/m is none: check the path"),
    ("a b", "a model is a folder, a .gguf file or a hub name, a b is none: check the path"),
    ("/dev/null", "a model is a folder, a .gguf file or a hub name, /dev/null is none: check the path"),
    ("~nosuch/m", "a model is a folder, a .gguf file or a hub name, ~nosuch/m is none: check the path"),
    ("https://me:pass@h/m", "a model is a folder, a .gguf file or a hub name, got https://***@h/m: download it first"),
    ("absent.gguf", "a model file must exist, absent.gguf does not exist: check the path"),
]


@pytest.mark.parametrize(("name", "expected"), MODEL_NAMES, ids=number)
def test_a_model_name(name: str, expected: str, tmp_path: Path) -> None:
    assert answer(lambda: load(name), tmp_path) == expected


MODULES = [
    (["nothing"], "Target modules {'nothing'} not found in the base model. Please check the target modules and try "
     "again."),
    ([], "No `target_modules` passed but also no `target_parameters` found. Please check the values for these "
     "arguments."),
    ("(", "missing ), unterminated subpattern at position 0"),
]  # fmt: skip


@pytest.mark.parametrize(("modules", "reason"), MODULES, ids=number)
def test_modules_for_adapters(modules: str | list[str], reason: str, model_folder: Path, tmp_path: Path) -> None:
    lora = LoraConfig(rank=2, target_modules=modules)
    expected = f"lora.target_modules {modules} does not fit ({reason}): name linear layers of the model"
    assert answer(lambda: load(model_folder, lora), tmp_path) == expected


JSONS = [
    (None, "deepspeed_config must name a JSON file, D/ds.json does not exist: check the path"),
    ("", "deepspeed_config must be JSON, D/ds.json:1 is not (Expecting value): mend it"),
    ("{,}", "deepspeed_config must be JSON, D/ds.json:1 is not (Expecting property name enclosed in double quotes): "
     "mend it"),
    ("[1]", "deepspeed_config must be a JSON object, D/ds.json holds a list: mend it"),
    ("{" * 100_000, "deepspeed_config must be JSON, D/ds.json:1 is not (Expecting property name enclosed in double "
     "quotes): mend it"),
    ('{"a":' * 100_000, "deepspeed_config must be JSON, D/ds.json:1 is not (it is nested too deeply): mend it"),
    (b"\xff\xfe{", "D/ds.json is UTF-16: save it as UTF-8"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "expected"), JSONS, ids=number)
def test_a_json_file(content: str | bytes | None, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    if content is not None:
        write(file, content)
    assert answer(lambda: read_overrides(str(file)), tmp_path) == expected


HOSTS = [
    ("", "launcher.hostfile must name hosts, D/hosts has none: write `HOST slots=N` lines"),
    ("a slots=8\nb\n", "D/hosts:2: a line of a hostfile is `HOST slots=N`, got 'b': mend it"),
    ("a slots=0\n", "D/hosts:1: a line of a hostfile is `HOST slots=N`, got 'a slots=0': mend it"),
    ("a slots=1\na slots=1\n", "D/hosts:2: a host is given once, 'a slots=1' repeats one: keep one"),
]


@pytest.mark.parametrize(("content", "expected"), HOSTS, ids=number)
def test_a_hostfile(content: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(content)
    line = ["--launcher.hostfile", str(tmp_path / "hosts")]
    assert answer(lambda: parse_config(PipelineConfig, line), tmp_path) == expected


COMMANDS = [
    (["train.py", "--steps", "sft", "--setps", "x"], "unknown option --setps: the nearest is steps"),
    (["train.py", "--sft.model.path"], "--sft.model.path needs a value, got none: write --sft.model.path VALUE"),
    (
        ["training/step3_ppo/main.py", "--reward.parts", "[{urls: ['http://me:pass@h/'], weight: x, timeout: 1}]"],
        "the command line: unknown key timeout in an item of reward.parts: the nearest is timeout_seconds",
    ),
    (
        ["inference/generate.py", "D/m", "--input", "D/in.jsonl", "--output", "D"],
        "--output must name a file that can be written, D is none: choose another",
    ),
]


@pytest.mark.parametrize(("line", "expected"), COMMANDS, ids=number)
def test_a_command(line: list[str], expected: str, tmp_path: Path) -> None:
    words = [word.replace("D", str(tmp_path), 1) if word[:1] == "D" else word for word in line]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=120, env=environment, cwd=ROOT, check=False
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.replace(str(tmp_path), "D") == f"error: {expected}\n"
