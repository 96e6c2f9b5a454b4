"""report.html and report.json: what is in them, markup of completions, and runs that fail or stop."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from PIL import Image

from hybrid_rlhf.configs.errors import UserError
from hybrid_rlhf.configs.parsing.building import settings_and_defaults
from hybrid_rlhf.configs.rl import RLConfig
from hybrid_rlhf.configs.sft import SFTConfig
from hybrid_rlhf.data.images.references import read_reference
from hybrid_rlhf.loop.report import content
from hybrid_rlhf.loop.report.charts import Chart, chart_groups, thinned
from hybrid_rlhf.loop.report.memory import memory_by_phase
from hybrid_rlhf.loop.report.pipeline import write_pipeline_report
from hybrid_rlhf.loop.report.samples import first_and_last_samples
from hybrid_rlhf.loop.report.writing import write_report
from hybrid_rlhf.loop.setup import open_step
from hybrid_rlhf.planning.device import Device
from hybrid_rlhf.planning.engine_memory import MemoryUse
from hybrid_rlhf.planning.phase_memory import PhaseMemory
from hybrid_rlhf.planning.step_memory import Planner
from hybrid_rlhf.runtime.command_line import parse_config, save_config
from hybrid_rlhf.runtime.observability.timers import Timers
from hybrid_rlhf.runtime.placement import Placement, RolePlacement
from hybrid_rlhf.runtime.run import CONFIG_FILE, Run
from hybrid_rlhf.supervised.build import run_sft
from tests.support.runs import sft_config, sft_line
from tests.support.steps import write_lines
from tests.support.vision import picture

MARKUP = "</div><script>alert(1)</script><img src=x onerror=alert(2)> {{ 7 * 7 }} & \"'"


class Page(HTMLParser):
    """The tags, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(text)
        assert self.open == [], "every tag is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "br", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module", autouse=True)
def planned() -> Iterator[None]:
    """Reports have the memory plan, which those of other tests lack."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(content, "memory_by_phase", memory_by_phase)
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """A short run of SFT."""
    folder = tmp_path_factory.mktemp("sft")
    lines = [{"prompt": f"say {i}", "completion": str(i) * (60 if i % 10 == 0 else 1)} for i in range(40)]
    rows = write_lines(folder / "rows.jsonl", lines)
    more = "--train.max_steps 6 --data.max_length 48"
    line = sft_line(
        folder / "run", model_folder, rows, more + " --data.too_long drop --train.eval_every 2 --data.eval_fraction 0.2"
    )[1:]
    run_sft(parse_config(SFTConfig, line))
    return folder / "run"


def test_a_run_ends_with_a_report(trained: Path) -> None:
    report = json.loads((trained / "report.json").read_text(), parse_constant=lambda word: pytest.fail(word))
    run = report["run"]
    assert (run["end_state"], run["step"], run["title"], run["ranks"]) == ("finished", 6, "SFT", 1)
    changed = [row["key"] for row in report["settings"] if row["changed"]]
    assert {"data.max_length", "train.max_steps", "data.too_long"} <= set(changed)
    assert [row["changed"] for row in report["settings"]] == sorted(row["changed"] for row in report["settings"])[::-1]
    row = next(row for row in report["settings"] if row["key"] == "train.global_batch_size")
    assert (row["value"], row["default"]) == (4, 32)
    data = report["data"]
    assert (data["read"], data["dropped_too_long"], data["truncated"], data["limit_tokens"]) == (40, 4, 0, 48)
    assert data["training"] + data["held_out"] == 36 and data["dropped_without_target"] == 0
    assert [step for step, _ in report["curves"]["sft/loss"]] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in report["curves"]["eval/loss"]] == [0, 2, 4, 6]
    assert {"python", "torch", "transformers"} <= report["versions"].keys()
    assert report["time"][0]["phase"] == "training" and report["memory"]["peak_gib"] > 0
    (phase,) = report["memory"]["phases"]
    assert phase["phase"] == "SFT training" and phase["planned_gib"] > 0
    assert phase["measured_gib"] is None, "the peak of a process on a CPU cannot be taken apart"
    assert {"config.yaml", "metrics.jsonl", "log.txt"} <= set(report["files"])


def test_the_page_stands_alone(trained: Path) -> None:
    text = (trained / "report.html").read_text()
    page = Page(text)
    assert not {"script", "link", "img", "iframe"} & {*page.tags}
    assert "url(" not in text and "@import" not in text and "http://" not in text and "https://" not in text
    links = [value for name, value in page.attributes if name in ("href", "src")]
    assert links and all(value and (trained / value).is_file() for value in links)
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'; img-src data:") in page.attributes
    assert page.tags.count("polyline") == len(json.loads((trained / "report.json").read_text())["curves"])
    assert "sft/loss" in page.text and "train.global_batch_size" in page.text
    assert "No sign of an unhealthy run was found." in page.text


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A run in its loop, whose report is not written yet."""
    with open_step(sft_config(tmp_path / "run")) as run:
        run.at_end.clear()
        save_config(run.config, run.folder / CONFIG_FILE)
        run.open_metrics(None)
        yield run


