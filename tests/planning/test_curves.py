"""Curves, their file, and machines modelled from data sheets."""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from hybrid_rlhf.configs.pipeline import MACHINES
from hybrid_rlhf.planning.curves import Curve, Surface
from hybrid_rlhf.planning.device import Device
from hybrid_rlhf.planning.engine_memory import MemoryUse
from hybrid_rlhf.planning.machines.datasheets import (
    DATA_SHEETS,
    PRODUCTS_ACHIEVED,
    DataSheet,
    modelled_curves,
    sheet_of,
)
from hybrid_rlhf.planning.machines.stored import curves_file, load_curves, read_curves, save_curves
from hybrid_rlhf.planning.phase_memory import PhaseMemory
from hybrid_rlhf.planning.prediction_errors import PredictionReport, memory_errors
from tests.support.errors import user_error
from tests.support.placement import machine

GPU = Device(torch.device("cuda"), 2, 2.0**40)


def test_a_curve_is_latency_below_its_points_bandwidth_above_and_a_power_law_between() -> None:
    curve = Curve.of([(100, 4.0), (10, 1.0)])
    assert [curve(size) for size in (0, 1, 10, 100, 1000)] == pytest.approx([0, 1, 1, 4, 40])
    assert curve(math.sqrt(1000)) == pytest.approx(2.0)
    sizes = np.asarray([0.0, 3.0, 10.0, 42.0, 100.0, 1e6])
    assert curve(sizes) == pytest.approx([curve(size) for size in sizes])


def test_measured_points_that_fall_are_averaged_so_that_no_curve_falls() -> None:
    curve = Curve.of([(1, 1.0), (2, 8.0), (4, 2.0), (8, 16.0)])
    assert [seconds for _, seconds in curve.points] == pytest.approx([1.0, 4.0, 4.0, 16.0])
    noisy = Curve.of((size, abs(math.sin(size * 7.3)) + 0.01) for size in range(1, 50))
    taken = [noisy(size / 3) for size in range(1, 400)]
    assert taken == sorted(taken)


def test_a_surface_interpolates_in_both_sizes_and_rises_in_both() -> None:
    surface = Surface(((2.0, Curve.of([(1, 1.0), (100, 100.0)])), (8.0, Curve.of([(1, 4.0), (100, 50.0)]))))
    assert surface(4, 1) == pytest.approx(2.0)
    assert surface(8, 100) == pytest.approx(100.0)  # not below that of a smaller first size
    assert surface(16, 1) == pytest.approx(8.0)
    assert surface(1, 1) == pytest.approx(1.0)
    assert surface(4, np.asarray([1.0, 10.0, 100.0])) == pytest.approx([surface(4, x) for x in (1, 10, 100)])


@pytest.mark.parametrize("name", DATA_SHEETS)
def test_modelled_curves_approach_the_data_sheet(name: str) -> None:
    sheet = DATA_SHEETS[name]
    curves = modelled_curves(sheet)
    assert curves.source == "modelled"
    rate = 2 * 2**26 * 2**14 / curves.products["bfloat16"](2**26, 2**14)
    assert rate == pytest.approx(1e12 * sheet.bfloat16_tflops * PRODUCTS_ACHIEVED, rel=0.05)
    one_row = curves.decode_products["bfloat16"](2**28, 1)
    assert 0.5 < 2 * 2**28 / one_row / (1e9 * sheet.memory_gb_per_second) < 0.7
    gathered = curves.collective("all_gather", ranks=8, size_bytes=2**32, hosts=1)
    assert 0.6 < 2**32 * 7 / 8 / gathered / (1e9 * sheet.link_gb_per_second) < 0.8
    slow = modelled_curves(sheet, link_gib_per_second=0.5)
    assert slow.collective("all_gather", ranks=16, size_bytes=2**32, hosts=2) > 10 * gathered
    assert slow.collective("all_gather", ranks=8, size_bytes=2**32, hosts=1) == gathered


SHEET = {
    "bfloat16_tflops": 500,
    "float32_tflops": 60,
    "memory_gb_per_second": 3000,
    "device_gib": 90,
    "host_gib": 800,
    "link_gb_per_second": 300,
    "hosts_gb_per_second": 100,
    "cards_per_host": 4,
    "host_link_gb_per_second": 50,
    "ranks_per_host": 4,
}


