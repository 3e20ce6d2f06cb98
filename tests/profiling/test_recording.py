"""Recordings of small models: which storages are allocated and freed when, and by what."""

from __future__ import annotations

import gc
import pickle

import pytest
import torch
from torch import nn
from torch.cuda import _memory_viz

from cs336_systems.kernels.garbage import collection_paused
from cs336_systems.profiling import MemoryRecorder, MemoryUsage, measure_memory
from cs336_systems.profiling.memory import ALLOCATOR
from cs336_systems.profiling.recording import GRADIENTS, OPTIMIZER_STATE, PARAMETERS, TRACKED_TENSORS
from cs336_systems.profiling.regions import SCORES, SOFTMAX
from cs336_systems.training.optimizer import adamw
from cs336_systems.transformer import Transformer, TransformerConfig

pytest.importorskip("pandas")
CONFIG = TransformerConfig(
    vocab_size=64, context_length=32, d_model=32, d_ff=64, num_layers=2, num_heads=2, attn="naive"
)
PARAMETER_BYTES = 4 * CONFIG.parameters()


def recorded(device="cpu", *, steps=1, autocast=False, **options):
    """The recorder after training steps, and the tensors that live at its end."""
    model = Transformer(CONFIG, device=device, **options)
    optimizer = adamw(model, learning_rate=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    tokens = torch.randint(64, (3, 32), device=device)
    with collection_paused(), MemoryRecorder(model, device, optimizer) as recorder:
        for _ in range(steps):
            recorder.phase("forward")
            with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=autocast):
                loss = model(tokens, targets=tokens)
            recorder.phase("backward")
            loss.backward()
            del loss
            recorder.phase("optimizer")
            optimizer.step()
            optimizer.zero_grad()
    return recorder, (model, optimizer, tokens)


def largest(table):
    """The largest allocation of each category and phase."""
    return table.groupby(["category", "phase"]).bytes.max().to_dict()


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


@pytest.fixture
def x():
    return torch.randn(8, 8)


class TestSmallModel:
    def test_storages_from_their_allocation_to_their_free(self, model, x):
        with MemoryRecorder(model, "cpu", region_of=lambda path, module: type(module).__name__) as recorder:
            recorder.phase("forward")
            with torch.no_grad():
                model(x)
        table = recorder.table()
        columns = ["bytes", "module", "operation", "category", "begin", "end"]
        assert [tuple(row) for row in table[table.begin > 0][columns].itertuples(index=False)] == [
            (8 * 16 * 4, "0", "aten.addmm", "Linear", 1, 3),
            (8 * 16 * 4, "1", "aten.relu", "ReLU", 2, 5),
            (8 * 4 * 4, "2", "aten.addmm", "Linear", 4, 6),
        ]
        assert table.statement[table.begin > 0].str.startswith("test_recording.py:").all()
        before = {PARAMETERS: sum(each.nbytes for each in model.parameters()), "other before": x.nbytes}
        timeline = recorder.timeline()
        assert timeline.loc[0].to_dict() == before | {"Linear": 0, "ReLU": 0}
        assert timeline.loc[4].to_dict() == before | {"Linear": 8 * 4 * 4, "ReLU": 8 * 16 * 4}
        total = timeline.sum(axis=1)
        assert (total.idxmax(), total.max()) == (2, sum(before.values()) + 2 * 8 * 16 * 4)
        assert recorder.phases == [("forward", 0)]
        assert recorder.usage() == MemoryUsage(sum(before.values()), None, 2 * 8 * 16 * 4, None, TRACKED_TENSORS)

    def test_views_and_in_place_operations_allocate_nothing(self, model, x):
        with MemoryRecorder(model, "cpu") as recorder:
            x.t().reshape(4, 16).add_(1)
        assert [each.bytes for each in recorder.allocations if each.begin] == [x.nbytes]  # reshape's copy

    def test_an_input_that_is_freed(self, model):
        x = torch.randn(77)
        with MemoryRecorder(model, "cpu") as recorder:
            x = torch.relu(x)
        assert [(each.begin, each.end) for each in recorder.allocations if each.bytes == 308] == [(0, 2), (1, None)]

    def test_temporaries_of_the_optimizer(self, model, x):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1, foreach=False)
        model(x).sum().backward()
        with MemoryRecorder(model, "cpu", optimizer) as recorder:
            recorder.phase("optimizer")
            optimizer.step()
        table = recorder.table()
        assert set(table.category[table.begin > 0]) == {"optimizer temporaries"}
        assert table[table.category == GRADIENTS].begin.eq(0).all()

    def test_gradients_are_the_same_and_nothing_stays(self, model, x):
        def gradient():
            return torch.autograd.grad(model(x).sum(), model[0].weight)[0]

        expected = gradient()
        recorder, kept = MemoryRecorder(model, "cpu"), []

        def interrupted():
            with recorder:
                torch.testing.assert_close(gradient(), expected)
                kept.append(x + 1)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            interrupted()
        events = recorder.events
        kept.clear()
        gc.collect()
        assert recorder.events == events > 0
        assert not torch.nn.modules.module._global_forward_hooks
        with pytest.raises(ValueError, match=r"phases must include 'forward'; got \[\]"):
            recorder.usage()


