"""Compiled CPU kernels, each against the same in plain torch, and the compilation where something is in its way."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from torch import Tensor

from hybrid_rlhf.generation.model.layers import InferenceLinear
from hybrid_rlhf.generation.ops import compiled, cpu_kernels
from tests.generation.references import exact_attention

needs_compiler = pytest.mark.usefixtures("compiled_kernels")
DTYPES = [torch.float32, torch.bfloat16]
BLOCK_TOKENS = 16


@pytest.fixture(scope="module")
def compiled_kernels() -> None:
    """Compiled here, not when tests are collected."""
    if not cpu_kernels.available():
        pytest.skip("the CPU kernels cannot be compiled here")


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """Work is shared, as it is outside tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """Of results that are rounded to the dtype once."""
    return {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 8e-3, "atol": 1e-4}


class Cache:
    """Random queries and cache, and attention over them by softmax over gathered keys, in float64."""

    def __init__(
        self, lengths: list[int], *, kv_heads: int, group: int, d: int, dtype: torch.dtype, block_tokens: int = 16
    ) -> None:
        self.most = -(-max(lengths) // block_tokens)
        count = len(lengths) * self.most + 3
        self.keys, self.values = (torch.randn(count, block_tokens, kv_heads, d).to(dtype) for _ in "kv")
        self.queries = torch.randn(len(lengths), kv_heads * group, d).to(dtype)
        self.blocks = torch.randperm(count)[: len(lengths) * self.most].view(len(lengths), -1).int()
        self.positions = torch.tensor(lengths) - 1

    def attend(self, rows: slice = slice(None), **options: Any) -> Tensor:
        """By the kernel, of some rows."""
        queries, blocks, positions = self.queries[rows], self.blocks[rows], self.positions[rows]
        return cpu_kernels.paged_attention(queries, self.keys, self.values, blocks, positions, scale=0.2, **options)

    def expected(self, **options: Any) -> Tensor:
        """[B, A, D] float64."""
        rows = enumerate(self.positions.tolist())
        return exact_attention(self.queries, self.keys, self.values, self.blocks, rows, scale=0.2, **options)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("d", "group", "block_tokens", "given"),
    [
        *((d, group, 16, "") for d, group in [(8, 1), (16, 3), (20, 8), (64, 3), (80, 4), (96, 1), (128, 8), (256, 4)]),
        *((48, 3, size, each) for size in (5, 16, 64) for each in ("window", "softcap", "bias", "sinks", "all")),
    ],
)
def test_attention_over_blocks_of_ragged_rows(
    d: int, group: int, block_tokens: int, given: str, dtype: torch.dtype
) -> None:
    cache = Cache([1, 16, 17, 40, 41, 333], kv_heads=2, group=group, d=d, dtype=dtype, block_tokens=block_tokens)
    options = {"window": 40, "softcap": 2.0, "bias": torch.randn(2 * group, 400), "sinks": torch.randn(2 * group)}
    options = {name: value for name, value in options.items() if given in (name, "all")}
    torch.testing.assert_close(cache.attend(**options).double(), cache.expected(**options), **tolerance(dtype))