def ended(run: Run, error: BaseException | None = None) -> tuple[dict[str, Any], Page]:
    """The report of a run that ends now."""
    from hybrid_rlhf.runtime.observability.alerts import Ending

    run.close()
    write_report(run, Ending("finished") if error is None else Ending.of(error))
    text = (run.folder / "report.html").read_text(errors="surrogateescape")
    return json.loads((run.folder / "report.json").read_text()), Page(text)


def test_markup_of_completions_is_shown_and_not_executed(run: Run) -> None:
    for step in (1, 2):
        run.log(step, {"objective/scores": 1.0, f"reward/{MARKUP}": 0.5})
    row = {"prompt": [{"role": f"user{MARKUP}", "content": MARKUP}], "completion": f"{MARKUP}\ud800", "score": 1.0}
    lines = [json.dumps({"step": step, **row, "kl": None}) + "\n" for step in (1, 1, 2)]
    (run.folder / "samples.jsonl").write_text("".join(lines))
    report, page = ended(run, UserError(MARKUP))
    assert not {"script", "img"} & {*page.tags}
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert page.text.count(MARKUP) >= 5, "in prompts, completions, the name of a curve and the reason"
    assert [len(step["rows"]) for step in report["samples"]] == [2, 1]


def test_samples_show_their_images(run: Run) -> None:
    """A file that has changed since shows its name."""
    images = []
    for seed, name in enumerate(["a.png", f"{MARKUP.replace('/', '')}.png"]):
        picture(seed, (600, 300)).save(run.folder / name)
        read = read_reference(name, "image", folder=run.folder, max_pixels=2**20)
        images.append({"path": read.path, "digest": read.digest, "width": read.width, "height": read.height})
    picture(2).save(images[1]["path"], "PNG")
    row = {"prompt": [], "completion": "x", "score": 1.0, "images": images}
    (run.folder / "samples.jsonl").write_text(json.dumps({"step": 1, **row}) + "\n")
    report, page = ended(run)
    ((shown, changed),) = [row["images"] for step in report["samples"] for row in step["rows"]]
    content = base64.b64decode(shown["uri"].removeprefix("data:image/jpeg;base64,"))
    assert Image.open(io.BytesIO(content)).size == (256, 128) and changed["uri"] == ""
    assert page.tags.count("img") == 1 and ("src", shown["uri"]) in page.attributes
    assert changed["name"] in page.text and "script" not in page.tags


