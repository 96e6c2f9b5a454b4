"""What decides how many completions are decoded at once, and that CUDA graphs are released."""

from __future__ import annotations

import contextlib
import gc
import importlib
import re
import weakref
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_rlhf.generation import GenerationEngine
from hybrid_rlhf.generation.backends import native
from hybrid_rlhf.generation.batching import capacity, workspace
from hybrid_rlhf.generation.batching.capacity import (
    Sequences,
    WorkingMemory,
    rows_and_pages,
    saved_states,
)
from hybrid_rlhf.generation.batching.preparation import PreparationLog, log_compilation
from hybrid_rlhf.generation.batching.workspace import Workspace, _Graphs
from hybrid_rlhf.generation.model.cache import CacheLayout, KVCache
from hybrid_rlhf.runtime.observability import timers
from tests.support.errors import user_error
from tests.support.families import variant
from tests.support.generation import (
    PROMPTS,
    SAMPLED,
    STOP_TOKEN_IDS,
    completions_alone,
    engine_of,
    random_tokens,
    token_ids_of,
)
from tests.support.tiny import tiny_model

CPU = torch.device("cpu")


def test_free_memory_is_what_the_driver_has_after_torch_returned_what_it_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a training step torch's allocator holds most of the memory; what lies in parts is of no use to a cache."""
    now = {"driver": 10, "returned": 60}
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: now.update(driver=10 + now.pop("returned")))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (now["driver"], 200))
    assert capacity.free_bytes(torch.device("cuda", 0)) == 70


LAYOUT = CacheLayout(windows=(None, 100), pages=(1, 3), places_per_page=2, width=1)


@given(
    budget=st.floats(0, 1e6),
    sequences=st.builds(
        lambda page, longest, prompt, wanted, state: Sequences(
            LAYOUT, page, longest, 1 + int(prompt * (longest - 2)), wanted, 64, state
        ),
        page=st.integers(1, 1000),
        longest=st.integers(2, 2000),
        prompt=st.floats(0, 1),
        wanted=st.integers(1, 300),
        state=st.sampled_from([0, 3, 500]),
    ),
    working=st.builds(
        WorkingMemory,
        prefill=st.floats(0, 1e6),
        row=st.floats(0, 1e3),
        table=st.floats(0, 1e3),
        cuda_graphs=st.booleans(),
        reserve=st.just(5e4),
    ),
)
def test_rows_pages_and_all_that_runs_beside_them_fit(
    budget: float, sequences: Sequences, working: WorkingMemory
) -> None:
    prefill, row, table = working.prefill, working.row, working.table

    def taken(rows: int, pages: int) -> float:
        temporary = max(prefill, rows * row)
        if working.cuda_graphs:  # the pool of decoding steps, and the tables once more while one is captured
            temporary = rows * row + max(prefill, rows * (row + table)) + 5e4
        states = (rows + 1 + saved_states(budget, sequences, working, rows)) * sequences.state_bytes
        return pages * sequences.page_bytes + rows * table + temporary + states

    rows, pages = rows_and_pages(budget, sequences, working)
    assert 1 <= rows <= sequences.rows
    if not pages:
        assert taken(1, sequences.longest_pages) > budget * (1 - 1e-9), "not even one would fit"
        assert saved_states(budget, sequences, working, 1) == 0, "saved states take nothing from it"
        return
    assert pages >= sequences.longest_pages and taken(rows, pages) <= budget * (1 + 1e-9)
    if rows < sequences.rows:
        assert taken(rows + 1, sequences.least_pages(rows + 1)) > budget * (1 - 1e-9), "one more would not fit"
    assert pages == sequences.pages(rows) or taken(rows, pages + 1) > budget * (1 - 1e-9)


def test_the_cache_takes_what_memory_leaves_beside_a_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """100,000 bytes, half of them for generation; of these 5,000 for a prefill."""
    monkeypatch.setattr(capacity, "free_bytes", lambda device: 100_000)
    monkeypatch.setattr(native, "working_memory", lambda *_, **__: (WorkingMemory(prefill=5_000), 2048))
    generation = engine_of(stop=STOP_TOKEN_IDS)
    assert token_ids_of(generation.generate(PROMPTS, SAMPLED)) == completions_alone()
    page = 16 * 256  # 2 layers, keys and values of 2 heads of 8 in float32
    assert generation.backend.held.cache.pages == 45_000 // page