@needs_compiler
def test_attention_does_not_read_blocks_before_the_window_or_past_the_position() -> None:
    cache = Cache([100, 64], kv_heads=1, group=2, d=32, dtype=torch.float32)
    expected = cache.expected(window=20)
    cache.blocks[0, :5] = -1
    cache.blocks[1, 4:] = 10**6
    cache.blocks[1, :2] = -7
    torch.testing.assert_close(cache.attend(window=20).double(), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(IndexError, match="block"):
        cache.attend(window=21 + 16)


@needs_compiler
def test_a_row_does_not_depend_on_threads_or_other_rows() -> None:
    cache = Cache([20_000, 1, 129, 700], kv_heads=1, group=2, d=32, dtype=torch.float32)
    together = cache.attend()
    torch.testing.assert_close(together.double(), cache.expected(), rtol=1e-5, atol=1e-5)
    torch.set_num_threads(1)
    assert torch.equal(cache.attend(), together)
    for row in range(4):
        alone = slice(row, row + 1)
        assert torch.equal(cache.attend(alone), together[alone])


@needs_compiler
def test_attention_with_masked_keys_large_scores_and_nan() -> None:
    cache = Cache([200, 300], kv_heads=1, group=2, d=16, dtype=torch.float32)
    bias = torch.zeros(2, 400)
    bias[:, :180] = -torch.inf
    bias[:, 181] = 1e4
    torch.testing.assert_close(cache.attend(bias=bias).double(), cache.expected(bias=bias), rtol=1e-5, atol=1e-5)
    bias[0] = -torch.inf
    out = cache.attend(bias=bias)
    assert out[:, 0].isnan().all() and out[:, 1].isfinite().all(), "no key at all, as torch's softmax"
    cache.keys[cache.blocks[1, 2].long(), 3, 0, 5] = torch.nan
    assert cache.attend()[1].isnan().all() and cache.attend()[0].isfinite().all()


@needs_compiler
@pytest.mark.parametrize("in_float32", [False, True])
@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("width", [64, 576, 100])
def test_norms(width: int, dtypes: tuple[torch.dtype, torch.dtype], in_float32: bool) -> None:
    dtype, weight_dtype = dtypes
    x, delta, weight = torch.randn(70, width).to(dtype), torch.randn(70, width).to(dtype), torch.randn(width)
    weight = weight.to(weight_dtype)

    def expected(rows: Tensor) -> Tensor:
        """Two roundings, or one."""
        normed = rows.double() * (rows.double().square().mean(dim=-1, keepdim=True) + 1e-5).rsqrt()
        normed = normed if in_float32 else normed.to(dtype).double()
        return (normed * weight.double()).to(dtype)

    added, normed = cpu_kernels.add_norm(x, delta, weight, 1e-5, in_float32=in_float32)
    assert torch.equal(added, x + delta)
    torch.testing.assert_close(normed, expected(added), **tolerance(dtype))
    alone = cpu_kernels.norm(x, weight, 1e-5, in_float32=in_float32)
    torch.testing.assert_close(alone, expected(x), **tolerance(dtype))
    heads = torch.randn(5, 6, width).to(dtype)[:, 1:4]
    of_heads = cpu_kernels.norm(heads, weight, 1e-5, in_float32=in_float32)
    torch.testing.assert_close(of_heads, expected(heads), **tolerance(dtype))


@needs_compiler
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (33, 7), (100, 64), (576, 1536)])
def test_products_equal_those_in_float64(outputs: int, inputs: int) -> None:
    """For full and partial tiles, and more rows than pass over the same weights; rows do not depend on each other."""
    weight, bias, x = torch.randn(outputs, inputs), torch.randn(outputs), torch.randn(205, inputs)
    packed, expected = cpu_kernels.pack(weight), x.double() @ weight.double().t() + bias
    whole = cpu_kernels.linear(x, packed, outputs, bias)
    torch.testing.assert_close(whole.double(), expected, rtol=1e-5, atol=1e-5 * inputs**0.5)
    for rows in (0, 1, 7, 8, 9, 32):
        part = cpu_kernels.linear(x[205 - rows :], packed, outputs, bias)
        torch.testing.assert_close(part, whole[205 - rows :], rtol=0, atol=0)
    by_columns = x.t().contiguous().t()
    without = cpu_kernels.linear(by_columns, packed, outputs, None)
    torch.testing.assert_close(without, (expected - bias).float(), rtol=1e-5, atol=1e-5 * inputs**0.5)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dequantised_weights_are_those_of_training_bit_for_bit(dtype: torch.dtype) -> None:
    """For partial blocks of weights and of scales, a part of a larger result, and bfloat16 values in float32."""
    for outputs, inputs in ((3, 2), (33, 70), (576, 512)):
        codes, state = quantize_4bit(
            torch.randn(outputs, inputs, dtype=dtype), quant_type="nf4", compress_statistics=True
        )
        expected = dequantize_4bit(codes, state)
        for as_dtype in (dtype, torch.float32):
            result = torch.full((outputs + 2, inputs), 7.0, dtype=as_dtype)
            cpu_kernels.dequantise(codes, state, result[1:-1])
            assert torch.equal(result[1:-1], expected.to(as_dtype))
            assert (result[[0, -1]] == 7).all()


