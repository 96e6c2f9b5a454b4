"""How much of a GPU is used: closed forms, and silence where its figures are not known."""

from __future__ import annotations

import pytest
import torch

from hybrid_rlhf.runtime.observability.profiling import decode_roofline, describe_peaks, model_flops_utilisation

GPU, CPU = torch.device("cuda"), torch.device("cpu")


def named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)


def test_shares_of_a_known_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, "NVIDIA H100 80GB HBM3")
    found = model_flops_utilisation(operations=6e9 * 989e3, seconds=12.0, ranks=2, device=GPU)
    assert found == {"perf/mfu": pytest.approx(0.25)}
    named(monkeypatch, "NVIDIA H100 PCIe")
    found = model_flops_utilisation(operations=6e9 * 756e3, seconds=12.0, ranks=2, device=GPU)
    assert found == {"perf/mfu": pytest.approx(0.25)}, "the slower part, which has a name of its own"


@pytest.mark.parametrize("rows", [1, 16, 1024])
def test_decoding_is_compared_with_what_bounds_it(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Of products of N weights in bfloat16: 2 N bytes per step, 2 N operations per row. At few rows an ideal step
    takes the time of the bytes, beyond peak / bandwidth rows that of the operations, and the share is 1 in both."""
    named(monkeypatch, "NVIDIA H200")
    weights, peak, bandwidth = 5e8, 989e12, 4800e9
    ideal = max(2 * weights / bandwidth, 2 * weights * rows / peak)
    found = decode_roofline(read_bytes=2 * weights, operations=2 * weights * rows, seconds=ideal, device=GPU)
    assert found["perf/decode_roofline"] == pytest.approx(1.0)
    bound = "perf/decode_mfu" if rows > peak / bandwidth else "perf/decode_bandwidth"
    assert found[bound] == pytest.approx(1.0)
    assert found["perf/decode_mfu"] / found["perf/decode_bandwidth"] == pytest.approx(rows * bandwidth / peak)


def test_the_log_says_which_peak_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, "NVIDIA H200")
    line = describe_peaks(GPU)
    assert line is not None and "data sheet of H200: 989 TFLOP/s in bfloat16, 4,800 GB/s" in line


def test_nothing_is_said_of_what_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, "Some GPU")
    for device in (GPU, CPU):
        assert model_flops_utilisation(operations=1, seconds=1, ranks=1, device=device) == {}
        assert decode_roofline(read_bytes=1, operations=1, seconds=1, device=device) == {}
        assert describe_peaks(device) is None
    named(monkeypatch, "H200")
    found = decode_roofline(read_bytes=0, operations=0, seconds=1, device=GPU)
    assert found == {}, "a model without a layout counts nothing"
