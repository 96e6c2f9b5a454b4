"""Settings and models of RL that cannot be, and what is said of them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from hybrid_rlhf.cli.rl import main
from hybrid_rlhf.configs.pipeline import PipelineConfig
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.runtime.command_line import parse_config
from tests.support.ahead import rollout_line
from tests.support.errors import refused
from tests.support.steps import write_rows
from tests.support.tiny import tiny_model, tiny_tokenizer

LAG = "--rollout.max_lag 2"
CURRICULUM = "--algorithm grpo --train.epochs 9 --rollout.curriculum.revisit 0.2"
REFUSED = {
    "--algorithm grpo --rollout.sampling.n 1": "algorithm grpo compares completions of one prompt, got "
    "rollout.sampling.n 1: give 2 or more",
    "--algorithm online_dpo --rollout.sampling.n 4": "algorithm online_dpo learns from pairs, got "
    "rollout.sampling.n 4: give 2",
    "--algorithm raft --algorithm.kl.coef 0.1": "algorithm raft selects by scores, got algorithm.kl.where reward: give "
    "--algorithm.kl.where loss and --algorithm.kl.estimator k3",
    "--algorithm.dynamic_sampling true": "algorithm.dynamic_sampling compares completions of one prompt, got "
    "rollout.sampling.n 1: give 2 or more",
    "--algorithm raft --algorithm.selected_per_prompt 8": "algorithm.selected_per_prompt must be below "
    "rollout.sampling.n 8, got 8: lower it",
    "--algorithm dapo --reference.refresh_every 4": "algorithm dapo without algorithm.kl has no reference, got "
    "reference.path None and refresh_every 4: leave the section out",
    "--algorithm.kl.target 3 --algorithm.kl.coef 0": "algorithm.kl.coef must be above 0, got 0: give --algorithm.kl "
    "null for no penalty",
    "--algorithm gspo --algorithm.old_logprobs sampler": "algorithm.old_logprobs sampler takes the sampler's log-probs "
    "as the policy's, whose rounding adds up in the ratio of sequences of gspo: leave it out",
    f"--algorithm.old_logprobs sampler {LAG}": "algorithm.old_logprobs sampler needs a sampler with the weights and "
    "arithmetic of training, got rollout.max_lag, rollout.quantization, vLLM or a grammar: leave one out",
    "--algorithm grpo --algorithm.old_logprobs sampler --algorithm.entropy.method kl_cov": "algorithm.old_logprobs "
    "sampler takes the sampler's log-probs as the policy's, without the entropy that algorithm.entropy needs: leave "
    "one out",
    "--algorithm.correction.low 0.5": "algorithm.correction.method truncate masks nothing, got "
    "algorithm.correction.low 0.5: leave it out",
    "--algorithm.correction.method truncate --algorithm.correction.count_masked false": "algorithm.correction.method "
    "truncate masks nothing, got algorithm.correction.count_masked False: leave it out",
    "--algorithm.correction.method mask --algorithm.correction.low 2": "algorithm.correction.low must be in [0, 1], "
    "got 2: leave it out",
    "--algorithm.correction.reject.high 0.5": "algorithm.correction.reject.high must be 1 or more, got 0.5: raise it, "
    "for example to 1.001",
    "--algorithm.penalties.overlong_fraction 2": "algorithm.penalties.overlong_fraction must be in [0, 1], got 2: "
    "lower it, for example to 0.0",
    "--algorithm.entropy.bounds [2,1]": "algorithm.entropy.bounds is [low, high], got [2.0, 1.0]: exchange them",
    "--algorithm rloo --algorithm.entropy.method kl_cov": "algorithm.entropy.method kl_cov penalizes changes since the "
    "first update of a rollout, got one update: give algorithm.mini_batches or algorithm.epochs 2 or more, or method "
    "clip_cov",
    "--algorithm raft --algorithm.entropy.share 0.1": "algorithm raft has equal advantages, which covary with nothing, "
    "got algorithm.entropy.method clip_cov: give adaptive, or leave it out",
    "--algorithm gpro": "algorithm must be one of ppo, reinforce, rloo, remax, reinforce_pp, "
    "reinforce_pp_baseline, grpo, dr_grpo, dapo, gdpo, pass_at_k, gspo, gmpo, cispo, sapo, vespo, "
    "vapo, online_dpo, raft, got gpro: the nearest is grpo",
    "--algorithm sapo --algorithm.gate_temperatures [0,1]": "algorithm.gate_temperatures must be above 0, got "
    "0: raise it, for example to [1.0, 1.05]",
    "--teacher.coef 2": "teacher.path must name a model, got none: give --teacher.path FOLDER",
    "--teacher.path x --teacher.top_k 4": "teacher.top_k is for a divergence, got 4 with loss sampled",
    "--teacher.path x --teacher.loss forward --teacher.position_gamma 0.5": "teacher.position_gamma weighs sampled "
    "tokens, got 0.5 with loss forward: leave one out",
    "--teacher.loss reverse --teacher.per_source '{a: x}'": "teacher.loss reverse over the whole vocabulary needs one "
    "frozen teacher, got path None and 1 in per_source: give --teacher.top_k 64",
    "--teacher.path x --teacher.loss reverse --placement separation": "the whole vocabulary has the teacher beside the "
    "actor, got placement separation",
    "--teacher.path x --teacher.loss reverse --teacher.top_k 4 --model.sequence_parallel 2": "teacher.loss reverse "
    "needs a rank for each row, got model.sequence_parallel 2 and tensor_parallel 1: set them to 1",
    "--teacher.prompt_template x --environment.program m:f --algorithm grpo": "teacher.prompt_template takes the place "
    "of a row's prompt, got the prompts of programs: leave it out",
    "--teacher.url http://h:1 --teacher.loss forward --teacher.top_k 64": "teacher.url is one teacher that tells at "
    "most 20 tokens, got 0 models besides and top_k 64",
    "--teacher.url http://h:1 --rollout.sampling.temperature 0.7": "teacher.url tells log-probs at temperature 1, got "
    "rollout.sampling.temperature 0.7: give 1",
    "--teacher.url http://h:1 --teacher.api_key plain": "teacher.api_key must be ${NAME}",
    "--teacher.path x --teacher.api_key '${K}'": "teacher.api_key is for teacher.url, got none: leave it out",
    "--algorithm raft --teacher.path x": "teacher gives each token an advantage, got algorithm raft, which selects "
    "completions: give another, such as grpo",
    "--reward.components [runs/teacher,rm]": "reward.components: a reward model must not have the name of a role, got "
    "teacher: give the component a name",
    "--algorithm pass_at_k --algorithm.k 8": "algorithm.k must be below rollout.sampling.n 8, got 8: lower it",
    "--rollout.max_lag -1": "max_lag must be 0 or more, got -1",
    "--rollout.recompute_kv true": "got rollout.max_lag 0: give 1 or more, or leave it out",
    "--rollout.async_sampling.policy_lag 1": "unknown option --rollout.async_sampling.policy_lag: rollout.max_lag is",
    "--rollout.partial true": "unknown option --rollout.partial: rollout.max_lag is the number of steps",
    "--rollout.streaming.recompute_kv true": "it is rollout.recompute_kv",
    f"{LAG} --placement separation --rollout.quantization int8": "got rollout.quantization int8: leave it out",
    f"{LAG} --placement separation --rollout.keep_weights false": "got rollout.keep_weights False: leave it out",
    f"{LAG} --rollout.backend module": "rollout.backend module has no inference weights, got rollout.max_lag 2",
    f"{LAG} --placement separation --actor.ema_decay 0.9": "actor.ema_decay 0.9: leave it out",
    "--environment.path calculator": "must be module:Class",
    "--environment.tools bash": "tools must be one of calculator, python, shell, mcp or null, got bash",
    "--environment.tools shell --environment.path a:B": "environment.tools names the class "
    "hybrid_rlhf.rl.environments.shell:Shell, got environment.path a:B too: leave one out",
    "--environment.tools shell --environment.program m:f": "an environment is a class or a program",
    "--environment.path a:B --environment.max_turns 0": "max_turns must be 1 or more",
    "--environment.path a:B --environment.timeout_seconds 0": "timeout_seconds must be above 0",
    "--environment.path a:B --environment.options 3": "must be dict",
    "--environment.path a:B --environment.options '{1: 2}'": "options must be dict[str, Any], got 1",
    "--environment.program a:b --environment.options '{d: {1: 2}}'": "options are names",
    "--environment.path a:B --environment.options '{d: .nan}'": "options are names",
    "--environment.options '{tries: 2}'": "environment.path must be module:Class",
    "--rollout.routing_replay true --rollout.backend module": "backend module has no inference weights, got "
    "rollout.routing_replay True",
    "--rollout.routing_replay true --algorithm raft": "routing_replay is for losses on the policy that sampled, got "
    "algorithm raft",
    "--rollout.routing_replay true --algorithm online_dpo": "routing_replay is for losses on the policy that sampled, "
    "got algorithm online_dpo",
    "--environment.program x --environment.path m:C": "an environment is a class or a program",
    "--environment.program x": "environment.program must be module:function",
    "--environment.program m:f --environment.max_observation_tokens 3": "without environment.path this key is not "
    "read, got environment.max_observation_tokens 3: leave it out",
    "--environment.program m:f --algorithm online_dpo": "got algorithm online_dpo, which counts completions",
    "--algorithm remax --reward.components '[{judge: {url: http://h/v1, mode: rank_group}}]'": "reward component judge "
    "compares completions of one prompt, got rollout.sampling.n 1: give 2 or more",
    "--environment.max_turns 2": "give the class, environment.tools, environment.program, or --rollout.endpoint true",
    "--environment.path m:C --rollout.endpoint true": "rollout.endpoint is for programs, got environment.path m:C",
    "--rollout.endpoint.api_key plain": "rollout.endpoint.api_key must be ${NAME}",
    "--rollout.endpoint.host 0.0.0.0": "api_key must be given where other machines connect, got none",
    "--algorithm.kl.where loss": "got algorithm.kl.where loss: take k2 or k3",
    f"{CURRICULUM} --rollout.sampling.n 1 --algorithm reinforce": "rollout.curriculum takes the pass rate of a "
    "prompt's completions, got rollout.sampling.n 1: give 2 or more",
    f"{CURRICULUM} --train.epochs 1": "rollout.curriculum skips prompts by their earlier visits, got train.epochs 1: "
    "give 2 or more",
    f"{CURRICULUM} --rollout.curriculum.min_pass_rate 0.95": "rollout.curriculum.min_pass_rate must be at most "
    "max_pass_rate 0.9, got 0.95: lower it",
    f"{CURRICULUM} --rollout.curriculum.revisit 0": "rollout.curriculum.revisit must be in (0, 1], got 0: raise it, "
    "for example to 0.1",
}

COMPONENTS_REFUSED = {
    "{}": "got none",
    "{model: m, urls: [http://h]}": "got model and urls",
    "{function: f}": "is module:function",
    "{model: judge.py:score}": "got the function 'judge.py:score': write {function: judge.py:score}",
    "{urls: [host/score]}": "a URL is http",
    "{urls: [ftp://host]}": "a URL is http",
    "{model: m, name: a/b}": "a name has letters",
    "{model: m, timeout_seconds: 0}": "timeout_seconds must be above 0",
    "{model: m, retries: -1}": "retries must be 0 or more",
    "{model: m, batch_size: 0}": "batch_size must be 1 or more",
    "{model: m, api_key_env: KEY}": "m has no urls, got api_key_env KEY",
    "{function: a:b, normalize: true}": "b is no model, got normalize True: leave it out",
    "{function: a:b, steps: min}": "b is no model, got steps min: leave it out",
    "{function: a:b, verifier: math}": "one of model, function, urls, verifier and judge, got function and ver",
    "{function: a:b, column: x}": "b is no verifier, got column x: leave it out",
    "{function: a:b, sandbox: {processes: 3}}": "b is no verifier, got the section sandbox: leave it out",
    "{verifier: math, partial: true}": "partial goes with verifier code, got math",
    "{verifier: code, timeout_seconds: 3.0}": "by sandbox.timeout_seconds, got timeout_seconds 3.0",
    "{verifier: code, retries: 2}": "has no retries",
    "{verifier: code, workers: 0}": "workers must be 1 or more, got 0",
    "{verifier: code, sandbox: {memory_gb: 2}}": "reward.components: unknown key memory_gb: the nearest is memory_gib",
    "{model: m, retires: 2}": "reward.components: unknown key retires: the nearest is retries",
    "{judge: {}}": "a judge needs the url or the path of a model, got none",
    "{judge: {url: http://h/v1, mode: best}}": "mode must be one of score, rank_group, pairwise, got best",
    "{judge: {url: h/v1}}": "url: a URL is http://HOST:PORT/PATH or https, got h/v1",
    "{judge: {url: 'http://me:pass@h/'}}": "url: a URL may not carry a user or a password, got http://***@h/",
    "{judge: {path: m, url: http://h/v1}}": "a judge has one of url and path, got m and a URL: leave one out",
    "{judge: {path: m, retries: 1}}": "a judge with path has no server, got retries 1: leave it out",
    "{judge: {path: m, request: {seed: 1}}}": "may have temperature, max_tokens, chat_template_kwargs, got seed: leave",
    "{judge: {path: m, request: {temperature: 0.7}}}": "asked greedily, got request.temperature 0.7: give 0",
    "{judge: {path: m, request: {max_tokens: 0}}}": "request.max_tokens of a judge must be 1 or more, got 0",
    "{judge: {model: m, url: http://h/v1}}": "unknown key model: a reward model is a component of its own",
    "{judge: {url: http://h/v1, range: [5, 1]}}": "range must rise, got [5, 1]",
    "{judge: {url: http://h/v1, mode: pairwise, range: [1, 5]}}": "mode pairwise of a judge reads other keys, got",
    "{judge: {url: http://h/v1, both_orders: false}}": "mode score of a judge reads other keys, got both_orders False",
    "{judge: {url: http://h/v1, against_column: a}}": "mode score of a judge reads other keys, got against_column a",
    "{judge: {url: http://h/v1, rubric: a, rubric_column: b}}": "one of rubric and rubric_column, got b beside",
    "{judge: {url: http://h/v1, request: {tools: []}}}": "response_format, tools, n, stream, got tools: leave it out",
    "{judge: {url: http://h/v1}, retries: 1}": "judge has these keys inside judge, got retries 1",
    "{judge: {url: http://h/v1}, api_key_env: K}": "judge has no urls, got api_key_env K",
    "{judge: {url: http://h/v1, max_failure_fraction: 2}}": "max_failure_fraction must be in [0, 1], got 2",
    "{model: a/m}, {model: b/m}": "'m' is used twice",
}
REFUSED |= {f"--reward.components '[{components}]'": rule for components, rule in COMPONENTS_REFUSED.items()}


@pytest.mark.parametrize(("line", "error"), REFUSED.items())
def test_what_cannot_be_is_refused(line: str, error: str) -> None:
    words = shlex.split(line)
    assert error in refused(parse_config, RLConfig, words)
    # through train, where `refused` takes no key without its prefix
    refused(parse_config, PipelineConfig, [re.sub("^--", "--rl.", word) for word in words])


NO_HEAD = "a reward model must have a score head, {} has none: give one that a reward step saved"
TEACHER_ALONE = "--reward.components [] --teacher.path OTHER"
REFUSED_AT_THE_START = {
    f"--algorithm ppo {TEACHER_ALONE}": "algorithm ppo trains a critic on rewards, got teacher without "
    "reward.components: give some, or another algorithm, such as grpo",
    f"--algorithm dapo {TEACHER_ALONE}": "algorithm.dynamic_sampling takes prompts whose scores differ, got teacher "
    "without reward.components: give some, or --algorithm.dynamic_sampling null",
    f"--algorithm rloo {TEACHER_ALONE}": "algorithm.kl.where reward needs a reward, got teacher without "
    "reward.components: give some, or --algorithm.kl null",
    f"{CURRICULUM} --algorithm.kl null {TEACHER_ALONE}": "rollout.curriculum skips prompts by their scores, got "
    "teacher without reward.components: leave it out",
    "--algorithm grpo --teacher.path OTHER": "the teacher must share the actor's tokens",
    '--algorithm grpo --reward.components {"judge":{"url":"http://127.0.0.1:9/v1","rubric":"none.md"}}': (
        "rubric must be a text or name a file, none.md does not exist: check the path"
    ),
    '--algorithm grpo --teacher.per_source {"a":"MODEL"}': (
        "unless teacher.path has the others, got a row without it: name the column by teacher.source_column"
    ),
    "--reward.components MODEL": NO_HEAD.format("MODEL"),
    "--algorithm grpo --reward.components OTHER": NO_HEAD.format("OTHER"),
}


@pytest.mark.parametrize("line", REFUSED_AT_THE_START)
def test_what_a_run_cannot_do_is_refused_at_its_start(
    line: str, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other model has the name of a scorer, which is no score head, and a token more."""
    other, tokenizer = tmp_path / "other", tiny_tokenizer()
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(other)
    tiny_model(4).save_pretrained(other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForSequenceClassification"]}))

    def named(text: str) -> str:
        return text.replace("MODEL", str(model_folder)).replace("OTHER", str(other))

    rows = write_rows(tmp_path / "rows.jsonl")
    with pytest.raises(SystemExit) as stopped:
        main(rollout_line(tmp_path / "run", model_folder, rows, *named(line).split()))
    assert stopped.value.code == 2
    assert named(REFUSED_AT_THE_START[line]) in capsys.readouterr().err.splitlines()[-1]