def test_a_data_sheet_of_a_file_is_a_machine(tmp_path: Path) -> None:
    file = tmp_path / "lab.yaml"
    file.write_text(yaml.safe_dump(SHEET))
    sheet = sheet_of(str(file))
    assert sheet.name == "lab" and {key: getattr(sheet, key) for key in SHEET} == SHEET
    assert {each.name for each in fields(DataSheet)} - {*SHEET} == {"name", "device"}
    curves = modelled_curves(sheet)
    assert curves.machine == "lab" and curves.ranks_per_host == 4 and curves.ranks_to_fill_link == 4
    assert set(MACHINES) == set(DATA_SHEETS), "those that --machine names"
    page = (Path(__file__).parents[2] / "docs" / "placement.md").read_text()
    assert all(re.search(rf"`{key}`|^{key}: ", page, re.MULTILINE) for key in ("name", *SHEET)), (
        "the keys are documented"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device_gb": 3}, "unknown key device_gb in .*: the nearest is device_gib"),
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


def test_curves_are_read_as_they_were_written(tmp_path: Path) -> None:
    curves = replace(machine(), source="measured").corrected({"decode": 1.5})
    path = save_curves(curves, 4, str(tmp_path))
    assert read_curves(path) == curves == load_curves(str(tmp_path))
    more = replace(curves, machine="more ranks")
    save_curves(more, 8, str(tmp_path))
    assert load_curves(str(tmp_path)) == more, "those that the most ranks measured"
    assert load_curves(str(tmp_path / "none")) is None
    assert [each.name for each in path.parent.iterdir() if each.name.endswith("partial")] == []


@pytest.mark.parametrize("change", ["{", "{}", '{"key": {"format": 1}}', '{"key": 3, "curves": {}}'])
def test_a_damaged_file_is_refused_in_one_line(change: str, tmp_path: Path) -> None:
    path = save_curves(machine(), 2, str(tmp_path))
    path.write_text(change)
    with user_error("damaged.*calibrate --renew true"):
        load_curves(str(tmp_path))


def test_curves_of_another_machine_or_version_are_refused_and_not_loaded(tmp_path: Path) -> None:
    path = save_curves(machine(), 2, str(tmp_path))
    content = json.loads(path.read_text())
    for name, value in (("torch", "1.0"), ("host", "elsewhere"), ("cores", 1000), ("format", 0)):
        path.write_text(json.dumps({**content, "key": {**content["key"], name: value}}))
        assert load_curves(str(tmp_path)) is None
        with user_error(rf"differs in {name} \({value} instead of"):
            read_curves(path)
    path.write_text(json.dumps({**content, "curves": {**content["curves"], "layer": [["x", 1]]}}))
    with user_error("damaged"):
        read_curves(path)
    assert curves_file(2, str(tmp_path)) == path != curves_file(3, str(tmp_path))


def test_a_correction_multiplies_an_earlier_one() -> None:
    curves = machine().corrected({"forward": 2.0}).corrected({"forward": 1.5, "collective": 3.0})
    assert curves.factor("forward") == 3.0 and curves.factor("decode") == 1.0
    plain = machine().collective("all_reduce", ranks=4, size_bytes=1e6, hosts=1)
    assert curves.collective("all_reduce", ranks=4, size_bytes=1e6, hosts=1) == pytest.approx(3 * plain)


def test_a_report_gives_errors_by_phase_and_the_ratios_that_correct_them() -> None:
    report = PredictionReport.of(
        {"step": 11.0, "generation": 6.0, "training": 4.0, "gather": 1.0},
        {"step": 10.0, "generation": 5.0, "training": 5.0},
        memory=memory_errors(
            [
                PhaseMemory("actor training", MemoryUse(weights=2.0**29), GPU, ranks=(0, 1)),
                PhaseMemory("critic training", MemoryUse(weights=2.0**30), GPU, ranks=(0, 1)),
                PhaseMemory("scoring", MemoryUse(weights=2.0**30), GPU, ranks=(1,)),
            ],
            [{"training": 1.0, "scoring": 9.0}, {"training": 2.0}],
        ),
    )
    assert report.seconds["generation"].relative == pytest.approx(0.2) and "gather" not in report.seconds
    assert report.metrics()["placement/step_seconds_error"] == pytest.approx(0.1)
    assert report.metrics()["placement/training_memory_error"] == pytest.approx(-0.5), "of the second rank"
    assert report.memory.keys() == {"training"}, "the rank with the peak of scoring has no plan of it"
    assert report.ratios() == pytest.approx(
        {"prefill": 5 / 6, "decode": 5 / 6, "forward": 1.25, "backward": 1.25, "optimizer": 1.25}
    )
    assert report.lines()[-1].startswith("training ") and report.lines()[-1].endswith("-50.0% GiB")
