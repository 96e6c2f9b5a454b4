"""Each view shows what the API says, follows the files, and can be used by keyboard."""

from __future__ import annotations

import getpass
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.board import ServedBoard, append_metrics
from tests.support.browser import press, show, wait_for_text, wait_in_page
from tests.support.showcase import MARKUP

pytestmark = pytest.mark.slow


def _id(board: ServedBoard, name: str) -> str:
    return str(board.run(name)["id"])


def _chart(page: Any, name: str) -> Any:
    return page.locator("figure.chart", has=page.get_by_role("heading", name=name, exact=True))


def test_runs_are_listed_with_what_is_wrong_and_compared(board: ServedBoard, page: Any) -> None:
    show(page, board.url, "runs")
    assert page.locator(".runs-table tbody tr").count() == len(board.get("/api/runs"))
    broken = page.get_by_role("row", name="gsm-ppo-lr1e-3")
    assert "broken" in broken.inner_text() and "metrics.jsonl is missing" in broken.inner_text()
    last = board.run("gsm-ppo")["last"]["objective/scores"]
    assert f"scores {last:.3g}" in page.locator(".runs-table").inner_text()
    page.get_by_label("Compare gsm-grpo-seed1").check()
    page.get_by_label("Compare gsm-ppo", exact=True).check()
    page.get_by_role("link", name="Compare 2").click()
    page.wait_for_selector("figure.chart .u-over")
    assert page.url.count("run=") == 2 and page.locator(".chip").all_inner_texts()[0].startswith("gsm-grpo-seed1")


def test_settings_of_two_marked_runs_are_compared(board: ServedBoard, page: Any) -> None:
    show(page, board.url, "runs")
    for name in ("gsm-grpo-seed1", "gsm-grpo-seed2"):
        page.get_by_label(f"Compare {name}").check()
    page.get_by_role("link", name="Settings diff").click()
    page.wait_for_selector(".diff-table")
    rows = page.locator(".diff-table tbody tr").all_inner_texts()
    assert len(rows) == 1 and rows[0].split() == ["seed", *sorted(rows[0].split()[1:])]
    page.get_by_label("Equal settings too").check()
    wait_in_page(page, "document.querySelectorAll('.diff-table tbody tr').length > 50")


def test_a_run_has_a_title_and_notes_and_its_memory_stays_in_the_card(board: ServedBoard, page: Any) -> None:
    run = _id(board, "gsm-ppo")
    page.set_viewport_size({"width": 400, "height": 800})
    show(page, board.url, f"run?run={run}")
    page.locator(".memory").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    press(page, "Edit title and notes")
    page.get_by_role("textbox", name="Title").fill("Baseline")
    page.get_by_role("textbox", name="Notes").fill("Stable.")
    press(page, "Save")
    wait_in_page(page, "document.querySelector('h1').innerText === 'Baseline'")
    page.locator(".notes-text", has_text="Stable.").wait_for()
    board.post(f"/api/runs/{run}/marks", {})


def test_prompts_with_one_sample_are_no_groups(board: ServedBoard, page: Any) -> None:
    show(page, board.url, f"rollouts?run={_id(board, 'single')}&view=groups")
    page.locator(".result-count", has_text="3 prompts with one sample").wait_for()
    page.locator(".histogram").nth(1).wait_for()
    assert page.locator("section.group").count() == 0
    assert page.locator(".component").count() == 0, "one component that repeats the score is not shown beside it"


def test_curves_show_the_last_values_and_bands_over_seeds(board: ServedBoard, page: Any) -> None:
    runs = [_id(board, f"gsm-grpo-seed{seed}") for seed in (1, 2, 3)]
    query = "&".join(f"run={run}" for run in runs)
    show(page, board.url, f"curves?{query}&q=scores")
    chart = _chart(page, "objective/scores")
    chart.locator(".u-over").wait_for()
    found = board.get("/api/metrics", run=runs, name="objective/scores")
    mean = sum(found[run]["values"]["objective/scores"][-1] for run in runs) / 3
    assert chart.locator(".chart-values").inner_text().strip() == f"{mean:.3g}"
    assert page.locator("figure.chart h3").all_inner_texts() == ["objective/scores", "objective/scores_std"]
    page.get_by_label("Band over seeds").uncheck()
    wait_in_page(page, "document.querySelectorAll('.chart-label').length === 6")
    assert page.locator(".chart-label").first.inner_text() == "gsm-grpo-seed1"
    assert "bands=0" in page.url