def test_a_failed_run_has_a_report_with_reason_and_advice(run: Run) -> None:
    for step in range(1, 12):
        times = {"time/generation_seconds": 2.0, "time/training_seconds": 1.0, "time/step_seconds": 4.0}
        run.log(step, {"objective/kl": 0.1 * step, "val/explained_variance": -0.4, "critic/lr": 1e-5, **times})
    try:
        raise ValueError("the cause")
    except ValueError as error:
        report, page = ended(run, error)
    assert report["run"]["end_state"] == "failed" and report["run"]["reason"] == "ValueError: the cause"
    assert report["run"]["place"].startswith(__file__)
    (finding,) = report["advice"]
    assert (finding["rule"], finding["step"]) == ("negative explained variance", 10)
    rows = {row["phase"]: row for row in report["time"]}
    assert list(rows) == ["step", "generation", "training"]
    assert (rows["generation"]["share"], rows["generation"]["mean_seconds"]) == (0.5, 2.0)
    for text in ("failed", "ValueError: the cause", "Negative explained variance", finding["source"]):
        assert text in page.text


def test_values_that_are_not_finite_leave_gaps(run: Run) -> None:
    for step, loss in enumerate((1.0, float("nan"), 3.0), start=1):
        run.log(step, {"sft/loss": loss, "sft/never": float("inf")})
    report, page = ended(run)
    assert report["curves"] == {"sft/loss": [[1, 1.0], [3, 3.0]]}
    assert [finding["rule"] for finding in report["advice"]] == ["loss not finite"]
    assert page.tags.count("polyline") == 1


