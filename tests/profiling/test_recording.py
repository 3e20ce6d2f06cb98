"""Recordings of small models: what is seen, where it comes from, and what torch's own tools make of it."""

from __future__ import annotations

import pickle
import time

import pytest
import torch
from torch import nn
from torch.cuda import _memory_viz

from cs336_systems.profiling import categories as names
from cs336_systems.profiling.allocations import read_history
from cs336_systems.profiling.categories import category_of, largest_by_category
from cs336_systems.profiling.memory import ALLOCATOR, collection_paused
from cs336_systems.profiling.origins import ModulePaths, named_call, statement
from cs336_systems.profiling.recording import (
    ALLOCATOR_HISTORY,
    GRADIENT,
    OPTIMIZER_STATE,
    TRACKED_TENSORS,
    AllocationRecorder,
)
from cs336_systems.profiling.usage import BACKWARD, FORWARD, OPTIMIZER, cuda_memory_of, tracked_memory_of
from cs336_systems.training.optimizer import adamw
from cs336_systems.transformer import Transformer, TransformerConfig

CONFIG = TransformerConfig(
    vocab_size=64, context_length=32, d_model=32, d_ff=64, num_layers=2, num_heads=2, attn="naive"
)
QUADRATIC = 3 * 2 * 32 * 32 * 4
"""Bytes of the scores of three sequences."""


def trainer(model, device, autocast=False):
    """What makes so many training steps, and returns their recording; one without an update has been made."""
    optimizer = adamw(model, learning_rate=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    tokens = torch.randint(64, (3, 32), device=device)
    model(tokens, targets=tokens).backward()
    optimizer.zero_grad()

    def train(steps):
        with AllocationRecorder(model, device, optimizer) as recorder:
            for _ in range(steps):
                recorder.phase(FORWARD)
                with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=autocast):
                    loss = model(tokens, targets=tokens)
                recorder.phase(BACKWARD)
                loss.backward()
                del loss
                recorder.phase(OPTIMIZER)
                optimizer.step()
                optimizer.zero_grad()
        return recorder.recording

    return train


def trained(model, device, steps=1, autocast=False):
    """The recording of training steps."""
    return trainer(model, device, autocast)(steps)