def test_the_memory_of_a_prefill_and_of_a_step_is_measured_by_running_them(
    monkeypatch: pytest.MonkeyPatch, read: list[int]
) -> None:
    """With an answer of our own in the place of the allocator's."""
    generation = engine_of(stop=STOP_TOKEN_IDS)
    decoder = generation.backend.decoder
    requests = generation.maker.requests(PROMPTS, SAMPLED)
    monkeypatch.setattr(capacity, "peak_bytes", lambda device, run: (run(), 5000 + 1000 * read[-1])[1])
    found, tokens = capacity.measured_memory(decoder, requests, rows=5, prefill_tokens=100, cuda_graphs=True)
    longest = max(map(len, PROMPTS))
    prompts = min(5, 100 // longest)
    assert read == [prompts * longest] * 2 + [5, 5, 2, 2], "each once to warm up"
    expected = WorkingMemory(prefill=5000 + 1000 * prompts * longest, row=1000, cuda_graphs=True, reserve=2**28)
    assert (found, tokens) == (expected, 100)
    assert capacity.measured_memory(decoder, requests, rows=1, prefill_tokens=1, cuda_graphs=False)[0].row == 6000


def test_a_prefill_that_does_not_fit_is_halved(monkeypatch: pytest.MonkeyPatch, read: list[int]) -> None:
    """The measurement itself ran the largest prefill, before anything could be made smaller."""
    generation = engine_of(stop=STOP_TOKEN_IDS, prefill_tokens=2048)
    requests = generation.maker.requests([random_tokens(2000)], SAMPLED)
    decoder = generation.backend.decoder

    def peak(device: torch.device, run: Any) -> int:
        run()
        if read[-1] > 700:
            raise torch.OutOfMemoryError
        return 1000

    monkeypatch.setattr(capacity, "peak_bytes", peak)
    _, tokens = capacity.measured_memory(decoder, requests, rows=2, prefill_tokens=2048, cuda_graphs=False)
    assert tokens == 512 and [size for size in read if size > 2] == [2000, 2000, 1024, 1024, 512, 512]
    monkeypatch.setattr(native, "working_memory", lambda *_, **__: (WorkingMemory(), tokens))
    read.clear()
    generation.generate([random_tokens(2000)], replace(SAMPLED, n=1, max_new_tokens=2))
    assert read[:4] == [512, 512, 512, 464], "and so are those of generation"
    monkeypatch.setattr(capacity, "peak_bytes", lambda device, run: exec("raise torch.OutOfMemoryError"))
    with pytest.raises(torch.OutOfMemoryError):
        capacity.measured_memory(decoder, requests, rows=2, prefill_tokens=2048, cuda_graphs=False)


def test_a_cache_that_does_not_fit_is_made_smaller(monkeypatch: pytest.MonkeyPatch, log_lines: list[str]) -> None:
    """What is free may lie in parts. A cache that grows and does not fit is replaced, not kept beside the old one."""
    generation = engine_of(stop=STOP_TOKEN_IDS)
    expected = completions_alone()  # with caches that fit
    allocate, asked, most = KVCache.__init__, [], 20

    def limited(self: KVCache, *given: Any, pages: int, **named: Any) -> None:
        asked.append(pages)
        if pages > most:
            raise torch.OutOfMemoryError
        allocate(self, *given, pages=pages, **named)

    monkeypatch.setattr(KVCache, "__init__", limited)
    assert token_ids_of(generation.generate(PROMPTS, SAMPLED)) == expected
    assert asked[0] > most >= asked[-1]
    assert all(later == int(0.9 * earlier) for earlier, later in pairwise(asked))
    assert len([line for line in log_lines if "does not fit into memory" in line]) == len(asked) - 1
    with user_error("the KV cache must hold one completion of 402 tokens"):
        generation.generate([[5, 6]], replace(SAMPLED, max_new_tokens=400))
    most = 10_000
    assert token_ids_of(generation.generate(PROMPTS, SAMPLED)) == expected, "the engine works as before"


def test_calls_of_two_shapes_in_turn_measure_memory_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many short completions, then few long ones: neither has less of everything."""
    generation = engine_of(stop=STOP_TOKEN_IDS)
    backend, measured = generation.backend, []
    budget = backend._budget
    monkeypatch.setattr(
        backend,
        "_budget",
        lambda decoder, requests, *rest: measured.append(len(requests)) or budget(decoder, requests, *rest),
    )
    many, long = replace(SAMPLED, n=20, max_new_tokens=4), replace(SAMPLED, n=1, max_new_tokens=150)
    for _ in range(3):
        generation.generate(PROMPTS[:1], many)
        generation.generate(PROMPTS[1:3], long)
    assert measured == [20, 2]
    assert backend.held.rows >= 20


def test_the_plan_has_the_tables_of_a_workspace_and_the_parts_of_split_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At 4,096 rows of 32k tokens the uniform numbers take 1 GiB, and the parts of 28 heads 1.9 GB."""
    monkeypatch.setitem(capacity._CAPACITY_GRANULE, "cpu", 128)
    for penalty in (1.0, 1.2):
        generation = engine_of(stop=STOP_TOKEN_IDS, max_batch_rows=4)
        sampling = replace(SAMPLED, repetition_penalty=penalty)
        generation.generate(PROMPTS, sampling)
        held = generation.backend.workspace
        tables = [held.rows.integers, held.rows.floats, held.rows.adapter, held.pages, held.slots]
        tables += [] if held.rows.seen is None else [held.rows.seen]
        row = capacity.table_bytes(
            generation.backend.decoder,
            generation.maker.requests(PROMPTS, sampling),
            tables=held.cache.layout.tables,
            capacity_tokens=held.capacity_tokens,
        )
        assert 4 * row == sum(table.nbytes for table in tables)
    asked = []
    monkeypatch.setattr(capacity, "splits_of", lambda *given: asked.append(given) or (8, 128))
    found = capacity.split_bytes(generation.backend.decoder, rows=10, capacity_tokens=1024)
    assert found == 4 * 8 * (8 + 2) * 4 and asked == [(20, 1024)]  # 4 heads of 8 dimensions, 2 KV heads, float32


def test_each_timed_phase_has_its_own_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"peak": 7}
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: now["peak"] * 2**30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2**30)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: now.update(peak=1))
    monkeypatch.setattr(timers, "_EARLIER_PEAKS", timers.defaultdict(int))
    gpu = torch.device("cuda", 0)
    clock = timers.Timers(gpu)
    with clock("generation"):
        now["peak"] = 3
        with clock("environment"):
            now["peak"] = 2
    now["peak"] = 6
    with clock("training"):
        now["peak"] = 5
    with clock("generation"):
        now["peak"] = 2
    assert timers.peak_bytes(gpu, lambda: now.update(peak=4)) == 3 * 2**30
    assert clock.peaks_gib == {"generation": 3.0, "environment": 2.0, "training": 5.0}
    assert timers.peak_memory_gib(gpu) == 7.0, "the peaks of before, between two phases and of a measurement stay"
    assert timers.Timers(torch.device("cpu")).peaks_gib == {}