def test_a_focused_chart_is_read_with_arrow_keys(board: ServedBoard, page: Any) -> None:
    run = _id(board, "gsm-ppo")
    show(page, board.url, f"curves?run={run}&q=objective/kl")
    _chart(page, "objective/kl").locator(".u-over").wait_for()
    page.locator(".chart-canvas").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    wait_in_page(page, "document.querySelector('.chart-place').textContent === 'step 2'")
    values = board.get("/api/metrics", run=run, name="objective/kl")[run]["values"]["objective/kl"]
    assert f"{values[1]:.3g}" in page.locator(".chart-values").inner_text()


def test_a_new_line_appears_within_seconds(board: ServedBoard, page: Any) -> None:
    run = board.run("many")
    show(page, board.url, f"curves?run={run['id']}&q=objective/scores")
    _chart(page, "objective/scores").locator(".u-over").wait_for()
    page.get_by_text("Live", exact=True).wait_for()
    begin = time.monotonic()
    append_metrics(Path(run["folder"]), run["step"] + 1, **{"objective/scores": 7.125})
    wait_in_page(page, "document.querySelector('.chart-values').textContent.includes('7.125')")
    print(f"shown after {time.monotonic() - begin:.2f} s")


def test_rollouts_are_filtered_and_only_visible_rows_exist(board: ServedBoard, page: Any) -> None:
    run = _id(board, "many")
    show(page, board.url, f"rollouts?run={run}")
    wait_for_text(page, "5,000 samples")
    assert page.locator(".sample-row").count() < 40
    page.locator(".virtual").evaluate("box => box.scrollTo(0, box.scrollHeight)")
    page.get_by_text("number 0 of step 1", exact=False).first.wait_for()
    page.get_by_label("Search prompts and completions").fill("number 17 of step 3")
    total = board.get(f"/api/runs/{run}/samples", text="number 17 of step 3")["total"]
    wait_for_text(page, re.compile(rf"^{total} samples?$"))
    assert "text=number+17" in page.url
    page.get_by_text("Clear").click()
    page.get_by_text("Ranges").click()
    page.get_by_label("Score at least").fill("995")
    total = board.get(f"/api/runs/{run}/samples", score_min=995)["total"]
    wait_for_text(page, re.compile(rf"^{total} samples$"))


def test_groups_stand_side_by_side_and_lead_to_their_prompt(board: ServedBoard, page: Any) -> None:
    show(page, board.url, f"rollouts?run={_id(board, 'gsm-ppo')}&view=groups")
    page.locator(".sample-card").first.wait_for()
    assert page.locator(".group").count() == 6 and page.locator(".group").first.locator(".sample-card").count() == 4
    page.get_by_role("link", name="All steps").first.click()
    page.get_by_role("heading", name="Prompt", exact=True).wait_for()
    wait_for_text(page, "64 samples in 4 runs")


def test_markup_of_a_completion_is_text(board: ServedBoard, page: Any) -> None:
    show(page, board.url, f"sample?run={_id(board, 'gsm-ppo')}&step=60&index=23")
    page.locator(".message-assistant .message-text", has_text=MARKUP).wait_for()
    press(page, "Tokens")
    page.locator(".token").first.wait_for()
    assert MARKUP in "".join(page.locator(".token").all_text_contents())
    assert page.title() == "Sample · Board" and page.locator("main img").count() == 0


def test_tokens_are_read_by_keyboard(board: ServedBoard, page: Any) -> None:
    run = _id(board, "gsm-ppo")
    tokens = board.get(f"/api/runs/{run}/samples/60/4")["tokens"]
    show(page, board.url, f"sample?run={run}&step=60&index=4")
    page.keyboard.press("v")
    page.locator(".token-text").focus()
    page.keyboard.press("ArrowRight")
    first = tokens["prompt_length"]
    wait_for_text(page, f"position {first}, id {tokens['ids'][first]}, sampled")
    shown = page.locator(".strip .current dd").inner_text().replace("−", "-").replace("+", "")
    assert float(shown) == float(f"{tokens['columns']['advantages'][first]:.4g}") or abs(float(shown)) < 1
    page.get_by_label("Colour by").select_option("mask")
    assert "column=mask" in page.url
    colours = page.locator(".token").evaluate_all("spans => spans.map(span => span.style.backgroundColor !== '')")
    assert colours == [bool(sampled) for sampled in tokens["response"]]
    page.keyboard.press("Escape")
    page.keyboard.press("m")
    page.locator(".message-assistant").wait_for()


