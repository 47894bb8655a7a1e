# SPDX-License-Identifier: Apache-2.0
"""What is captured of a method's calls and when; that it is right to, the tape of `tests/kernels/test_graphs.py` shows."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import contextmanager

import pytest
import torch
from nnfront_kernels import split_k
from tape import TapeCapture

import nnfront as nn
from nnfront.backends.cpu.backend import CpuBackend
from nnfront.backends.cuda import graph_capture as capturer
from nnfront.backends.cuda import graphs
from nnfront.backends.cuda.backend import CudaBackend
from nnfront.backends.cuda.graph_capture import CudaGraphCapture
from nnfront.backends.cuda.graph_safety import ROWS, why_not
from nnfront.backends.lowering import lower
from nnfront.ir import parse
from nnfront.session import Session


@pytest.fixture
def tapes(monkeypatch) -> TapeCapture:
    """A CPU that captures calls as a GPU does, on a tape."""
    found = TapeCapture()
    for name in ("capture", "captures", "why_not_captured"):
        monkeypatch.setattr(CpuBackend, name, getattr(CudaBackend, name))
    monkeypatch.setattr(capturer, "graph_capture_for", lambda device: found)
    return found


SCALE = """
def main[n](x: input float32[n, 3], by: input int64, w: weight float32[3]) -> (float32[n, 3], float32[n, 3]) {
    a: float32[n, 3] = multiply(x, w)
    b: float32[n, 3] = multiply(a, by)
    r: (float32[n, 3], float32[n, 3]) = (a, b)
    return r
}
"""


def scale(w: torch.Tensor | None = None) -> Session:
    return Session(lower(parse(SCALE)), {"w": torch.tensor([1.0, 2.0, 3.0]) if w is None else w})


def test_the_first_call_of_a_kind_runs_the_second_is_captured_and_others_are_replayed(tapes):
    run = scale()["main"]
    for i in range(5):
        x = torch.randn(2, 3)
        a, b = run(x, 4)
        assert torch.equal(a, x * torch.tensor([1.0, 2.0, 3.0]))
        assert torch.equal(b, a * 4)
        assert (len(run.graphs), run.graphs.replays, len(tapes.tapes)) == (int(i > 0), i, int(i > 0))
    assert str(run.graphs) == "main: graphs: 1 of at most 64, calls replayed: 4"


def test_numbers_sizes_and_rows_make_kinds_of_calls(tapes):
    run = scale()["main"]
    for _ in range(2):
        for rows, by in ((2, 4), (2, 5), (3, 4)):
            x = torch.randn(rows, 3)
            assert torch.equal(run(x, by)[1], x * torch.tensor([1.0, 2.0, 3.0]) * by)
    assert len(run.graphs) == 3


def test_calls_of_many_rows_run_as_usual(tapes):
    run = scale()["main"]
    for _ in range(3):
        run(torch.randn(ROWS + 1, 3), 1)
        run(torch.randn(100, 3), 1)
    assert len(run.graphs) == 1


def test_a_result_belongs_to_the_caller(tapes):
    run, x = scale()["main"], torch.ones(1, 3)
    results = [run(x, 2) for _ in range(4)]
    for a, b in results:
        assert torch.equal(b, torch.tensor([[2.0, 4.0, 6.0]]))
        a.zero_()
        b.zero_()


def test_a_graph_that_was_made_in_inference_mode_is_good_outside_of_it_and_the_other_way(tapes):
    for is_inside in (True, False):
        run, x = scale()["main"], torch.ones(1, 3)
        for step in range(4):
            with torch.inference_mode(is_inside == (step < 2)):
                assert torch.equal(run(x, 2)[1], torch.tensor([[2.0, 4.0, 6.0]]))
        assert run.graphs.replays == 3


def test_new_weights_make_graphs_void(tapes):
    session = nn.compile(parse(SCALE)).load({"w": torch.ones(3)})
    run, x = session["main"], torch.ones(1, 3)
    for _ in range(3):
        run(x, 1)
    session.update({"w": torch.full((3,), 7.0)})
    assert [float(run(x, 1)[0][0, 0]) for _ in range(3)] == [7.0] * 3
    assert len(tapes.tapes) == 2


def test_weights_that_were_replaced_are_let_go_of_before_the_next_call(monkeypatch):
    class Forgetful(TapeCapture):
        """A graph has addresses and no tensors, as on a GPU."""

        def capture(self, run: Callable[[], None]) -> Callable[[], None]:
            run()
            return lambda: None

    monkeypatch.setattr(capturer, "graph_capture_for", lambda device: Forgetful())
    session = nn.compile(parse(SCALE)).load({"w": torch.ones(3)})
    for _ in range(3):
        session["main"](torch.ones(1, 3), 1)
    session.update({"w": torch.full((3,), 2.0)})
    old = weakref.ref(session.weights["w"])
    for _ in range(3):
        session["main"](torch.ones(1, 3), 1)
    session.update({"w": torch.full((3,), 3.0)})
    assert old() is None


def test_threads_get_their_own_results(tapes):
    run = scale()["main"]
    wrong = []

    def work(seed: int) -> None:
        x = torch.full((2, 3), float(seed))
        for _ in range(50):
            if not torch.equal(run(x, 2)[0], x * torch.tensor([1.0, 2.0, 3.0])):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert run.graphs.replays >= 100


def test_few_graphs_are_kept_those_that_were_used_last(tapes, monkeypatch):
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
    run = scale()["main"]
    for rows in (1, 2, 3):
        for _ in range(2):
            run(torch.randn(rows, 3), 1)
    assert len(run.graphs) == 2
    run(torch.randn(3, 3), 1)
    assert len(tapes.tapes) == 3
    run(torch.randn(1, 3), 1)
    assert len(tapes.tapes) == 4


def test_an_error_of_a_call_is_the_callers(tapes):
    run = scale()["main"]
    with pytest.raises(nn.errors.RunError, match="expected float32"):
        run(torch.zeros(2, 3, dtype=torch.float64), 1)


@pytest.mark.parametrize(
    "read",
    [lambda x: x.sum().item(), lambda x: x.nonzero(), lambda x: torch.tensor([1.0])],
    ids=["a value", "a size", "a constant"],
)
def test_a_kernel_that_needs_the_host_is_found_when_it_is_captured(tapes, read):
    nn.register_kernel("exp", "reading_exp", lambda run: lambda x: (read(x), torch.exp(x))[1], why="test")
    try:
        text = "def main[n](x: input float32[n]) -> float32[n] { y: float32[n] = exp(x) z: float32[n] = sin(y) return z }"
        run = nn.compile(parse(text)).load({})["main"]
        x = torch.ones(3)
        run(x)
        with pytest.warns(RuntimeWarning, match="main is not captured, its next 100 calls run as usual"):
            assert torch.equal(run(x), x.exp().sin())
        assert torch.equal(run(x), x.exp().sin())
    finally:
        nn.unregister_kernel("reading_exp")


REFUSED = {
    "def main(x: input float32[4], c: input bool) -> float32[4] { y: float32[4] = if c { a: float32[4] = exp(x) yield a } else { yield x } return y }": (
        "the `if` is decided on the host"
    ),
    'def main(x: input float32[4]) -> float32[4] { p: () = print_(x, format="{}") y: float32[4] = exp(x) return y }': (
        "print_ acts on the host"
    ),
    'def main(x: input float32[4]) -> float32[4] { y: float32[4] = extern(x, name="f", out=type(float32[4])) return y }': (
        "extern acts on the host"
    ),
    """def main[n](x: input float32[n, 8], g: weight float32[4, 16, 8], d: weight float32[4, 8, 8], e: input int64[n, 2], w: input float32[n, 2]) -> float32[n, 8] {
        y: float32[n, 8] = moe_mlp(x, g, d, e, w)
        return y
    }""": "moe_mlp_sorted reads a result back to the host",
    """private def step(c: input float32[], x: input float32[]) -> (float32[],) {
        p: bool[] = greater(x, 0.0)
        y: float32[] = if p { yield c } else { yield x }
        r: (float32[],) = (y,)
        return r
    }
    def main[n](c: input float32[], x: input float32[n]) -> (float32[],) {
        y: (float32[],) = scan(c, x, body=@step, out=type((float32[],)), carried=1, sliced=1, axis=0)
        return y
    }""": "scan reads a result back to the host",
}


@pytest.mark.parametrize(("text", "reason"), REFUSED.items(), ids=REFUSED.values())
def test_what_the_host_takes_part_in_is_not_captured(text, reason):
    assert why_not(lower(parse(text)).methods["main"]) == reason


def test_a_kernel_of_ones_own_that_takes_a_cache_is_not_captured():
    layer = "layer(kv_heads=1, head_size=8, dtype=float32, batch=b, max_seq=m)"
    text = f"""def main[b, m](q: input float32[b, 1, 1, 8], c: state {layer}) -> (float32[b, 1, 1, 8], {layer}) {{
        y: (float32[b, 1, 1, 8], {layer}) = attention(q, q, q, c)    # at model.layers.3
        return y
    }}"""
    assert why_not(lower(parse(text), "cuda:sm_90").methods["main"]) == ""
    nn.register_kernel("attention", "own_attention", lambda run: lambda *a: a, why="test", target="cuda")
    try:
        reason = "own_attention at model.layers.3 asks the host how many tokens the cache holds"
        assert why_not(lower(parse(text), "cuda:sm_90").methods["main"]) == reason
    finally:
        nn.unregister_kernel("own_attention", target="cuda")


class Failing(TapeCapture):
    """Fails to capture so many times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.tried = 0
        self.outer = False

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        self.tried += 1
        if self.tried <= self.times:
            run()
            raise torch.OutOfMemoryError("out of memory")
        return super().capture(run)

    def is_capturing(self) -> bool:
        return self.outer


