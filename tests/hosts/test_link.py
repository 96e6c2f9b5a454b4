"""The link between hosts, as `calibrate --hostfile` measures it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.hosts import Network

pytestmark = [pytest.mark.hosts, pytest.mark.faults]
DELAY_SECONDS = 0.02
GIGABIT = 1 / 8


def test_ranks_on_two_hosts_measure_the_cable_between_them(hosts: Network, tmp_path: Path) -> None:
    """Whatever else the machine does, nothing is faster than the cable; a plan took the network of a data sheet."""
    with hosts.long_cable("node2", delay_ms=1e3 * DELAY_SECONDS, mbit=1000):
        rate, latency = hosts.link(tmp_path)
    assert 1e6 * DELAY_SECONDS <= latency < 5e6 * DELAY_SECONDS
    assert 0.1 < rate / GIGABIT < 1