@pytest.fixture(scope="module")
def step():
    """The recorder of one step."""
    return recorded()[0]


class TestTransformer:
    @pytest.mark.parametrize(("autocast", "width"), [(False, 4), (True, 2)])
    def test_the_largest_allocation_of_each_category(self, autocast, width):
        sizes = largest(recorded(autocast=autocast)[0].table())
        forward = {category: size for (category, phase), size in sizes.items() if phase == "forward"}
        rows = 3 * 32
        assert forward[SCORES] == forward[SOFTMAX] == 3 * 2 * 32 * 32 * width
        assert forward["attention: values"] == forward["projections"] == rows * 32 * width
        assert forward["mlp"] == rows * 64 * width
        assert forward["norm"] == forward["residual"] == forward["embedding"] == rows * 32 * 4
        assert forward["head and loss"] == rows * 64 * 4
        assert ("copies of parameters" in forward) == autocast
        assert sizes[GRADIENTS, "backward"] == sizes[OPTIMIZER_STATE, "optimizer"] == 64 * 32 * 4
        other = sizes.get(("other", "backward"), 0)
        assert other <= 4  # the loss's own gradient

    def test_owners(self, step):
        table = step.table()
        sums = table.groupby(["owner", "phase"]).bytes.sum()
        assert sums[PARAMETERS, ""] >= PARAMETER_BYTES
        assert sums[GRADIENTS, "backward"] == PARAMETER_BYTES
        assert 2 * PARAMETER_BYTES <= sums[OPTIMIZER_STATE].sum() < 2.1 * PARAMETER_BYTES  # averages and step counts

    def test_the_backward_allocates_for_operations_of_the_forward(self, step):
        table = step.table()
        softmax = table[table.operation == "aten._softmax_backward_data (SoftmaxBackward0)"]
        assert list(softmax.module) == ["layers.1.attn.attend", "layers.0.attn.attend"]
        assert set(softmax.category) == {SOFTMAX}
        assert softmax.statement.str.match(r"naive\.py:\d+ _naive").all()

    def test_recomputed_blocks(self):
        table = recorded(checkpoint_every=1)[0].table()
        again = table[(table.phase == "backward") & (table.category == SCORES)]
        forward = again[~again.operation.str.contains("Backward")]
        assert set(forward.module) == {"layers.0.attn.attend", "layers.1.attn.attend"}

    def test_a_second_step_has_the_optimizers_state(self):
        recorder, _ = recorded(steps=2)
        usage, timeline = recorder.usage(), recorder.timeline()
        assert 3 * PARAMETER_BYTES <= usage.before_bytes < 3.2 * PARAMETER_BYTES
        assert timeline.iloc[-1].sum() == usage.before_bytes
        assert usage.peak_bytes >= usage.held_bytes > 0
        assert [name for name, _ in recorder.phases] == 2 * ["forward", "backward", "optimizer"]
        held = timeline.sum(axis=1)[recorder.phases[4][1]] - usage.before_bytes
        assert usage.held_bytes == held

    def test_torchs_tools_read_the_snapshot(self, step):
        snapshot = pickle.loads(pickle.dumps(step.snapshot()))
        (trace,) = snapshot["device_traces"]
        text = _memory_viz.trace(snapshot)
        assert "Active Memory Timeline" in _memory_viz.trace_plot(snapshot)
        assert text.count("= MEM[") == sum(entry["action"] == "alloc" for entry in trace) == len(step.allocations)
        frees = [entry for entry in trace if entry["action"] == "free_completed"]
        assert len(frees) == sum(each.end is not None for each in step.allocations)
        assert {SCORES, GRADIENTS} <= {entry.get("category") for entry in trace}


@pytest.mark.gpu
class TestOnAGpu:
    def test_the_live_bytes_are_those_of_the_allocator(self, requested_bytes):
        with collection_paused():
            before = requested_bytes()
            recorder, _kept = recorded("cuda", steps=2)
            assert recorder.timeline().iloc[-1].sum() == requested_bytes() - before

    def test_categories_are_those_of_a_cpu(self):
        sizes = {device: largest(recorded(device)[0].table()) for device in ("cpu", "cuda")}
        names = (SCORES, SOFTMAX, "residual", "embedding", "projections")
        assert [sizes["cuda"][name, "forward"] for name in names] == [sizes["cpu"][name, "forward"] for name in names]
        # On CUDA SwiGLU's w1 x and w3 x are the halves of one tensor.
        assert sizes["cuda"]["mlp", "forward"] == 2 * sizes["cpu"]["mlp", "forward"]

    def test_the_peak_is_near_the_allocators(self):
        model, tokens = Transformer(CONFIG, device="cuda"), torch.randint(64, (3, 32), device="cuda")

        def forward():
            return model(tokens, targets=tokens)

        forward().backward()
        model.zero_grad()
        usage = measure_memory(forward, lambda loss: loss.backward(), device="cuda")
        model.zero_grad()
        assert usage.method == ALLOCATOR
        with MemoryRecorder(model, "cuda") as recorder:
            recorder.phase("forward")
            loss = forward()
            recorder.phase("backward")
            loss.backward()
        assert recorder.usage().peak_bytes == pytest.approx(usage.peak_bytes, rel=0.2)