def test_a_capture_that_failed_is_tried_again_after_a_while(tapes, monkeypatch):
    monkeypatch.setattr(graphs, "REST", 5)
    failing = Failing(2)
    monkeypatch.setattr(capturer, "graph_capture_for", lambda device: failing)
    run, x, warned, tries = scale()["main"], torch.ones(1, 3), 0, []
    for _ in range(16):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert torch.equal(run(x, 2)[1], torch.tensor([[2.0, 4.0, 6.0]]))
        warned += len(caught)
        tries.append(failing.tried)
    assert tries == [0, *[1] * 6, *[2] * 6, 3, 3, 3]
    assert warned == 1, "the same reason is said once"
    assert run.graphs.error == ""
    assert run.graphs.replays == 3


def test_inside_of_somebody_elses_capture_calls_run_as_usual(tapes, monkeypatch):
    outer = Failing(0)
    monkeypatch.setattr(capturer, "graph_capture_for", lambda device: outer)
    run, x = scale()["main"], torch.ones(1, 3)
    outer.outer = True
    for _ in range(3):
        run(x, 2)
    assert (run.graphs.replays, len(outer.tapes), run.graphs.error) == (0, 0, "")
    outer.outer = False
    for _ in range(3):
        run(x, 2)
    assert run.graphs.replays == 2