class TwoLayers(nn.Module):
    """x of 8 rows → 16 → 4 columns."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def test_every_tensor_is_seen_from_its_begin_to_its_end():
    model, x = TwoLayers(), torch.randn(8, 8)
    with AllocationRecorder(model, "cpu") as recorder, torch.no_grad():
        recorder.phase(FORWARD)
        model(x)
    history = read_history(recorder.recording)
    assert recorder.recording.method == TRACKED_TENSORS
    # Two outputs of linear layers and that of relu; each is freed.
    assert [each.bytes for each in history.allocations] == [8 * 16 * 4, 8 * 16 * 4, 8 * 4 * 4]
    assert [each.origin.module for each in history.allocations if each.origin] == ["first", "", "second"]
    assert [each.origin.operation for each in history.allocations if each.origin] == [
        "aten.addmm",
        "aten.relu",
        "aten.addmm",
    ]
    assert all(each.end is not None for each in history.allocations)
    parameters = sum(each.nbytes for each in model.parameters())
    assert history.standing_bytes == parameters + x.nbytes
    assert history.peak()[1] == parameters + x.nbytes + 2 * 8 * 16 * 4


def test_views_and_changes_in_place_are_no_allocations():
    model, x = TwoLayers(), torch.randn(8, 8)
    with AllocationRecorder(model, "cpu") as recorder:
        recorder.phase(FORWARD)
        x.t().reshape(4, 16).add_(1)
    history = read_history(recorder.recording)
    assert [each.bytes for each in history.allocations] == [x.nbytes]  # what reshape copies


def test_gradients_and_states_have_owners():
    model = Transformer(CONFIG)
    history = read_history(trained(model, "cpu"))
    parameters = sum(each.nbytes for each in model.parameters())
    owned = {owner: [e for e in history.allocations if e.owner == owner] for owner in (GRADIENT, OPTIMIZER_STATE)}
    assert sum(each.bytes for each in owned[GRADIENT] if each.phase == BACKWARD) == parameters
    averages = sum(each.bytes for each in owned[OPTIMIZER_STATE] if each.bytes > 4)
    assert averages == 2 * parameters
    assert {each.phase for each in owned[OPTIMIZER_STATE]} == {OPTIMIZER}


def test_what_the_backward_allocates_comes_from_the_forward():
    history = read_history(trained(Transformer(CONFIG), "cpu"))
    backward = [each for each in history.allocations if each.phase == BACKWARD]
    of_softmax = [each for each in backward if each.origin and "softmax_backward" in each.origin.operation]
    modules = [each.origin.module for each in of_softmax if each.origin]
    assert modules == ["", "layers.1.attn.attend", "layers.0.attn.attend"]
    other = sum(each.bytes for each in backward if category_of(each) == names.OTHER)
    assert other < 0.01 * sum(each.bytes for each in backward)


def test_blocks_that_are_recomputed_are_told_apart():
    model = Transformer(CONFIG, checkpoint_every=1)
    history = read_history(trained(model, "cpu"))
    again = [each for each in history.allocations if each.phase == BACKWARD and category_of(each) == names.SCORES]
    forward = [each for each in again if each.origin and "Backward0)" not in each.origin.operation]
    assert {each.origin.module for each in forward if each.origin} == {"layers.0.attn.attend", "layers.1.attn.attend"}
    assert "_naive" in {each.origin.function for each in forward if each.origin}


@pytest.mark.parametrize(("autocast", "width"), [(False, 4), (True, 2)])
def test_the_largest_of_each_category_of_a_transformer(autocast, width):
    largest = largest_by_category(read_history(trained(Transformer(CONFIG), "cpu", autocast=autocast)))
    sizes = {category: each.bytes for (category, phase), each in largest.items() if phase == FORWARD}
    rows = 3 * 32
    assert sizes[names.SCORES] == sizes[names.SOFTMAX] == QUADRATIC * width // 4
    assert sizes[names.ATTENTION_OUTPUT] == rows * 32 * width
    assert sizes[names.FFN] == rows * 64 * width
    assert sizes[names.NORM] == sizes[names.RESIDUAL] == sizes[names.EMBEDDING] == rows * 32 * 4
    assert sizes[names.LOSS] == rows * 64 * 4
    assert (names.PARAMETER_COPIES in sizes) == autocast
    assert largest[names.GRADIENT, BACKWARD].bytes == largest[names.OPTIMIZER_STATE, OPTIMIZER].bytes == 64 * 32 * 4


def test_a_second_step_begins_with_the_state_and_ends_as_it_began():
    model = Transformer(CONFIG)
    history = read_history(trained(model, "cpu", steps=2))
    usage = tracked_memory_of(history)
    parameters = sum(each.nbytes for each in model.parameters())
    assert usage.method == TRACKED_TENSORS
    assert 3 * parameters <= usage.allocated_bytes < 3.2 * parameters
    assert history.curve()[-1] == usage.allocated_bytes
    assert usage.held_bytes is not None
    assert usage.peak_bytes >= usage.allocated_bytes + usage.held_bytes
    assert usage.reserved_bytes is None


def test_what_is_held_without_a_graph_is_unknown():
    model = TwoLayers()
    with AllocationRecorder(model, "cpu") as recorder, torch.no_grad():
        recorder.phase(FORWARD)
        model(torch.randn(8, 8))
    assert tracked_memory_of(read_history(recorder.recording)).held_bytes is None


def test_torchs_own_tools_read_the_snapshot():
    snapshot = pickle.loads(pickle.dumps(trained(Transformer(CONFIG), "cpu").snapshot))
    text = _memory_viz.trace(snapshot)
    assert "Device 0" in text
    assert text.count("= MEM[") == sum(entry["action"] == "alloc" for entry in snapshot["device_traces"][0])


def test_results_and_gradients_are_those_without_a_recording():
    model, x = TwoLayers(), torch.randn(8, 8)
    expected = torch.autograd.grad(model(x).sum(), model.first.weight)
    with AllocationRecorder(model, "cpu") as recorder:
        recorder.phase(FORWARD)
        found = torch.autograd.grad(model(x).sum(), model.first.weight)
    torch.testing.assert_close(found, expected)


def test_an_exception_leaves_nothing_behind():
    model = TwoLayers()
    recorder = AllocationRecorder(model, "cpu")
    with pytest.raises(ZeroDivisionError), recorder:
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match="after the block has ended without an exception"):
        _ = recorder.recording
    assert not torch.nn.modules.module._global_forward_hooks


def test_shared_modules_have_the_path_of_their_user():
    model = Transformer(CONFIG)
    paths, seen = ModulePaths(model), []
    rope = model.get_submodule("layers.0.attn.rope")
    with paths.followed():
        handle = rope.register_forward_pre_hook(lambda *arguments: seen.append(paths.current))
        model(torch.zeros(1, 4, dtype=torch.long))
    handle.remove()
    assert seen == [f"layers.{number}.attn.rope" for number in (0, 0, 1, 1)]
    assert paths.current == ""


def test_a_named_call_is_found_in_stacks_under_its_name():
    call = named_call("a name | of | three", "/home/model.py", 41)
    assert call(statement, (), {}) == ("/home/model.py", 41, "a name | of | three")


def test_what_is_written_in_c_may_import_in_a_named_call():
    # The first operation of a kind that a dispatch mode sees imports torch in this way; so does this, at every call.
    assert named_call("a name", "/home/model.py", 41)(time.strptime, ("2016", "%Y"), {}).tm_year == 2016


@pytest.mark.gpu
class TestOnAGpu:
    def test_the_allocators_history_says_the_same_as_its_counters(self, requested_bytes):
        # The trainer has tokens and the optimizer's state, which must live until the last count.
        train = trainer(Transformer(CONFIG, device="cuda"), "cuda")
        with collection_paused():
            before = requested_bytes()
            recording = train(steps=2)
            after = requested_bytes()
        assert recording.method == ALLOCATOR_HISTORY
        history = read_history(recording)
        assert [phase.name for phase in history.phases] == 2 * [FORWARD, BACKWARD, OPTIMIZER]
        assert history.curve()[-1] - recording.before_bytes == after - before > 0

    def test_categories_are_those_of_a_cpu(self):
        sizes = {}
        for device in ("cpu", "cuda"):
            largest = largest_by_category(read_history(trained(Transformer(CONFIG, device=device), device)))
            sizes[device] = {key: each.bytes for key, each in largest.items() if key[1] == FORWARD}
        wanted = [(name, FORWARD) for name in (names.SCORES, names.SOFTMAX, names.FFN, names.RESIDUAL, names.EMBEDDING)]
        # On CUDA SwiGLU's w1 x and w3 x lie side by side in one tensor.
        expected = sizes["cpu"] | {(names.FFN, FORWARD): 2 * sizes["cpu"][names.FFN, FORWARD]}
        assert [sizes["cuda"].get(key) for key in wanted] == [expected[key] for key in wanted]

    def test_what_the_backward_allocates_comes_from_the_forward(self):
        history = read_history(trained(Transformer(CONFIG, device="cuda"), "cuda"))
        backward = [each for each in history.allocations if each.phase == BACKWARD]
        modules = {each.origin.module for each in backward if each.origin}
        assert {"layers.0.attn.attend", "layers.1.attn.attend", "layers.0.ffn"} <= modules
        assert sum(each.bytes for each in backward if each.owner == GRADIENT) == sum(
            each.numel() * 4 for each in Transformer(CONFIG).parameters()
        )

    def test_a_recording_takes_no_more_memory_than_the_work(self):
        model = Transformer(CONFIG, device="cuda")
        tokens = torch.randint(64, (3, 32), device="cuda")

        def forward():
            return model(tokens, targets=tokens)

        forward().backward()
        model.zero_grad()
        usage = cuda_memory_of(forward, lambda loss: loss.backward(), None, torch.device("cuda"))
        model.zero_grad()
        assert usage.method == ALLOCATOR
        assert usage.reserved_bytes >= usage.peak_bytes >= usage.allocated_bytes + usage.held_bytes > 0
        with AllocationRecorder(model, "cuda") as recorder:
            recorder.phase(FORWARD)
            loss = forward()
            recorder.phase(BACKWARD)
            loss.backward()
        assert read_history(recorder.recording).peak()[1] == pytest.approx(usage.peak_bytes, rel=0.1)
