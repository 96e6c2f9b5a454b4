"""What prices are of: seconds of a piece of work, and the ranks that do it together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hybrid_rlhf.planning.curves import Collective, MachineCurves


@dataclass(frozen=True)
class Work:
    """Seconds of a piece of work on each of its ranks."""

    compute: float = 0.0
    """Slowed where ranks share a host's cores."""
    wire: float = 0.0
    """Collectives and links, during which the rank's processor is free."""

    def __add__(self, other: Work) -> Work:
        return Work(self.compute + other.compute, self.wire + other.wire)

    def __mul__(self, times: float) -> Work:
        return Work(self.compute * times, self.wire * times)

    @property
    def seconds(self) -> float:
        """Both, one after the other."""
        return self.compute + self.wire


class Span(NamedTuple):
    """Ranks as prices see them: layouts share prices."""

    ranks: int
    hosts: int
    most_on_a_host: int

    def exchange(self, curves: MachineCurves, kind: Collective, size_bytes: float) -> float:
        """Seconds of a collective of these ranks."""
        return curves.collective(kind, ranks=self.ranks, size_bytes=size_bytes, hosts=self.hosts)