def test_measured_memory_stands_beside_the_plan(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    gib, device = 2.0**30, run.world.device
    need = [("generation", 3.0), ("actor training", 4.0), ("scoring", 5.0)]
    phases = [PhaseMemory(name, MemoryUse(weights=gib * has), Device(device, 1, 8 * gib)) for name, has in need]
    monkeypatch.setattr(Planner, "phases", lambda *given: phases)
    monkeypatch.setattr(Timers, "peaks_gib", {"generation": 2.5, "training": 3.5})
    report, page = ended(run)
    assert [tuple(row.values()) for row in report["memory"]["phases"]] == [
        ("generation", "0", 3.0, 2.5),
        ("actor training", "0", 4.0, 3.5),
        ("scoring", "0", 5.0, None),
    ]
    assert "planned GiB" in page.text and "measured GiB" in page.text


def test_a_run_without_a_plan_has_a_report(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory_by_phase(run) == []  # its config names no model
    monkeypatch.setattr(Planner, "phases", Mock(side_effect=RuntimeError("no shape rule")))
    report, page = ended(run)
    assert report["memory"]["phases"] == [] and "planned GiB" not in page.text


def test_ranks_of_different_roles_have_plans_of_their_own(run: Run, model_folder: Path) -> None:
    """Next to the peak of the rank that takes most; a run that ends before its roles are placed has no plan."""
    judge = f"[{{model: {model_folder}, name: judge}}]"
    line = f"--model.path {model_folder} --train.micro_batch_tokens 8192 --placement separation --reward.components"
    config = parse_config(RLConfig, [*line.split(), judge])
    assert memory_by_phase(replace(run, config=config)) == []
    sampler = {name: RolePlacement(ranks) for name, ranks in {"sampler": (1, 2), "judge": (1, 2)}.items()}
    learners = {name: RolePlacement((0,)) for name in ("actor", "critic", "reference")}
    placed = replace(run, config=config, placed=(config, Placement({**learners, **sampler}, "separation")))
    placed.peaks = [{"training": 2.0, "scoring": 1.0}, {"generation": 0.25}, {"generation": 0.5, "scoring": 0.125}]
    rows = {(row["phase"], row["ranks"]): row for row in memory_by_phase(placed)}
    assert {key: row["measured_gib"] for key, row in rows.items()} == {
        ("actor training", "0"): 2.0,
        ("critic training", "0"): 2.0,
        ("scoring", "0"): 1.0,
        ("generation", "1-2"): 0.5,
        ("scoring", "1-2"): 0.125,
    }
    planned = [rows[key]["planned_gib"] for key in (("actor training", "0"), ("scoring", "1-2"))]
    assert planned[0] > 2 * planned[1] > 0, "states of two optimizers are on the first rank alone"


def test_a_run_that_stops_before_its_first_step_has_a_report(run: Run) -> None:
    report, page = ended(run, SystemExit(143))
    assert report["run"]["end_state"] == "stopped" and report["curves"] == {}
    assert "The run ended before its first step." in page.text


def test_an_error_before_the_loop_leaves_no_report(tmp_path: Path) -> None:
    with pytest.raises(UserError), open_step(sft_config(tmp_path / "run")):
        raise UserError("wrong")
    assert not list((tmp_path / "run").glob("report.*"))


def test_a_report_that_cannot_be_written_ends_no_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with open_step(sft_config(tmp_path / "run")) as run:
        run.open_metrics(None)
        (run.folder / "report.json").mkdir()
    assert "after the end of the run: IsADirectoryError" in capfd.readouterr().out


def test_only_the_ends_of_a_large_file_are_read(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    row = {"prompt": [], "completion": "x" * 3000, "score": None, "kl": None}
    with file.open("w") as lines:
        for step in range(1, 2001):
            lines.write(json.dumps({"step": step, **row}) + "\n")
        lines.write('{"step": 2001, "completion": "cut')
    first, last = first_and_last_samples(file)
    assert (first["step"], last["step"]) == (1, 2000)
    assert len(last["rows"]) == 1 and len(last["rows"][0]["completion"]) == 2001
    assert first_and_last_samples(tmp_path / "none") == []
    rows = [{"step": step, **row, "completion": text} for step, text in ((1, "x" * 2**21), (2, "y"))]
    write_lines(file, rows)
    (last,) = first_and_last_samples(file)
    assert (last["step"], last["rows"][0]["completion"]) == (2, "y"), "also behind a row that is too long"


def test_thinned_curves_keep_their_peaks() -> None:
    points = [(step, 1.0) for step in range(10_000)]
    points[5000], points[7001] = (5000, 99.0), (7001, -3.0)
    kept = thinned(points, 300)
    assert len(kept) <= 300 and {(5000, 99.0), (7001, -3.0)} <= set(kept)
    assert kept == sorted(kept)
    chart = Chart.of("loss", points)
    assert (chart.bottom, chart.top, chart.first_step, chart.last_step) == (-3.0, 99.0, 0, 9999)
    assert all(re.fullmatch(r"-?[\d.]+,-?[\d.]+", pair) for pair in chart.line.split())
    assert Chart.of("one", [(3, 5.0)]).line == "0.0,48.0"
    flat = [float(point.split(",")[1]) for point in Chart.of("flat", [(1, 10.79), (2, 10.7901)]).line.split()]
    assert 48 > flat[1] and flat[0] < 50, "not the whole height for what its labels do not show"
    assert list(chart_groups({"zz": [(1, 1.0)], "perf/a": [(1, 1.0)], "lr": [(1, 1.0)]})) == ["main", "perf", "other"]


def test_settings_have_the_defaults_of_their_algorithm() -> None:
    config = parse_config(RLConfig, "--algorithm grpo --actor.optimizer.lr 3e-6".split())
    settings = settings_and_defaults(config)
    assert settings["actor.optimizer.lr"][0] == 3e-6 != settings["actor.optimizer.lr"][1]
    assert settings["algorithm.kl.coef"] == (0.04, 0.04), "GRPO's own"
    assert settings["rollout.sampling.n"][0] == settings["rollout.sampling.n"][1]


def test_a_pipeline_links_the_reports_of_its_steps(trained: Path, tmp_path: Path) -> None:
    output = trained.parent
    assert write_pipeline_report(tmp_path, {"rl": tmp_path / "none"}) is None
    file = write_pipeline_report(output, {"sft": trained, "rl": output / "none"})
    assert file == output / "report.html"
    page = Page(file.read_text())
    assert [value for name, value in page.attributes if name == "href"] == ["run/report.html"]
    assert "finished" in page.text and "eval/loss" in page.text
