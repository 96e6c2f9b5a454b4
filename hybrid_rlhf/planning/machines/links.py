"""The link between hosts: collectives over it as measured there, or modelled from its bandwidth.

A calibration runs on one host, whose links say nothing about the network. So what ranks of several hosts exchange is
priced by measurements across hosts (`placement: auto` on several hosts), by a bandwidth that the user gives, or by that
of a data sheet, in this order.

Modelled collectives follow the ring's bandwidth cost, (n - 1) / n x bytes / bandwidth, twice for an all-reduce (Thakur,
Rabenseifner, Gropp 2005, IJHPCA 19(1)). A ring has n - 1 steps of latency; a small all-reduce is a reduction and a
broadcast along a tree, of 2 log2(n) steps (NCCL 2.4's double binary trees; Sanders, Speck, Traeff 2009).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from hybrid_rlhf.planning.curves import Collective, LinkSource, MachineCurves, Surface
from hybrid_rlhf.planning.machines.collectives import Times

LINK_ACHIEVED = 0.75
"""Part of a link that collectives reach at large sizes; an assumption."""
HOSTS_LATENCY_SECONDS = 15e-6
"""Latency of a step between hosts."""
ETHERNET_GB_PER_SECOND = 1.25
"""Between hosts without a data sheet: 10 Gb/s Ethernet."""
SIZES = [2.0**power for power in range(8, 40, 2)]
"""Sizes of modelled collectives, in bytes."""
_RANKS = [2.0**power for power in range(10)]
_COSTS: Mapping[Collective, Callable[[float], tuple[float, float]]] = {
    "all_reduce": lambda n: (2 * math.log2(n), 2 * (n - 1) / n),
    "all_gather": lambda n: (min(n - 1, 64), (n - 1) / n),
    "reduce_scatter": lambda n: (min(n - 1, 64), (n - 1) / n),
    "transfer": lambda n: (1.0, 1.0),
}
"""Steps of latency of n ranks, and the part of the bytes that passes a link."""


def modelled_collectives(bytes_per_second: float, latency: float) -> dict[str, Surface]:
    """Collectives of ranks over links of a bandwidth."""
    surfaces: dict[str, Surface] = {}
    for kind, cost in _COSTS.items():
        costs = {ranks: cost(ranks) for ranks in _RANKS}
        surfaces[kind] = Surface.of(
            (ranks, size, steps * latency + moved * size / bytes_per_second)
            for ranks, (steps, moved) in costs.items()
            for size in SIZES
        )
    return surfaces


def with_link(
    curves: MachineCurves, gib_per_second: float, *, source: LinkSource, ranks_to_fill: float = 1.0
) -> MachineCurves:
    """The curves of a machine whose hosts have a link of a bandwidth.

    A collective over hosts also passes the links within them, so it takes no less time than on one host; transfers of
    several ranks at once do not.

    Args:
        curves: those of a host.
        gib_per_second: of the link, one direction of a host.
        source: where the bandwidth is from.
        ranks_to_fill: see MachineCurves.ranks_to_fill_link.
    """
    between = modelled_collectives(gib_per_second * 2**30 * LINK_ACHIEVED, HOSTS_LATENCY_SECONDS)
    for kind, within in curves.collectives.items():
        if kind != "transfer":
            over = between[kind]
            between[kind] = Surface.of(
                (ranks, size, max(over(ranks, size), within(ranks, size))) for ranks in _RANKS for size in SIZES
            )
    return replace(
        curves,
        between_hosts=between,
        link_gib_per_second=gib_per_second,
        link_source=source,
        ranks_to_fill_link=ranks_to_fill,
    )


def measured_collectives(times: Times) -> dict[str, Surface]:
    """Collectives as measured; transfers are those of the most senders."""
    surfaces = {kind: Surface.of(points) for kind, points in times.items()}
    transfers = times["transfer"]
    most = max(senders for senders, _, _ in transfers)
    points = [(2.0, size, seconds) for senders, size, seconds in transfers if senders == most]
    return surfaces | {"transfer": Surface.of(points)}


def with_measured_link(curves: MachineCurves, times: Times) -> MachineCurves:
    """The curves with what collectives.time_collectives measured between hosts."""
    # the largest size is the last
    rates = {ranks: size / seconds for ranks, size, seconds in sorted(times["transfer"])}
    every = max(rates)
    return replace(
        curves,
        between_hosts=measured_collectives(times),
        link_gib_per_second=rates[every] / 2**30,
        link_source="measured",
        ranks_to_fill_link=min(every, max(1.0, rates[every] / rates[1.0])),
    )
