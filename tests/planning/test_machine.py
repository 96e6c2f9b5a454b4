"""Machines: data sheets, what is measured, and its file."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
import torch
import yaml

from hybrid_rlhf.configs.pipeline import MACHINES
from hybrid_rlhf.planning.calibration import Link, calibrate, time_link
from hybrid_rlhf.planning.machine import DATA_SHEETS, Machine, sheet_of
from hybrid_rlhf.planning.stored import load_machine, machine_path, save_machine
from hybrid_rlhf.runtime.world import World
from tests.support.errors import user_error
from tests.support.placement import machine
from tests.support.ranks import run_ranks

SHEET = {
    "tflops": 500,
    "memory_gb_per_second": 3000,
    "device_gib": 90,
    "host_gib": 800,
    "link_gb_per_second": 300,
    "link_latency_microseconds": 3,
    "hosts_gb_per_second": 100,
    "hosts_latency_microseconds": 9,
    "launch_microseconds": 12,
    "cards_per_host": 4,
    "host_link_gb_per_second": 50,
    "ranks_per_host": 4,
}


def test_a_data_sheet_of_a_file_is_a_machine(tmp_path: Path) -> None:
    file = tmp_path / "lab.yaml"
    file.write_text(yaml.safe_dump(SHEET))
    sheet = sheet_of(str(file))
    assert sheet.name == "lab" and {key: getattr(sheet, key) for key in SHEET} == SHEET
    others = {"name", "device", "cores", "measured", "network_source"}
    assert {each.name for each in fields(Machine)} - {*SHEET} == others
    rank = sheet.rank(8)
    assert (rank.device_bytes, rank.host_bytes) == (88 * 2**30, 200 * 2**30)
    assert set(MACHINES) == set(DATA_SHEETS), "those that --machine names"
    page = (Path(__file__).parents[2] / "docs" / "placement.md").read_text()
    assert all(re.search(rf"`{key}`|^{key}: ", page, re.MULTILINE) for key in ("name", *SHEET)), (
        "the keys are documented"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device_gb": 3}, "unknown key device_gb in .*: the nearest is device_gib"),
        ({"bfloat16_tflops": 3}, "unknown key bfloat16_tflops in .*: tflops has the rate of products"),
        ({"cores": 3}, "unknown key cores in "),
        ({"device_gib": "90 GiB"}, "device_gib in .* must be a number, got '90 GiB'"),
        ({"ranks_per_host": 3.5}, "ranks_per_host in .* must be a number, got 3.5"),
        ({"link_gb_per_second": 0}, "link_gb_per_second of a data sheet must be above 0, got 0"),
        ({"device_gib": None}, "device_gib in .* must be a number, got None"),
    ],
)
def test_a_wrong_data_sheet_is_one_line(change: dict[str, object], message: str, tmp_path: Path) -> None:
    file = tmp_path / "lab.yaml"
    file.write_text(yaml.safe_dump(SHEET | change))
    with user_error(message):
        sheet_of(str(file))
    file.write_text(yaml.safe_dump({key: value for key, value in SHEET.items() if key != "device_gib"}))
    with user_error("all numbers of a data sheet, got none for device_gib"):
        sheet_of(str(file))


def test_a_measured_machine_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = replace(machine(), measured=True)
    path = save_machine(found, 4, str(tmp_path))
    assert path == machine_path(4, str(tmp_path)) != machine_path(3, str(tmp_path))
    assert load_machine(str(tmp_path)) == found
    more = replace(found, name="more ranks")
    save_machine(more, 8, str(tmp_path))
    assert load_machine(str(tmp_path)) == more, "by the most ranks"
    assert load_machine(str(tmp_path), ranks=4) == found and load_machine(str(tmp_path), ranks=5) is None
    assert load_machine(str(tmp_path / "none")) is None
    assert [each.name for each in path.parent.iterdir() if each.name.endswith("partial")] == []


@pytest.mark.parametrize("change", ["{", "{}", '{"key": {"ranks": 1}}', '{"key": 3, "machine": {}}'])
def test_a_damaged_file_is_refused_in_one_line(change: str, tmp_path: Path) -> None:
    path = save_machine(machine(), 2, str(tmp_path))
    path.write_text(change)
    with user_error("damaged.*calibrate --renew true"):
        load_machine(str(tmp_path))


def test_measurements_of_another_machine_or_version_are_not_loaded(tmp_path: Path) -> None:
    path = save_machine(machine(), 2, str(tmp_path))
    content = json.loads(path.read_text())
    for name, value in (("torch", "1.0"), ("host", "elsewhere"), ("cores", 1000)):
        path.write_text(json.dumps({**content, "key": {**content["key"], name: value}}))
        assert load_machine(str(tmp_path)) is None


def test_a_calibration_measures_five_numbers_and_takes_the_rest_from_a_data_sheet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = torch.get_num_threads()
    found = calibrate(2, Link(0.5, 40.0))
    assert torch.get_num_threads() == threads
    assert (found.link_gb_per_second, found.link_latency_microseconds) == (0.5, 40.0)
    assert found.measured and found.type == "cpu" and found.ranks_per_host == 2
    # a core of any processor of this century, and of the next ones
    assert 1e-4 < found.tflops < 10 and 0.1 < found.memory_gb_per_second < 1000
    assert 0.1 < found.launch_microseconds < 1000
    gpu = replace(found, name="NVIDIA H100 80GB HBM3", cores=None).with_sheet()
    assert (gpu.hosts_gb_per_second, gpu.cards_per_host) == (400, 8) and gpu.tflops == found.tflops
    assert found.with_sheet() == found and gpu.network_source == "data sheet"
    given = gpu.with_network(2.0)
    assert given.network_gib_per_second == pytest.approx(2.0) and given.network_source == "given"
    known = asdict(gpu.with_measured_network(5.0, 20.0))
    assert (known["hosts_gb_per_second"], known["hosts_latency_microseconds"]) == (5.0, 20.0)
    assert known["network_source"] == "measured"


def timed_links(world: World) -> tuple[float, float]:
    return tuple(time_link(world))  # type: ignore[return-value]


@pytest.mark.slow
def test_ranks_measure_the_link_between_them(tmp_path: Path) -> None:
    rate, latency = run_ranks(timed_links, 2, tmp_path / "ranks")[0]
    assert 1e-3 < rate < 1000 and 0.1 < latency < 1e5
