"""How fast a machine computes and communicates: curves of seconds by size, measured or modelled.

A prediction of costs/ is a sum of values of these curves. Why curves and not rates: small sizes cost latency and
large ones bandwidth, and the same formula must hold for both. Between two points a curve is linear in the logarithms of
size and seconds; below its first point it is constant (latency), above its last it is proportional to the size
(bandwidth). Curves never fall: measured points that do are averaged.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from scipy.optimize import isotonic_regression

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "transfer"]
"""What ranks exchange. Bytes are those of the whole tensor: the result of an all-gather, the input of a reduce-scatter;
a transfer is from one rank to another, between hosts what all ranks of a host send or receive at once."""
LinkSource = Literal["measured", "given", "data sheet"]
Kind = Literal["forward", "backward", "optimizer", "prefill", "decode", "weight_sync", "collective"]
"""Kinds of work, each with a factor that corrects its predictions (`MachineCurves.corrected`)."""
Size = TypeVar("Size", float, npt.NDArray[np.float64])


@dataclass(frozen=True)
class Curve:
    """Seconds by size."""

    points: tuple[tuple[float, float], ...] = ()
    """(size, seconds), sizes above 0 and ascending; without points, work that costs nothing."""

    @classmethod
    def of(cls, points: Iterable[Sequence[float]]) -> Curve:
        """A curve through points in any order; where seconds fall, their geometric mean (isotonic regression); at least
        a nanosecond."""
        ordered = sorted((float(size), float(seconds)) for size, seconds in points)
        if not ordered:
            return cls()
        sizes, seconds = zip(*ordered, strict=True)
        levels = isotonic_regression(np.log(np.maximum(seconds, 1e-9))).x
        return cls(tuple(zip(sizes, np.exp(levels).tolist(), strict=True)))

    @classmethod
    def line(cls, latency: float, per_unit: float) -> Curve:
        """latency + size x per_unit, at sizes two apart: between them the curve bends as the sum does, within a few
        percent."""
        return cls.of((2.0**power, latency + per_unit * 2.0**power) for power in range(61))

    def scaled(self, factor: float) -> Curve:
        """A curve with its seconds multiplied by a factor."""
        return Curve(tuple((size, seconds * factor) for size, seconds in self.points))

    def __call__(self, size: Size) -> Size:
        """Seconds of a size, or of each of many; 0 for nothing."""
        if not self.points:
            return size * 0.0
        last, most = self.points[-1]
        between = np.exp(np.interp(np.log(np.maximum(size, 1e-300)), *self._logs))
        seconds = np.where(np.greater(size, last), most * size / last, between)
        return np.where(np.greater(size, 0), seconds, 0.0)[()]  # type: ignore[return-value]

    @cached_property
    def _logs(self) -> npt.NDArray[np.float64]:
        """Logarithms of the sizes and of the seconds."""
        return np.log(np.asarray(self.points).T)


def by_ranks(curve: Curve, ranks: int, *, none: float) -> float:
    """The value for so many ranks, of which the most that were measured stand for more; `none` without points."""
    return curve(min(ranks, curve.points[-1][0])) if curve.points else none


@dataclass(frozen=True)
class Surface:
    """Seconds by two sizes: a curve over the second for each of some values of the first. It rises in both."""

    curves: tuple[tuple[float, Curve], ...]
    """(first size, curve over the second size), first sizes ascending."""

    @classmethod
    def of(cls, points: Iterable[tuple[float, float, float]]) -> Surface:
        """A surface through points (first size, second size, seconds) in any order."""
        by_first: dict[float, list[tuple[float, float]]] = defaultdict(list)
        for first, second, seconds in points:
            by_first[float(first)].append((second, seconds))
        return cls(tuple((first, Curve.of(curve)) for first, curve in sorted(by_first.items())))

    def scaled(self, factor: float) -> Surface:
        """A surface with its seconds multiplied by a factor."""
        return Surface(tuple((first, curve.scaled(factor)) for first, curve in self.curves))

    def __call__(self, first: float, second: Size) -> Size:
        """Seconds of one first size with a second one, or with each of many: between the curves around the first size,
        each at least as high as those before it."""
        sizes = [size for size, _ in self.curves]
        place = bisect.bisect_left(sizes, first)
        below: Size = self.curves[0][1](second)
        for _, curve in self.curves[1:place]:
            below = np.maximum(below, curve(second))
        if place == 0:
            return below
        if place == len(sizes):
            return below * (first / sizes[-1])
        above: Size = np.maximum(below, self.curves[place][1](second))
        share = math.log(first / sizes[place - 1]) / math.log(sizes[place] / sizes[place - 1])
        result: Size = below ** (1 - share) * above**share
        return result


@dataclass(frozen=True, kw_only=True)
class MachineCurves:
    """A kind of machine: its hosts are alike, each with the same number of ranks."""

    machine: str
    source: Literal["measured", "modelled"]
    device: Literal["cpu", "cuda"]
    ranks_per_host: int
    products: Mapping[str, Surface]
    """By dtype of the weights: (elements of the weight, rows of the input). One matrix product of a forward; a backward
    has two, one where the weight is frozen."""
    decode_products: Mapping[str, Surface]
    """The same with inference weights, in a decoding step."""
    attention: Curve
    """By operations (two per multiplication and addition) of one causal attention in a forward."""
    layer: Curve = Curve()
    """By elements of the hidden states (tokens x hidden size): the rest of a layer's forward, such as norms,
    activations and launches."""
    layer_backward: Curve = Curve()
    """The same of a backward."""
    head: Curve = Curve()
    """By logits (tokens x vocabulary): from logits to log-probs, forward and backward together."""
    cache_reads: Curve = Curve()
    """By bytes of keys and values that the attention of a layer reads in a decoding step."""
    decode_layer: Curve = Curve()
    """By elements of the hidden states (rows x hidden size): the rest of a layer in a decoding step."""
    decode_step: Curve = Curve()
    """By rows: scheduling, sampling and the end of completions in a decoding step."""
    copies: Curve
    """By bytes written: copies on the device, as of inference weights."""
    host_link: Curve
    """By bytes: between device and host memory."""
    optimizer: Curve
    """By parameters: an AdamW step on the device, gradient norm included."""
    host_optimizer: Curve
    """By parameters: an AdamW step in host memory."""
    collectives: Mapping[str, Surface]
    """By kind (`Collective`): (ranks, bytes) within a host."""
    between_hosts: Mapping[str, Surface]
    """The same where the ranks are on several hosts, whose ranks use the whole link between hosts."""
    link_gib_per_second: float = 0.0
    """Bandwidth of the link between hosts, one direction of a host; 0: not known."""
    link_source: LinkSource = "data sheet"
    """Where the times between hosts are from."""
    ranks_to_fill_link: float = 1.0
    """Ranks of a host that use its whole link, such as one for each network card; fewer get a part of it."""
    calls: Mapping[str, float] = field(default_factory=dict)
    """Fixed seconds: of a `forward`, a `backward`, an optimizer `step` of an engine; of entering and leaving generation
    (`generation`), of a `prefill` and of each `completion`. Beside passes: of each forward in scoring (`read`) and each
    of its tokens (`read_token`), and of each token in training (`trained_token`)."""
    update: Curve = Curve()
    """By ranks: what an update of a role takes beyond its passes, its step and its collectives."""
    shared_training: Curve = Curve()
    """By ranks: passes in training over those of scoring, which also the slowest rank decides; without points 1."""
    shared_loop: Curve = Curve()
    """By ranks: `loop` on so many ranks over that on one that is slowed as much; without points 1."""
    gathered: Mapping[str, Curve] = field(default_factory=dict)
    """By ranks, in a `forward` and in a `backward`: what ZeRO-3 takes for each layer that it gathers, beside the
    collective."""
    slowdown: Curve = Curve()
    """By ranks of a host that compute at once: seconds of what one rank alone does in a second; without points 1. On a
    CPU, ranks share cores and memory bandwidth."""
    loop: Curve = Curve()
    """By tokens of a rollout, prompts included: what every rank does in a step outside its phases, such as advantages
    and metrics."""
    overlap: float = 0.0
    """Part of a layer's compute time behind which ZeRO-3 hides the gather of the next layer."""
    corrections: Mapping[str, float] = field(default_factory=dict)
    """Factors of predictions by kind of work (`Kind`), from earlier measurements."""

    def factor(self, kind: Kind) -> float:
        """What predictions of a kind of work are multiplied by."""
        return self.corrections.get(kind, 1.0)

    def slowed(self, ranks: float) -> float:
        """How many times longer compute takes while so many ranks of a host compute, in the mean; at least 1."""
        return max(1.0, self.slowdown(ranks))

    def gathered_layer(self, kind: Literal["forward", "backward"], ranks: int) -> float:
        """What ZeRO-3 takes for each layer on so many ranks, beside the collective."""
        return by_ranks(self.gathered.get(kind, Curve()), ranks, none=0.0)

    def corrected(self, ratios: Mapping[str, float]) -> MachineCurves:
        """The curves with predictions of some kinds of work multiplied by measured / predicted."""
        known = {kind: self.corrections.get(kind, 1.0) * ratio for kind, ratio in ratios.items()}
        return replace(self, corrections={**self.corrections, **known})

    def collective(self, kind: Collective, *, ranks: int, size_bytes: Size, hosts: int) -> Size:
        """Seconds of a collective of so many ranks on so many hosts, of a size or of each of many."""
        if ranks <= 1:
            return size_bytes * 0.0
        sizes = size_bytes * self._unfilled(ranks / hosts, hosts)
        return self._surface(kind, hosts)(ranks, sizes) * self.factor("collective")

    def transfer(self, size_bytes: float, *, hosts: int, at_once: int) -> float:
        """Seconds in which a rank sends to another, while so many ranks of its host send as much, and share its link
        to other hosts."""
        size = size_bytes if hosts == 1 else size_bytes * at_once * self._unfilled(at_once, hosts)
        return self.factor("collective") * self._surface("transfer", hosts)(2, size)

    def _unfilled(self, ranks_of_host: float, hosts: int) -> float:
        """The whole link of a host over the part of it that so many of its ranks use."""
        return 1.0 if hosts == 1 else max(1.0, self.ranks_to_fill_link / ranks_of_host)

    def _surface(self, kind: Collective, hosts: int) -> Surface:
        return (self.collectives if hosts == 1 else self.between_hosts)[kind]

    def to_json(self) -> dict[str, Any]:
        """The curves as JSON has them."""
        return {each.name: _plain(getattr(self, each.name)) for each in fields(self)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> MachineCurves:
        """The curves that `to_json` gave.

        Raises:
            KeyError, TypeError, ValueError: when they are damaged.
        """
        return cls(**{each.name: _read(each.type, content[each.name]) for each in fields(cls)})


def _plain(value: Any) -> Any:
    if isinstance(value, Curve):
        return [list(point) for point in value.points]
    if isinstance(value, Surface):
        return [[first, _plain(curve)] for first, curve in value.curves]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def _read(kind: Any, value: Any) -> Any:
    """A field of MachineCurves from JSON, by the text of its type."""
    if kind == "Curve":
        return Curve.of(value)
    if kind == "Mapping[str, Curve]":
        return {name: Curve.of(points) for name, points in value.items()}
    if kind == "Mapping[str, Surface]":
        return {
            name: Surface(tuple((float(first), Curve.of(points)) for first, points in curves))
            for name, curves in value.items()
        }
    return value