class FakeGraph:
    """A CUDA graph whose replay does nothing."""

    alive = 0

    def __init__(self) -> None:
        FakeGraph.alive += 1

    def pool(self) -> tuple[int, int]:
        return (0, 1)

    def replay(self) -> None: ...

    def reset(self) -> None:
        FakeGraph.alive -= 1


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Streams that graphs were captured on."""
    captured_on = []

    class FakeStream:
        def __init__(self, device: Any = None) -> None: ...

        def wait_stream(self, other: Any) -> None: ...

        def synchronize(self) -> None: ...

    @contextlib.contextmanager
    def graph(graph: Any, pool: Any = None, stream: Any = None, capture_error_mode: str = "") -> Iterator[None]:
        captured_on.append(stream)
        yield

    main = FakeStream()
    FakeGraph.alive = 0
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(workspace, "_IDLE_STREAMS", workspace.defaultdict(list))
    yield captured_on


def capturing(rows: int = 4) -> Workspace:
    """A workspace with CUDA graphs of two batch sizes."""
    generation = engine_of(stop=STOP_TOKEN_IDS, max_batch_rows=rows)
    generation.generate(PROMPTS[:2], replace(SAMPLED, max_new_tokens=2))
    found, generation.backend.workspace = generation.backend.workspace, None
    found._graphs = _Graphs(found.rows, found.slots, CPU)
    with torch.inference_mode():
        for batch in (1, 2, 1):
            found._graphs(found.step, batch)
    return found


def test_graphs_of_a_workspace_are_captured_on_one_stream_which_the_next_reuses(
    fake_cuda: list[Any], log_lines: list[str]
) -> None:
    """And counted in the log: the first rollout captures about twenty graphs, and looked hung."""
    first, second = capturing(rows=8), capturing()
    lines = [line for line in log_lines if line.startswith("CUDA graphs captured")]
    assert lines and re.fullmatch(r"CUDA graphs captured, one per .*: 1 of at most 3, \d+\.\d s in all", lines[0])
    assert fake_cuda[0] is fake_cuda[1] is not fake_cuda[2] is fake_cuda[3] and FakeGraph.alive == 4
    first.close()
    first.close()
    assert FakeGraph.alive == 2 and first._graphs is None
    third = capturing()
    assert fake_cuda[4] is fake_cuda[0], "cuBLAS keeps a workspace for each stream that it has seen"
    third.close(), second.close()
    assert FakeGraph.alive == 0


def test_batch_sizes_are_captured_between_runs_where_a_run_must_not_capture(fake_cuda: list[Any]) -> None:
    """While another thread uses the device, its synchronizations would invalidate a capture."""
    held = capturing(rows=16)
    held.capture_in_steps(captures=False)
    with torch.inference_mode():
        for batch in (12, 4, 12, 2):
            held._graphs(held.step, batch)
    assert len(fake_cuda) == 2 and held._graphs.missing == {4, 12}
    held.pages.fill_(1)  # of the last run, if it was stopped
    for _ in range(2):
        held.capture_missing()
    assert [*held._graphs._captured] == [1, 2, 4, 12] and not held._graphs.missing and not held.pages.any()
    assert len({id(stream) for stream in fake_cuda}) == 1 and len(fake_cuda) == 4


def test_lines_of_preparation_are_few(log_lines: list[str]) -> None:
    now = [100.0]
    log = PreparationLog("graphs", most=7, clock=lambda: now[0])
    for _ in range(7):
        log.add(2.0)
        now[0] += 2.0
    assert log_lines == [
        "graphs: 1 of at most 7, 2.0 s in all",
        "graphs: 4 of at most 7, 8.0 s in all",
        "graphs: 7 of at most 7, 14.0 s in all",
    ]


def test_kernels_that_are_compiled_are_counted(monkeypatch: pytest.MonkeyPatch, log_lines: list[str]) -> None:
    knobs = importlib.import_module("triton").knobs
    monkeypatch.setattr(knobs.compilation, "listener", None)
    log_compilation.cache_clear()
    log_compilation()
    log_compilation()
    times = knobs.CompileTimes(ir_initialization=0, lowering_stages=[("ttir", 1_500_000)], store_results=0)
    for hit in (True, False):
        knobs.compilation.listener(src=None, metadata={}, metadata_group={}, times=times, cache_hit=hit)
    assert log_lines == ["GPU kernels compiled: 1, 1.5 s in all"]
    log_compilation.cache_clear()


def test_capturing_a_graph_changes_no_state_of_a_row(fake_cuda: list[Any]) -> None:
    """The step that runs before it would otherwise count twice in recurrent layers."""
    generation = engine_of(variant("qwen3_5"), STOP_TOKEN_IDS, max_batch_rows=4)
    generation.generate(PROMPTS[:2], replace(SAMPLED, max_new_tokens=2))
    held = generation.backend.workspace
    held.slots.copy_(torch.arange(1, 5))
    stores = (held.states.conv, held.states.memory)
    for store in stores:
        store.normal_()
    before = [store[:, 1:].clone() for store in stores]
    with torch.inference_mode():
        _Graphs(held.rows, held.slots, CPU)(held.step, 3)
    assert held.slots.tolist() == [1, 2, 3, 4]
    for store, states in zip(stores, before, strict=True):
        assert torch.equal(store[:, 1:], states)


def test_a_workspace_that_nobody_holds_is_freed_at_once(fake_cuda: list[Any]) -> None:
    """Not by the garbage collector, some time later: CUDA graphs must not refer to what holds them."""
    gc.disable()
    try:
        found = capturing()
        dropped = weakref.ref(found)
        del found
        assert dropped() is None
    finally:
        gc.enable()


def test_an_engine_closes_its_workspace_unless_it_keeps_its_backend(fake_cuda: list[Any]) -> None:
    for keeps in (False, True):
        held = capturing()
        backend = GenerationEngine.from_model(tiny_model()).backend
        backend.workspace = held
        generation = GenerationEngine(backend, keeps_backend=keeps)
        generation.close()
        assert generation.is_closed and (held._graphs is None) != keeps


def test_a_weight_sync_keeps_the_workspace_of_the_same_decoder_only(fake_cuda: list[Any]) -> None:
    held, backend = capturing(), GenerationEngine.from_model(tiny_model()).backend
    backend.workspace = held
    backend.sync_weights(backend.decoder)
    assert backend.workspace is held and held._graphs
    backend.sync_weights(GenerationEngine.from_model(tiny_model()).backend.decoder)
    assert backend.workspace is None and held._graphs is None
    backend.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(iter(backend.run([])))
