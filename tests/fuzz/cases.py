"""Errors that users cause, and the fragments that the error line must contain, in their order, with " ... " between them:
the key or location, the rule's terms, the value and the fix's terms. D is the folder of the test.

Inputs that the fuzzer has found get a case here.
"""

# ruff: noqa: E501

from __future__ import annotations

# Nine anchors, each nine times the one before: 43 million values once they unfold.
BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 8))

# By config: the command line, the fragments.
LINES = {
    "sft": [
        ("--optimiser.lr 1", "--optimiser.lr ... nearest is optimizer.lr"),
        ("--lr 1", "--lr ... nearest is optimizer.lr"),
        ("--train.batch_size 1", "--train.batch_size ... give train.global_batch_size"),
        ("--Seed 1", "--Seed ... nearest is seed"),
        ("--", "-- ... --help lists"),
        ("-x", "got '-x' ... --help"),
        ("''", "got '' ... --help"),
        ("--seed", "--seed ... got none ... --seed"),
        ("--optimizer.lr --seed 1", "--optimizer.lr ... got none ... --optimizer.lr"),
        ("--config", "--config ... got none ... --config"),
        ("'--a\x01b' 1", "--a\\x01b ... --help lists"),
        ("--data.sources 'a\udcffb'", "UTF-8 ... got 'a\\udcffb' ... write it again"),
        ("--optimizer.lr fast", "optimizer.lr ... float ... got fast ... for example 1e-5"),
        ("--optimizer.lr .inf", "optimizer.lr ... finite number ... got inf"),
        ("--logging.sinks '[csv, csv]'", "logging.sinks ... differ"),
        ("--logging.sinks neptune", "logging.sinks ... neptune"),
        ("--optimizer.lr -1", "optimizer.lr ... 0 or more ... got -1 ... leave it out"),
        ("--optimizer.betas 0.9", "optimizer.betas ... tuple[float, float] ... got 0.9 ... --help"),
        ("--optimizer.betas '[0.9, 1.0]'", "optimizer.betas ... in [0, 1) ... got 1.0 ... [0.9, 0.95]"),
        ("--optimizer '{lrr: 1}'", "--optimizer.lrr ... nearest is optimizer.lr"),
        ("--optimizer '{weight_decay: }'", "optimizer.weight_decay ... float ... got null"),
        ("--seed -1", "seed ... 0 or more ... got -1 ... 42"),
        ("--seed 1.5", "seed ... int ... got 1.5 ... for example 42"),
        (
            "--seed 9999999999999999999999999",
            "seed ... at most 2**63 - 1 in size ... got 9999999999999999999999999 ... lower",
        ),
        ("--seed " + "9" * 5000, "seed ... int ... 999 ... for example 42"),
        ("--train.max_steps none", "train.max_steps ... int or null ... got none ... for example 10"),
        ("--train.max_steps 0", "train.max_steps ... 1 or more ... got 0"),
        ("--train.global_batch_size -4", "train.global_batch_size ... 1 or more ... got -4 ... raise"),
        ("--logging.profile_steps '[0]'", "logging.profile_steps ... got 0"),
        ("--model.dtype fp8", "model.dtype ... one of auto, float32, bfloat16, float16 ... got fp8 ... one of them"),
        ("--model.trust_remote_code maybe", "model.trust_remote_code ... bool ... got maybe ... for example false"),
        ("--model.path --optimizer.lr 1", "--model.path ... got none ... --model.path"),
        ("--model.path ''", "model.path ... empty"),
        ("--model.path https://me:pass@host/m", "model.path ... password ... `hf auth login`"),
        ("--model.path hf_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "model.path ... access token ... `hf auth login`"),
        ("--zero.stage 4", "zero.stage ... one of 0, 1, 2, 3 ... got 4 ... one of them"),
        ("--zero.offload_optimizer true", "zero.offload_optimizer ... zero.stage ... got 0 ... zero.stage"),
        ("--lora.rank -1", "lora.rank ... [1, 65536] ... got -1 ... 16 ... lora null"),
        ("--lora.alpha 0", "lora.alpha ... above 0 ... got 0 ... 16"),
        ("--data.split '[1, 2]'", "data.split ... three ... got [1.0, 2.0] ... [2, 4, 4]"),
        ("--data.sources '[a, {path: b, weigth: 2}]'", "data.sources ... weigth ... nearest is weight"),
        (
            "--data.sources '[{path: a, weight: x}]'",
            "data.sources ... weight ... float ... got x",
        ),
        ("--data.sources '[{path: a, weight: -1}]'", "data.sources ... weight ... in (0, 1000] ... got -1"),
        (
            "--data.sources '[{path: a, weight: 1e6}]'",
            "data.sources ... weight ... in (0, 1000] ... got 1000000.0 ... lower",
        ),
        ("--data.sources '[{path: a, weight: null}]'", "data.sources ... weight ... float ... got null"),
        ("--data.sources '[{weight: 1}]'", "data.sources ... path ... got {'weight': 1}"),
        ("--data.sources '[a, b'", "--data.sources ... YAML ... (expected ',' or ']', but got '<stream end>')"),
        (
            "--data.sources 'https://host/rows.jsonl?access_token=abc'",
            "data.sources ... 'access_token' ... `hf auth login`",
        ),
        ("--data.max_length 1", "data.max_length ... 2 or more ... got 1 ... raise"),
        ("--config absent.yaml", "--config ... absent.yaml ... does not exist"),
        ("--config /dev/zero", "--config ... /dev/zero ... pipe or a device"),
        ("--config '~nosuch/c.yaml'", "--config ... ~nosuch/c.yaml ... (Could not determine home directory)"),
    ],
    "rl": [
        (
            "--reward.components '[{}]'",
            "reward.components ... one of model, function, urls, verifier and judge ... got none",
        ),
        ("--reward.components '[{function: f}]'", "reward.components ... module:function ... file.py ... got 'f'"),
        (
            "--reward.components '[{urls: [ftp://x]}]'",
            "reward.components ... URL ... http://HOST:PORT/PATH ... got ftp://x",
        ),
        (
            "--reward.components '[{urls: [http://me:pass@h/]}]'",
            "reward.components ... URL ... password ... got http://***@h/ ... api_key_env",
        ),
        (
            "--reward.components \"[{urls: ['http://h/?api_key=abc']}]\"",
            "reward.components ... URL ... 'api_key' ... got http://h/?api_key=*** ... api_key_env",
        ),
        (
            "--reward.components \"[{urls: ['http://[::1/']}]\"",
            "reward.components ... URL ... http://HOST:PORT/PATH ... got http://[::1/",
        ),
        (
            "--reward.components '[{model: a, weight: .nan}]'",
            "reward.components ... finite number ... got nan",
        ),
        ("--reward.components '[{model: a}, {model: b/a}]'", "reward.components ... names ... 'a' ... twice ... name"),
        ("--rollout.sampling.temperature 0", "rollout.sampling.temperature ... above 0 ... got 0.0 ... 1.0"),
        ("--rollout.sampling.top_p 2", "rollout.sampling.top_p ... in (0, 1] ... got 2 ... lower ... 1.0"),
        ("--algorithm.kl.target -1", "algorithm.kl.target ... above 0 ... got -1"),
        ("--algorithm.score_clip -5", "algorithm.score_clip ... above 0 ... got -5"),
        ("--algorithm.gamma 2", "algorithm.gamma ... in [0, 1] ... got 2 ... lower"),
        ("--ptx.coef 1", "ptx.sources ... pretraining text ... got none ... --ptx.sources"),
        ("--rollout.kv_cache_gib 0", "rollout.kv_cache_gib ... above 0 ... got 0"),
    ],
    "pipeline": [
        ("--steps sft,dpo", "--steps ... sft, reward, preference and rl ... got 'sft,dpo' ... --steps"),
        ("--launcher.num_processes 0", "launcher.num_processes ... 1 or more ... got 0"),
        ("--launcher.hostfile absent", "launcher.hostfile ...  absent  ... does not exist"),
        (
            "--sft.model.gradient_checkpointing maybe",
            "gradient_checkpointing ... bool ... got maybe ... for example false",
        ),
    ],
    "generate": [
        ("", "model ... got none ... output/step3_ppo/actor"),
        ("--path m", "--input ... --output"),
        (
            "--path m --input x --output y --sampling.n 0",
            "sampling.n ... 1 or more ... got 0 ... raise",
        ),
        (
            "--path m --input x --output y --sampling.temperature .inf",
            "sampling.temperature ... finite number ... got inf",
        ),
        ("--device tpu", "device ... one of auto, cpu, cuda ... got tpu ... the nearest is cpu"),
    ],
}

# The content of a config file, the fragments.
FILES = [
    ("optimizer:\n  lrr: 1\n", "D/c.yaml ... optimizer.lrr ... nearest is optimizer.lr"),
    ("optimiser:\n  lr: 1\n", "D/c.yaml ... optimiser ... nearest is optimizer\n"),
    ("seed: 1\n  x: [\n", "D/c.yaml:2 ... YAML ... (mapping values are not allowed here)"),
    ("seed: 1\noptimizer: {lr: 1, lr: 2}\n", "D/c.yaml:2 ... lr ... repeated"),
    ("- seed\n", "D/c.yaml ... mapping ... got a list"),
    ("seed: many\n", "seed ... int ... got many ... for example 42"),
    (
        "optimizer:\n",
        "D/c.yaml ... optimizer ... mapping ... got None",
    ),
    (
        "optimizer: 5\n",
        "D/c.yaml ... optimizer ... mapping ... got 5",
    ),
    (
        "data: {sources: [{path: a, weigth: 2}]}\n",
        "D/c.yaml ... data.sources ... weigth ... nearest is weight",
    ),
    ("data: {sources: 5}\n", "data.sources ... list[str or DataSource] ... got 5 ... --help"),
    ("seed:\t1\n", "D/c.yaml:1 ... YAML ... (found character '\\t' that cannot start any token)"),
    ("seed: 1,\n", "seed ... int ... got 1, ... for example 42"),
    ("1: 2\n", "D/c.yaml ... 1 ... --help lists"),
    ("null: 2\n", "D/c.yaml ... None ... --help lists"),
    ("? [a]\n: 1\n", "D/c.yaml:1 ... got a list or a mapping"),
    ("a: &a [*a]\n", "D/c.yaml ... YAML ... nested"),
    ("seed: *x\n", "D/c.yaml:1 ... YAML ... (found undefined alias 'x')"),
    (
        "seed: !!int x\n",
        "D/c.yaml ... YAML ... (invalid literal for int() with base 10: 'x') ... quotes",
    ),
    (
        "seed: !!timestamp x\n",
        "D/c.yaml ... YAML ... ('NoneType' object has no attribute 'groupdict') ... quotes",
    ),
    (
        "seed: !!python/object/apply:os.system [ls]\n",
        "D/c.yaml:1 ... YAML ... (could not determine a constructor for the tag 'tag:yaml.org,2002:python/object/apply:os.system')",
    ),
    ("seed: 2024-13-45\n", "D/c.yaml ... YAML ... (month must be in 1..12) ... quotes"),
    ("seed: 1\n---\nseed: 2\n", "D/c.yaml:2 ... YAML ... (but found another document)"),
    (
        "seed: \x01\n",
        'D/c.yaml ... YAML ... (unacceptable character #x0001: special characters are not allowed in "<unicode string>", position 6)',
    ),
    ("model: {path: [a]}\n", "model.path ... str or null ... got ['a'] ... for example a text"),
    ("model: {class_path: os.system}\n", "D/c.yaml ... model.class_path ... nearest is model.path"),
    ("train: {eval_every: null}\n", "D/c.yaml ... train.eval_every ... int ... got null"),
    (
        "seed: " + "9" * 5000,
        "D/c.yaml ... YAML ... (Exceeds the limit (4300 digits) for integer string conversion: value has 5000 digits) ... quotes",
    ),
    ("[" * 1000, "D/c.yaml ... YAML ... nested"),
    ("<html><body>404</body></html>", "D/c.yaml ... mapping ... got a str"),
    (b"\xff\xfes\x00e\x00e\x00d\x00:\x00 \x001\x00", "D/c.yaml ... UTF-16 ... UTF-8"),
    (
        b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x02\x03+NMM\xb1R0\x04\x00\x96W\xe5\x10\x07\x00\x00\x00",
        "D/c.yaml ... gzip ... gunzip",
    ),
    (b"seed: \xff", "D/c.yaml ... UTF-8 ... convert"),
    (BOMB, "D/c.yaml ... 100,000 ... anchors"),
]

# The first line of a file, the row format, the fragments after its location.
ROWS = [
    (
        '{"a": 1}\n{"a": \n',
        "sft",
        "messages or prompt + completion or prompt + chosen or text ... got columns a ... rename",
    ),
    ('{"a" "b"}\n', "sft", "JSON ... (Expecting ':' delimiter at column 6)"),
    ('{"text": "a",}\n', "sft", "JSON ... (Expecting property name enclosed in double quotes at column 14)"),
    ('"text"\n', "sft", "JSON ... object ... got str"),
    ("<!DOCTYPE html>\n<html>\n", "sft", "JSON ... HTML"),
    ("[" * 100000, "sft", "JSON ... nested"),
    ('{"a":' * 100000, "sft", "JSON ... nested"),
    ('{"text": "t", "x": ' + "9" * 5000 + "}", "sft", "JSON ... 4300"),
    ('{"text": "a", "text": "b"}\n', "sft", "JSON ... 'text'"),
    ('{"text": "\\ud800"}\n', "sft", "JSON ... surrogate"),
    ('{"text": NaN}\n', "sft", "'text' ... text ... got float"),
    ('{"messages": [null]}\n', "sft", "'messages' ... 'role' ... 'content' ... got None"),
    (
        '{"messages": [{"role": ["user"], "content": "q"}]}\n',
        "sft",
        "'messages' ... one of system, developer, user, assistant, tool, function, ipython, observation ... got ['user']",
    ),
    (
        '{"messages": [{"role": "user", "content": " "}, {"role": "assistant", "content": "a"}]}\n',
        "sft",
        "'messages' ... empty ... got ' ' ... remove",
    ),
    (
        '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}]}\n',
        "sft",
        "'messages' ... assistant turn ... empty ... got '' ... remove",
    ),
    (
        '{"messages": [{"role": "user", "content": [{"type": "text"}]}]}\n',
        "sft",
        "'messages' ... text or a list ... 'type' ... 'text' ... 'text' ... got [{'type': 'text'}]",
    ),
    (
        '{"prompt": "q", "chosen": "a", "rejected": "b", "margin": NaN}\n',
        "pair",
        "'margin' ... finite number ... got nan",
    ),
    (
        '{"prompt": "q", "chosen": "a", "rejected": "b", "margin": 1e999}\n',
        "pair",
        "'margin' ... finite number ... got inf",
    ),
    (
        '{"prompt": "q", "chosen": "a", "rejected": "b", "margin": 1' + "0" * 400 + "}\n",
        "pair",
        "'margin' ... finite number ... got 1000",
    ),
    (
        '{"prompt": "q", "chosen": [{"role": "user", "content": "a"}], "rejected": "b"}\n',
        "pair",
        "'chosen' ... completion alone ... repeats the prompt 'q' ... got turns of user ... remove",
    ),
    ('{"prompt": "q", "responses": ["a", 3], "ranks": [1, 2]}\n', "pair", "'responses' ... text or a list ... got int"),
    (
        '{"prompt": "q", "responses": [], "ranks": []}\n',
        "pair",
        "'ranks' ... two different ranks ... got [] ... remove",
    ),
    (
        '{"prompt": "q", "responses": ["a", "b"], "ranks": [NaN, NaN]}\n',
        "pair",
        "'ranks' ... finite numbers ... got [nan, nan]",
    ),
    (
        '{"prompt": "q", "responses": ["a", [{"role": "user", "content": "b"}]], "ranks": [1, 2]}\n',
        "pair",
        "'responses' ... completion alone ... repeats the prompt 'q' ... got turns of user ... remove",
    ),
    (
        '{"prompt": "q", "completion": "a", "label": "yes"}\n',
        "label",
        "'label' ... true (desirable) or false (undesirable) ... got 'yes'",
    ),
    (
        '{"prompt": "q", "label": true}\n',
        "label",
        "prompt + completion + label or messages + label or prompt + chosen + rejected ... got columns label, prompt ... rename",
    ),
    (
        '{"prompt": "q", "completions": ["a"]}\n',
        "steps",
        "prompt + completions + labels ... got columns completions, prompt ... rename",
    ),
    (
        '{"prompt": "q", "completions": ["a"], "labels": [true, false]}\n',
        "steps",
        "'completions' ... 'labels' ... empty ... equal length ... got 1 and 2",
    ),
    (
        '{"prompt": "q", "completions": [], "labels": []}\n',
        "steps",
        "'completions' ... 'labels' ... empty ... equal length ... got 0 and 0",
    ),
    (
        '{"prompt": "q", "completions": "a", "labels": [1]}\n',
        "steps",
        "'completions' ... 'labels' ... empty ... equal length ... got str and 1",
    ),
    (
        '{"prompt": "q", "completions": ["a", " "], "labels": [1, 0]}\n',
        "steps",
        "'completions' ... empty ... got ' ' ... remove",
    ),
    ('{"prompt": "q", "completions": ["a", 3], "labels": [1, 0]}\n', "steps", "'completions' ... text ... got int"),
    (
        '{"prompt": "q", "completions": ["a", "b"], "labels": [1, 1.5]}\n',
        "steps",
        "'labels' ... true, false or numbers in [0, 1] ... got 1.5",
    ),
    (
        '{"prompt": "q", "completions": ["a"], "labels": [NaN]}\n',
        "steps",
        "'labels' ... true, false or numbers in [0, 1] ... got nan",
    ),
    (
        '{"prompt": "q", "completions": ["a"], "labels": ["1"]}\n',
        "steps",
        "'labels' ... true, false or numbers in [0, 1] ... got '1'",
    ),
    ('{"head": "honest"}\n', "head", "'head' ... one of helpful, harmless ... got 'honest'"),
    ('{"head": ["helpful"]}\n', "head", "'head' ... one of helpful, harmless ... got ['helpful']"),
    ('{"head": 3}\n', "head", "'head' ... one of helpful, harmless ... got 3"),
    ('{"prompt": "  "}\n', "prompt", "'prompt' ... empty ... got '  ' ... remove"),
]

# The name and content of a data file, the row format, the fragments.
DATA = [
    ("rows.jsonl", "", "sft", "D/rows.jsonl ... empty"),
    ("rows.jsonl", "\n \n", "sft", "D/rows.jsonl ... empty"),
    ("rows.jsonl", b"\xff\xfe{\x00", "sft", "D/rows.jsonl ... UTF-16 ... UTF-8"),
    (
        "rows.jsonl",
        b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x02\x03\xabV*I\xad(Q\xb2RP*Q\xaa\xe5\x02\x00\x10u\xedG\x0e\x00\x00\x00",
        "sft",
        "D/rows.jsonl ... gzip ... gunzip",
    ),
    ("rows.jsonl", b'{"text": "\xe9"}\n', "sft", "D/rows.jsonl ... UTF-8 ... convert"),
    ("rows.jsonl", b"PK\x03\x04\xff", "sft", "D/rows.jsonl ... zip archive ... unzip"),
    ("rows.json", "[]", "sft", "D/rows.json ... empty"),
    ("rows.json", " ", "sft", "D/rows.json:1 ... .json ... JSON ... (Expecting value) ... .jsonl"),
    (
        "rows.json",
        "[1]",
        "sft",
        "D/rows.json ... .json ... object ... got a list with int ... .jsonl",
    ),
    (
        "rows.json",
        '{"a": 1}',
        "sft",
        "D/rows.json ... .json ... object ... got dict ... .jsonl",
    ),
    (
        "rows.json",
        '[{"a": 1},\n{"a" 1}]',
        "sft",
        "D/rows.json:2 ... .json ... JSON ... (Expecting ':' delimiter) ... .jsonl",
    ),
    ("rows.json", b"\xef\xbb\xbf[", "sft", "D/rows.json:1 ... .json ... JSON ... (Expecting value) ... .jsonl"),
    ("rows.json", "[" * 100000, "sft", "D/rows.json:1 ... .json ... JSON ... nested ... .jsonl"),
    (
        "rows.parquet",
        "x",
        "sft",
        "D/rows.parquet ... Parquet ... (Parquet file size is 1 bytes, smaller than the minimum file footer (8 bytes))",
    ),
    (
        "rows.parquet",
        "PAR1xxxxPAR1",
        "sft",
        "D/rows.parquet ... Parquet ... (Parquet file size is 12 bytes, smaller than the size reported by footer's (2021161080bytes))",
    ),
    ("rows", "x", "sft", ".jsonl ... .json ... .parquet ... got D/rows ... convert"),
]
