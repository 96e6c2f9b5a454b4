"""The link between hosts, as `calibrate --hostfile` measures it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid_rlhf.planning.machines.datasheets import DATA_SHEETS, modelled_curves
from hybrid_rlhf.planning.machines.links import with_measured_link
from tests.support.hosts import Network

pytestmark = [pytest.mark.hosts, pytest.mark.faults]
DELAY_SECONDS = 0.02
GIGABIT = 1e9 / 8


def test_ranks_on_two_hosts_measure_the_cable_between_them(hosts: Network, tmp_path: Path) -> None:
    """Whatever else the machine does, nothing is faster than the cable; a plan took the network of a data sheet."""
    with hosts.long_cable("node2", delay_ms=1e3 * DELAY_SECONDS, mbit=1000):
        times = hosts.link_times(tmp_path)
    curves = with_measured_link(modelled_curves(DATA_SHEETS["h100"]), times)
    assert curves.link_source == "measured"
    smallest = min(seconds for _, size, seconds in times["transfer"] if size == 256)
    assert 2 * DELAY_SECONDS < smallest, "there and back"
    assert curves.collective("all_gather", ranks=2, size_bytes=64, hosts=2) > DELAY_SECONDS
    assert 0.2 < curves.link_gib_per_second * 2**30 / GIGABIT < 1