def test_explain_says_what_is_captured_on_a_gpu():
    texts = [text.replace("def main", f"def m{i}") for i, text in enumerate([*REFUSED][:2])]
    text = "\n".join([SCALE, *texts])
    lines = nn.compile(parse(text), target="cuda:sm_90").explain().splitlines()
    assert lines[-3:] == [
        "main: captured, calls of up to 256 rows",
        "m0: not captured, the `if` is decided on the host",
        "m1: not captured, print_ acts on the host",
    ]
    assert "captured" not in nn.compile(parse(text)).explain()


def test_a_session_says_what_it_has_captured(tapes):
    session = scale()
    assert str(session.explain("main")) == (
        "main: there are no special cases\nmain: graphs: 0 of at most 64, calls replayed: 0"
    )


class FakeCuda:
    """The part of torch.cuda that a capturer uses, as a list of what happens."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.current = "main"
        self.events = 0

    def Stream(self, device: torch.device) -> FakeStream:
        return FakeStream("side", self)

    def current_stream(self, device: torch.device) -> FakeStream:
        return FakeStream(self.current, self)

    @contextmanager
    def stream(self, stream: FakeStream):
        before, self.current = self.current, stream.name
        yield
        self.current = before

    def graph_pool_handle(self) -> str:
        return "pool"

    def CUDAGraph(self) -> FakeCuda:
        return self

    def replay(self) -> None:
        self.log.append("replay")

    def Event(self) -> FakeCuda:
        self.events += 1
        return self

    def record(self, stream: FakeStream) -> None:
        self.log.append(f"event on {stream.name}")

    @contextmanager
    def graph(self, graph: FakeCuda, pool: str, stream: FakeStream, capture_error_mode: str):
        self.log.append(f"capture on {stream.name} in {pool}, {capture_error_mode}")
        with self.stream(stream):
            yield
        self.log.append("captured")


class FakeStream:
    def __init__(self, name: str, cuda: FakeCuda) -> None:
        self.name = name
        self.cuda = cuda

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: FakeCuda) -> None:
        self.cuda.log.append(f"{self.name} waits for the last turn")


def test_a_graph_is_captured_on_a_stream_that_libraries_know_already(monkeypatch):
    log: list[str] = []
    lenders: set[object] = set()
    cuda = FakeCuda(log)
    for name in ("Stream", "current_stream", "stream", "graph_pool_handle", "CUDAGraph", "Event", "graph"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    made = CudaGraphCapture(torch.device("cuda", 0))
    with made.turn():
        replay = made.capture(lambda: log.append(f"run on {cuda.current}") or lenders.add(split_k.lender()))
        replay()
    with made.turn():
        replay()
    assert log == [
        "side waits for main",
        "run on side",
        "main waits for side",
        "capture on side in pool, thread_local",
        "run on side",
        "captured",
        "replay",
        "event on main",
        "main waits for the last turn",
        "replay",
        "event on main",
    ]
    assert lenders == {made._workspace}, "what is captured fills no workspace"


def test_there_is_a_capturer_for_gpus_alone_and_none_where_it_is_not_wanted(monkeypatch):
    monkeypatch.setattr(capturer, "CudaGraphCapture", lambda device: "one")
    assert capturer.graph_capture_for(torch.device("cpu")) is None
    assert capturer.graph_capture_for(torch.device("cuda", 0)) == "one"
    for name, value in (("NNFRONT_GRAPHS", "0"), ("NNFRONT_CHECK_NAN", "1")):
        with monkeypatch.context() as context:
            context.setenv(name, value)
            assert capturer.graph_capture_for(torch.device("cuda", 0)) is None