def test_the_timeline_adds_up(board: ServedBoard, page: Any) -> None:
    show(page, board.url, f"run?run={_id(board, 'gsm-ppo')}")
    rows = page.locator(".timeline tbody tr")
    assert rows.count() == 4
    shares = [float(text.split()[0]) for text in rows.locator("td:nth-child(2)").all_inner_texts()]
    assert abs(sum(shares) - 100) < 0.3 and shares == sorted(shares, reverse=True)
    page.get_by_label("Search settings").fill("seed")
    assert page.locator(".settings tbody tr").first.inner_text().split() == ["seed", "1"]


def test_signals_name_their_evidence_and_source(board: ServedBoard, page: Any) -> None:
    run = _id(board, "gsm-ppo")
    found = board.get(f"/api/runs/{run}/signals")
    show(page, board.url, f"signals?run={run}")
    page.locator(".signal").first.wait_for()
    assert found and page.locator(".signal").count() == len(found)
    text = page.locator("main").inner_text()
    assert all(signal["what"] in text and signal["source"] in text for signal in found)


def test_preferences_are_blind_and_judged_by_keys(board: ServedBoard, page: Any) -> None:
    show(page, board.url, f"preferences?run={_id(board, 'gsm-grpo-seed1')}")
    page.locator(".answer").first.wait_for()
    assert "score" not in page.locator(".answers").inner_text()
    page.keyboard.press("s")
    wait_in_page(page, "!document.querySelector('.answer button').disabled")
    assert board.get("/api/preferences/summary")["count"] == 0
    page.keyboard.press("1")
    wait_for_text(page, "1 judgement")
    wait_in_page(page, "!document.querySelector('.answer button').disabled")
    page.keyboard.press("0")
    wait_for_text(page, "2 judgements")
    summary = board.get("/api/preferences/summary")
    assert summary["by"] == {getpass.getuser(): 2}
    lines = [json.loads(line) for line in Path(summary["pairs_file"]).read_text().splitlines()]
    assert len(lines) == 2
    page.keyboard.press("u")  # a wrong key
    wait_for_text(page, "1 judgement")
    wait_in_page(page, "!document.querySelector('.answer button').disabled")
    assert len(Path(summary["pairs_file"]).read_text().splitlines()) == 1


def test_the_list_of_runs_is_sorted_by_its_columns(board: ServedBoard, page: Any) -> None:
    show(page, board.url, "runs")
    names = page.locator(".cell-name a")
    names.first.wait_for()
    latest = names.all_inner_texts()
    page.get_by_role("button", name="Run", exact=True).click()
    wait_in_page(page, "document.querySelector('th[aria-sort=ascending]')?.textContent.includes('Run')")
    assert names.all_inner_texts() == sorted(latest)
    page.get_by_role("button", name="Run", exact=True).click()
    wait_in_page(page, "document.querySelector('th[aria-sort=descending]')?.textContent.includes('Run')")
    assert names.all_inner_texts() == sorted(latest, reverse=True)
    page.get_by_role("searchbox").fill("finished grpo")
    wait_in_page(page, "document.querySelectorAll('.cell-name a').length === 3")


def test_keys_and_theme(board: ServedBoard, page: Any) -> None:
    page.emulate_media(color_scheme="light")
    show(page, board.url, "runs")
    page.keyboard.press("?")
    page.get_by_role("dialog", name="Keyboard").wait_for()
    page.keyboard.press("Escape")
    page.keyboard.press("g")
    page.keyboard.press("c")
    page.get_by_role("heading", name="Curves", exact=True).wait_for()
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.keyboard.press("t")
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark" and page.evaluate(background) != light
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.wait_for_selector("main h1")
    page.keyboard.press("t")
    page.keyboard.press("?")
    page.get_by_label("Shortcuts of one key").uncheck()
    page.keyboard.press("Escape")
    page.keyboard.press("g")
    page.keyboard.press("r")
    assert page.locator("main h1").inner_text() == "Curves"
    page.evaluate("localStorage.clear()")


def test_the_form_checks_settings_while_they_are_entered(board: ServedBoard, page: Any) -> None:
    """Nothing is red before anything is entered, an error is shown at its field, and what is missing is named."""
    show(page, board.url, "start?command=sft")
    wait_for_text(page, "Still needed")
    assert page.locator(".needed").all_inner_texts() == ["model.path", "data.sources"]
    assert page.locator(".error-line, .field-problem").count() == 0
    labels = page.locator(".form-field label code").all_inner_texts()
    assert labels[:3] == ["model.path", "data.sources", "output_dir"]
    assert page.locator("[id='field-output_dir']").input_value().endswith("/output/step1_sft")
    page.get_by_label("Search settings").fill("train.max_steps")
    page.get_by_label("train.max_steps").fill("many")
    page.locator(".field-problem", has_text="train.max_steps must be").wait_for()
    assert page.get_by_role("button", name="Start the run").is_disabled()


