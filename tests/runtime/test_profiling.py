"""How much of a GPU is used: closed forms, and silence where its figures are not known."""

from __future__ import annotations

import pytest
import torch

from hybrid_rlhf.runtime.observability.profiling import decode_roofline, model_flops_utilisation

GPU, CPU = torch.device("cuda"), torch.device("cpu")


def named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)


def test_shares_of_a_known_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, "NVIDIA H100 80GB HBM3")
    found = model_flops_utilisation(operations=6e9 * 989e3, seconds=12.0, ranks=2, device=GPU)
    assert found == {"perf/mfu": pytest.approx(0.25)}
    found = decode_roofline(read_bytes=3.35e12, seconds=4.0, device=GPU)
    assert found == {"perf/decode_roofline": pytest.approx(0.25)}


def test_nothing_is_said_of_what_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, "Some GPU")
    for device in (GPU, CPU):
        assert model_flops_utilisation(operations=1, seconds=1, ranks=1, device=device) == {}
        assert decode_roofline(read_bytes=1, seconds=1, device=device) == {}
    named(monkeypatch, "H200")
    assert decode_roofline(read_bytes=0, seconds=1, device=GPU) == {}, "a model without a layout counts nothing"
