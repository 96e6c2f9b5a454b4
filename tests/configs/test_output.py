"""`--json`: standard output has JSON and nothing else, whatever happens, with the exit codes of the text."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from hybrid_rlhf import __version__
from hybrid_rlhf.cli.main import COMMANDS, main
from hybrid_rlhf.configs.errors import RankError, UserError
from hybrid_rlhf.runtime.command_line import user_errors
from hybrid_rlhf.runtime.files.atomic import output_file
from hybrid_rlhf.runtime.files.reading import cache_folder, user_path
from hybrid_rlhf.runtime.output import json_output, print_document, print_result, wants_json


def test_a_result_is_text_or_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    result = {"path": Path("a/b"), "loss": math.nan, "steps": (1, 2.5, math.inf), "text": "ü\n\ud800", 3: None}
    print_result(result, "all is well")
    assert capsys.readouterr().out == "all is well\n" and not wants_json()
    with json_output():
        assert wants_json()
        print("a library says something")
        print_result(result, "all is well")
    printed = capsys.readouterr()
    assert printed.out.count("\n") == 1 and printed.err == "a library says something\n"
    assert json.loads(printed.out) == {
        "path": "a/b",
        "loss": None,
        "steps": [1, 2.5, None],
        "text": "ü\n\ud800",
        "3": None,
    }
    assert not wants_json()


@pytest.mark.parametrize("kind", [UserError, RankError])
def test_a_mistake_is_a_document_and_exit_code_2(
    kind: type[UserError], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as stopped, json_output(), user_errors():
        raise kind("a rule, got https://me:secret@host: fix it")
    printed = capsys.readouterr()
    rank = "rank 1: " if kind is RankError else ""
    assert stopped.value.code == 2 and printed.err == ""
    assert json.loads(printed.out) == {"error": f"{rank}a rule, got https://***@host: fix it"}


def test_any_other_exception_is_reported_and_raised(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError), json_output():
        print(1 / 0)
    assert json.loads(capsys.readouterr().out) == {"error": "ZeroDivisionError: division by zero"}
    assert not wants_json()


@pytest.mark.parametrize(
    ("printed", "code", "result"),
    [
        ({"event": "done"}, 143, {"error": "ended with exit code 143: see standard error"}),
        ({"event": "done"}, 1, {"error": "ended with exit code 1: see standard error"}),
        ({"event": "done"}, 0, None),
        ({"event": "done"}, None, None),
        ({"problems": 3}, 1, None),
    ],
)
def test_a_failure_without_a_result_is_an_error(
    printed: dict[str, Any], code: int | None, result: dict[str, Any] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit), json_output():
        print_document(printed)
        sys.exit(code)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [printed, *filter(None, [result])]


def test_the_option_may_stand_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--version", "--json"], ["--json", "--version"]):
        main(words)
        assert json.loads(capsys.readouterr().out) == {"version": __version__}
    main(["--json"])
    assert set(json.loads(capsys.readouterr().out)["subcommands"]) == set(COMMANDS)


def test_help_lists_keys_with_types_defaults_and_choices(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["rl", "--algorithm", "grpo", "--help", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert stopped.value.code == 0
    assert (found["command"], found["config"]) == ("hybrid-rlhf rl", "hybrid_rlhf.configs.rl.RLConfig")
    keys = {key["name"]: key for key in found["keys"]}
    assert "ppo" in keys["algorithm.name"]["choices"] and keys["algorithm.name"]["default"] == "grpo"
    assert keys["algorithm.kl.coef"]["default"] == 0.04, "of GRPO, not of PPO"
    tokens = keys["rollout.max_prompt_tokens"]
    assert tokens["default"] == 512 and tokens["choices"] is None and tokens["about"] and "critic.path" not in keys


def test_the_home_of_nobody_is_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert output_file("~nosuch/rows.jsonl", "--output", overwrite=False) == Path("~nosuch/rows.jsonl")
    assert cache_folder("~nosuch/cache") == Path("~nosuch/cache")
    assert user_path("~/rows.jsonl") == Path.home() / "rows.jsonl"