_CONTRAST = """element => {
  const channel = value => (value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  const light = color => color.match(/[0-9.]+/g).slice(0, 3)
    .reduce((sum, value, place) => sum + [0.2126, 0.7152, 0.0722][place] * channel(value / 255), 0);
  let behind = element;
  while (/rgba\\(.*, 0\\)/.test(getComputedStyle(behind).backgroundColor)) behind = behind.parentElement;
  const colors = [getComputedStyle(element).color, getComputedStyle(behind).backgroundColor];
  const [low, high] = colors.map(light).sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_labels_are_readable_in_every_state(board: ServedBoard, page: Any, theme: str) -> None:
    """Those of primary buttons vanished under the mouse, in the light theme."""
    page.emulate_media(color_scheme=theme)
    show(page, board.url, "runs")
    for kind in ("", "primary", "danger", "quiet"):
        page.evaluate(
            "kind => document.querySelector('main').insertAdjacentHTML('afterbegin', "
            "`<p class='card'><button class='button ${kind}' id='of-test-${kind}'>Label</button></p>`)",
            kind,
        )
        button = page.locator(f"#of-test-{kind}")
        ratios = [button.evaluate(_CONTRAST)]
        button.hover()
        ratios.append(button.evaluate(_CONTRAST))
        button.focus()
        ratios.append(button.evaluate(_CONTRAST))
        button.evaluate("element => { element.disabled = true; }")
        ratios.append(button.evaluate(_CONTRAST))
        assert min(ratios) >= 4.5, (kind, ratios)


def test_entries_of_the_form_survive_other_views_and_commands(board: ServedBoard, page: Any) -> None:
    show(page, board.url, "start?command=rl")
    page.get_by_label("model.path", exact=True).fill("models/mine")
    show(page, board.url, "runs")
    show(page, board.url, "start?command=rl")
    wait_in_page(page, "document.querySelector('[id=\"field-model.path\"]')?.value === 'models/mine'")
    press(page, "SFT")
    wait_in_page(page, "document.querySelector('[id=\"field-model.path\"]')?.value === 'models/mine'")
    assert "command=sft" in page.url


def test_a_reward_function_is_entered_as_yaml(board: ServedBoard, page: Any) -> None:
    """It was sent as a text, and looked up as a repository of the hub."""
    show(page, board.url, "start")
    field = page.locator("[id='field-reward.components']")
    field.fill("{function: rew.py:score")
    page.locator(".field-problem", has_text="not YAML").wait_for()
    assert field.get_attribute("aria-invalid") == "true"
    field.fill("output/reward\n{function: rew:score, weight: 0.5}")
    page.locator(".command", has_text='["output/reward", {"function": "rew:score", "weight": 0.5}]').wait_for()
    page.locator("[id='field-data.sources']").fill("hub/rows")
    wait_in_page(page, "document.querySelectorAll('.needed').length === 1")
    assert page.locator(".needed").all_inner_texts() == ["model.path"] and page.locator(".field-problem").count() == 0


def test_the_form_begins_with_a_recipe_or_an_earlier_run(board: ServedBoard, page: Any) -> None:
    show(page, board.url, f"start?preset={_id(board, 'gsm-grpo-seed1')}")
    page.locator(".command", has_text="--algorithm.name grpo").wait_for()
    assert page.locator("[id='field-model.path']").input_value() == "Qwen/Qwen3-0.6B"
    assert page.locator("[id='field-output_dir']").input_value().endswith("/gsm-grpo-seed1_2")
    page.get_by_label("Begin with").select_option(label="qwen2.5-0.5b-grpo · RL")
    page.locator(".command", has_text="--algorithm.kl null").wait_for()
    assert (
        page.locator("[id='field-reward.components']").input_value() == '{"function":"recipes/final_number.py:correct"}'
    )
    page.get_by_label("Begin with").select_option(label="the defaults")
    wait_in_page(page, "document.querySelectorAll('.needed').length === 3")


def test_views_say_what_is_missing(board: ServedBoard, page: Any) -> None:
    show(page, board.url, "nowhere")
    wait_for_text(page, "There is no such view")
    show(page, board.url, "run?run=unknown")
    wait_for_text(page, "There is no such run")
    show(page, board.url, "rollouts?run=" + _id(board, "gsm-ppo-lr1e-3"))
    wait_for_text(page, "No samples here")
    show(page, board.url, "chat")
    wait_for_text(page, "No saved model yet")
