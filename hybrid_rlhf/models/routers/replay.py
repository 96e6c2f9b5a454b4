"""Routing replay: the training forward sends each token to the experts that computed it while sampling.

Rounding alone can make the routers of sampling and of training choose different experts for a token, whose log-prob
then differs by far more than by rounding; importance ratios of such tokens are noise that may make a run diverge.

Source: Rollout Routing Replay (R3, arXiv 2510.11370): the choice is that of sampling, the weights of the
experts are those that the training router gives to this choice, so its gradient flows to the router. (The routing
replay of GSPO, arXiv 2507.18071, section 5.3, repeats the choice of the old policy's training forward instead.)

transformers' routers choose by a top-k over all experts; some choose groups by other top-ks before it. While a router
runs, a function mode replaces the result of this top-k by the recorded indices, with their values; tokens without a
record keep their choice. This holds in the forward, and where activation checkpointing runs it again in backward.
Losses of routers read logits, which do not change.

Shapes: N tokens as the routers read them, E mixtures, k experts per token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from hybrid_rlhf.models.routers.modules import choices, router_modules


class RouterReplay:
    """Compares the choices of a model's routers with recorded ones, or replaces them."""

    def __init__(self, lm: PreTrainedModel, *, experts: int, replays: bool) -> None:
        """Take a model, the number of experts of each mixture, and whether recorded choices replace the routers'."""
        self._experts = experts
        self._replays = replays
        self._routes: Tensor | None = None
        self._counts: Tensor | None = None
        self._compares = False
        self._would_choose: list[Tensor] | None = None
        self.agreement: Tensor | None = None
        """[2] float64, for the last forward: number of recorded choices that the routers used, and number of recorded
        choices; None if it had no recorded choices."""
        for place, router in enumerate(router_modules(lm)):
            vars(router)["forward"] = self._routed(place, router)

    @contextlib.contextmanager
    def of(self, routes: Tensor | None, counts: Tensor | None = None) -> Iterator[None]:
        """Context of a forward over tokens with recorded choices [N, E, k], -1 where there is none; None without any.
        `counts` [N] is the number of rows that share each token; None: each is of one row.

        The choices stay until the next forward, as checkpointing recomputes layers in backward.
        """
        self._routes = routes
        self._counts = counts
        self._compares = routes is not None
        self.agreement = None if routes is None else torch.zeros(2, dtype=torch.float64, device=routes.device)
        try:
            yield
        finally:
            self._compares = False

    @contextlib.contextmanager
    def forced(self) -> Iterator[list[Tensor]]:
        """Context in which recorded choices always replace those of the routers. The list receives the experts [N, k]
        that each router would have chosen, in the order of the mixtures."""
        before = self._replays
        self._replays = True
        self._would_choose = []
        try:
            yield self._would_choose
        finally:
            self._replays = before
            self._would_choose = None

    def _routed(self, place: int, router: nn.Module) -> Callable[..., Any]:
        """A forward for a router that records or replaces its choices."""
        router_forward = router.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._routes is None:
                return router_forward(*args, **kwargs)
            recorded = self._routes[:, place].long()
            with _Choice(recorded, self._experts) if self._replays else contextlib.nullcontext() as choice:
                output = router_forward(*args, **kwargs)
            if self._would_choose is not None and choice is not None and choice.own is not None:
                self._would_choose.append(choice.own)
            if self._compares:
                self._compare(recorded, choices(output, recorded.shape[1]))
            return output

        return forward

    def _compare(self, recorded: Tensor, used: Tensor) -> None:
        assert self.agreement is not None
        known = recorded >= 0
        same = known & are_chosen(recorded, used)
        counts = 1 if self._counts is None else self._counts[:, None]
        self.agreement += torch.stack([(same * counts).sum(), (known * counts).sum()])


def are_chosen(recorded: Tensor, used: Tensor) -> Tensor:
    """[N, k] bool, true where a recorded expert of a token [N, k] is among those used for it [N, k]."""
    return (recorded[:, :, None] == used[:, None, :]).any(dim=2)


class _Choice(TorchFunctionMode):
    """Replaces the indices of the top-k over all experts by the recorded ones."""

    def __init__(self, recorded: Tensor, experts: int) -> None:
        """Take the recorded indices [N, k], -1 to keep the top-k's own, and the number of experts."""
        super().__init__()
        self._recorded = recorded
        self._experts = experts
        self.own: Tensor | None = None
        """Experts [N, k] that the top-k chose."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`; replace the result of the top-k over all experts."""
        result = func(*arguments, **(named or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return result
        scores: Tensor = arguments[0]
        if scores.shape[-1] != self._experts or result.indices.shape != self._recorded.shape:
            return result
        self.own = result.indices
        index = torch.where(self._recorded < 0, result.indices, self._recorded)
        return torch.return_types.topk((scores.gather(-1, index), index))