@needs_compiler
@pytest.mark.parametrize("by_kernel", [False, True])
def test_packed_products_by_kernel_and_by_onednn(by_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "multiplies_float32", lambda: by_kernel)
    weight, bias, x = torch.randn(70, 48), torch.randn(70), torch.randn(5, 48)
    product = InferenceLinear(weight, bias, pack=True)
    assert product.weight.is_mkldnn != by_kernel
    torch.testing.assert_close(product(x), torch.nn.functional.linear(x, weight, bias), rtol=1e-5, atol=1e-5)


@needs_compiler
def test_other_dtypes_are_refused() -> None:
    with pytest.raises(TypeError, match="float16"):
        cpu_kernels.norm(torch.zeros(2, 4, dtype=torch.float16), torch.ones(4), 1e-5, in_float32=False)


@needs_compiler
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_threads_are_those_of_torchs_openmp_runtime() -> None:
    """A second runtime would have threads of its own, which wait for work on the cores of torch's."""
    torch_library = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))))
    of_torch = ctypes.cast(torch_library.omp_get_max_threads, ctypes.c_void_p).value
    assert mapped_file(compiled.openmp_parallel()) == mapped_file(of_torch)
    assert b"omp.so" not in Path(compiled.load(cpu_kernels._SOURCE)._name).read_bytes()


def mapped_file(address: int) -> str:
    """The file that is mapped at an address of this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= address < last:
            return line.split()[-1]
    raise AssertionError(hex(address))


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache, and nothing loaded."""
    monkeypatch.setenv("HOME", str(tmp_path))
    cpu_kernels._library_or_none.cache_clear()
    yield tmp_path
    cpu_kernels._library_or_none.cache_clear()


def test_without_a_compiler_the_log_says_what_to_do(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not cpu_kernels.available() and not cpu_kernels.available()
    assert len(log_lines) == 1 and "no C++ compiler (no-such-compiler): install g++" in log_lines[0]
    with pytest.raises(RuntimeError, match="available"):
        cpu_kernels.norm(torch.zeros(1, 2), torch.ones(2), 1e-5, in_float32=False)


@needs_compiler
def test_an_error_of_the_compiler_is_logged(fresh: Path, monkeypatch: pytest.MonkeyPatch, log_lines: list[str]) -> None:
    source = fresh / "wrong.cpp"
    source.write_text("int f() { return nothing; }")
    monkeypatch.setattr(cpu_kernels, "_SOURCE", source)
    assert not cpu_kernels.available()
    assert "int f() { return nothing; }" in log_lines[0], "the compiler's own words"
    assert not list((fresh / ".cache/hybrid_rlhf/kernels").iterdir())


@needs_compiler
def test_a_damaged_library_is_compiled_again_and_a_read_only_home_is_no_obstacle(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = fresh / "small.cpp"
    source.write_text('extern "C" int one() { return 1; }')
    assert compiled.load(source)["one"]() == 1
    (path,) = (fresh / ".cache/hybrid_rlhf/kernels").iterdir()
    path.unlink()
    path.write_text("no library")
    assert compiled.load(source)["one"]() == 1
    (fresh / "file").touch()
    monkeypatch.setenv("HOME", str(fresh / "file"))
    source.write_text('extern "C" int one() { return 2; }')
    assert compiled.load(source)["one"]() == 2
