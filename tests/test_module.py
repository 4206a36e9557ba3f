"""What compile() gives back: an nn.Module that threads, processes, the profiler and torch's own compilers can
handle."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aerogel
from tests import counts
from tests.small_models import Small, right, runs

Ran = Callable[[str, int], None]


def test_results_alias_nothing(small: Any) -> None:
    _, fast, _ = small
    a, b = torch.randn(1, 3, 64, 64), torch.randn(1, 3, 64, 64)
    first = fast(a)
    kept = first.clone()
    fast(b)
    assert torch.equal(first, kept)
    assert torch.equal(fast(a), kept), "same input, same bits"


def test_whatever_the_arena_held_changes_nothing(small: Any, ran: Ran) -> None:
    """Filled with NaN or other bytes before each call, sizes alternating, the answer before kept and looked
    at again."""
    _, fast, _ = small
    torch.manual_seed(counts.seed())
    inputs = [torch.randn(n, 3, 64, w) for n, w in ((1, 64), (2, 64), (1, 80))]
    wanted = [fast(x) for x in inputs]
    calls = counts.count("workspaces")
    ran("workspaces", calls)
    order = torch.randint(len(inputs), (calls,)).tolist()
    before, kept = order[0], fast(inputs[order[0]])
    for i, now in enumerate(order):
        for arena in runs(fast).memory.arenas:
            arena.buffer[:] = (0xFF, 0x00, 0x7F)[i % 3]
        got = fast(inputs[now])
        assert torch.equal(got, wanted[now]), f"call {i} of {order}"
        assert torch.equal(kept, wanted[before]), f"call {i} wrote into the answer of the one before"
        before, kept = now, got


def test_every_size_has_a_program_of_its_own(small: Any) -> None:
    """Answers would be right without: torch takes a call that a program does not fit."""
    _, fast, _ = small
    for width in (64, 80, 96):
        fast(torch.randn(1, 3, 64, width))
    for key, program in runs(fast).programs.items():
        assert program.shapes[fast.input_names[0]] == key[2]


def test_many_threads_on_one_module(small: Any, ran: Ran) -> None:
    _, fast, _ = small
    seconds = counts.count("32 threads, seconds")
    ran("32 threads, seconds", seconds)
    inputs = [torch.randn(1 + i % 3, 3, 64, 64 + 16 * (i % 2)) for i in range(16)]
    wanted = [fast(x) for x in inputs]
    wrong = []
    ends = time.monotonic() + seconds

    def work(start: int) -> None:
        i = 0
        while i < 3 or time.monotonic() < ends:
            j, i = (start + i) % len(inputs), i + 1
            if not torch.equal(fast(inputs[j]), wanted[j]):
                wrong.append(j)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_compiled_module_is_for_inference(small: Any) -> None:
    _, fast, x = small
    with pytest.raises(aerogel.AerogelError, match="cannot train"):
        fast.train()
    with pytest.raises(aerogel.AerogelError, match="requires grad"):
        fast(x.clone().requires_grad_())
    with pytest.raises(aerogel.AerogelError, match="stays where it was compiled"):
        fast.half()
    with pytest.raises(aerogel.AerogelError, match="stays where it was compiled"):
        fast.to(torch.float64)
    assert fast.eval() is fast
    with pytest.raises(aerogel.ShapeError, match="dimension 1; the model takes 3"):
        fast(torch.randn(1, 4, 64, 64))
    with pytest.raises(aerogel.ShapeError, match="dimensions"):
        fast(torch.randn(3, 64, 64))
    with pytest.raises(aerogel.ShapeError, match="float64 on cpu; the model was compiled for"):
        fast(x.double())
    with pytest.raises(aerogel.ShapeError, match=r"called with other arguments|called as f"):
        fast(x, x)
    with pytest.raises(aerogel.UnsupportedModel, match=r"call model\.eval\(\) first"):
        aerogel.compile(Small().train(), x, plan=fast.plan)
    with pytest.raises(aerogel.AerogelError, match="methods are"):
        aerogel.compile(Small().eval(), x, methods=["magic"])


def test_state_dict_is_the_originals_and_loads_where_masks_agree(small: Any) -> None:
    model, _, x = small
    fast = aerogel.compile(copy.deepcopy(model), x, tune="off")
    state = fast.state_dict()
    assert state.keys() == model.state_dict().keys()
    tuned = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter *= 1.25
    fast.load_state_dict(tuned.state_dict())
    right(tuned, fast, x)
    state = {k: v.clone() for k, v in state.items()}
    state["stem.0.0.weight"] += 1
    with pytest.raises(aerogel.AerogelError, match="has other zeros"):
        fast.load_state_dict(state)


def test_copies_answer_alike(small: Any) -> None:
    _, fast, x = small
    wanted = fast(x)
    assert torch.equal(copy.deepcopy(fast)(x), wanted)
    assert torch.equal(pickle.loads(pickle.dumps(fast))(x), wanted)


def _child(fast: aerogel.Compiled, x: Tensor, answers: Any) -> None:
    answers.put(fast(x).numpy())


def test_another_process_answers_alike(small: Any) -> None:
    _, fast, x = small
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=_child, args=(fast, x, answers))
    process.start()
    got = answers.get(timeout=120)
    process.join()
    assert not fast(x).isnan().any(), "sending a module away leaves it whole"
    assert torch.equal(torch.from_numpy(got), fast(x))


def test_another_thread_count_warns_once(small: Any) -> None:
    model, _, x = small
    before = torch.get_num_threads()
    fast = aerogel.compile(model, x, tune="off")
    try:
        torch.set_num_threads(before + 1)
        with pytest.warns(UserWarning, match=r"tuned for .* threads, running on"):
            fast(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            right(model, fast, x)
    finally:
        torch.set_num_threads(before)


def test_the_profiler_shows_layers_by_name(small: Any) -> None:
    _, fast, x = small
    if not hasattr(torch.autograd, "_profiler_enabled"):
        pytest.skip("this torch does not say whether it is being profiled")
    wanted = fast(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert torch.equal(fast(x), wanted)
    names = {event.key for event in profile.key_averages()}
    assert {"aerogel::direct stem.0.0", "aerogel::pool stem.1", "aerogel::direct blocks.1.conv2.0"} <= names


def test_a_torch_that_hides_its_profiler_still_runs(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, fast, x = small
    wanted = fast(x)
    monkeypatch.delattr(torch.autograd, "_profiler_enabled", raising=False)
    assert torch.equal(fast(x), wanted)


def test_torch_compile_and_export_around_a_compiled_module(small: Any) -> None:
    _, fast, x = small

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = fast

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x * 2) + 1  # type: ignore[no-any-return]

    around = Around().eval()
    wanted = around(x)
    exported = torch.export.export(around, (x,)).module()
    assert torch.equal(exported(x), wanted)
    compiled = torch.compile(around, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(x), wanted)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_opcheck(small: Any) -> None:
    _, fast, x = small
    torch.library.opcheck(torch.ops.aerogel.run.default, ([x], fast._number))
