"""Operations are attributed to the regions of a model, forward and backward, by ranges that exist only in a block."""

from __future__ import annotations

import collections

import pytest
import torch
from torch import nn

from cs336_systems import ranges as named
from cs336_systems.attention import attention
from cs336_systems.profiling import ModuleRanges, read_trace, record_trace, region_of_module
from cs336_systems.profiling.regions import ATTENTION_STEPS, RegionTracker
from cs336_systems.profiling.trace import ELSEWHERE
from cs336_systems.transformer import Transformer, TransformerConfig

pytest.importorskip("pandas")
LAYERS = 2
SIZES = {"vocab_size": 32, "context_length": 16, "d_model": 16, "d_ff": 32, "num_layers": LAYERS, "num_heads": 2}
TOKENS = torch.arange(32).reshape(2, 16)
PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm")


def make_model(attn="naive", **options):
    return Transformer(TransformerConfig(**SIZES, attn=attn), **options)


@pytest.fixture
def calls_of(tmp_path):
    """The operators of a profiled step."""

    def calls_of(model, **options):
        with ModuleRanges(model, nvtx=False, **options) as ranges:

            def step():
                with ranges.phase("forward"):
                    loss = model(TOKENS, targets=TOKENS)
                with ranges.phase("backward"):
                    loss.backward()
                model.zero_grad()

            record_trace(step, tmp_path / "trace.json", device="cpu")
        return read_trace(tmp_path / "trace.json")

    return calls_of


def counted(calls, *names):
    """How many of these operators each phase and region has."""
    found = calls[calls.name.isin(names or PRODUCTS)]
    return collections.Counter(zip(found.phase, found.region, strict=True))


class TestAttribution:
    def test_operators_of_naive_attention_and_its_transformer(self, calls_of):
        calls = calls_of(make_model())
        each = {"projections": 4, "mlp": 3, "attention: scores": 1, "attention: values": 1}
        expected = {("forward", region): LAYERS * count for region, count in each.items()}
        expected |= {("backward", region): 2 * LAYERS * count for region, count in each.items()}
        assert counted(calls) == expected | {("forward", "head and loss"): 1, ("backward", "head and loss"): 2}
        for operator, phase, region, count in (
            ("aten::_softmax", "forward", "attention: softmax", LAYERS),
            ("aten::_softmax_backward_data", "backward", "attention: softmax", LAYERS),
            ("aten::embedding", "forward", "embedding", 1),
            ("aten::embedding_dense_backward", "backward", "embedding", 1),
            ("aten::nll_loss_backward", "backward", "head and loss", 1),
            ("aten::rms_norm", "forward", "norm", 2 * LAYERS + 1),
        ):
            assert counted(calls, operator) == {(phase, region): count}, operator
        assert counted(calls, "aten::masked_fill_")["backward", "attention: mask"] == LAYERS
        assert counted(calls, "aten::flip")["forward", "rope"] == 2 * LAYERS
        # Sums of gradients, and the loss's own gradient, which is 1.
        lost = set(calls.name[(calls.region == ELSEWHERE) & (calls.phase == "backward")])
        computed = {name for name in lost if name.startswith("aten::") and "detach" not in name}
        sums = {"aten::add", "aten::add_"}
        assert computed & sums
        assert computed <= sums | {f"aten::{name}" for name in ("ones_like", "empty_like", "empty_strided", "fill_")}

    @pytest.mark.parametrize("attn", ["tiled", "sdpa"])
    def test_fused_attention_is_one_region(self, calls_of, attn):
        calls = calls_of(make_model(attn))
        assert {"forward", "backward"} <= set(calls.phase[calls.region == "attention"])
        assert not calls.region.str.startswith("attention: ").any()

    def test_recomputation_has_the_regions_of_the_forward(self, calls_of):
        once, twice = counted(calls_of(make_model())), counted(calls_of(make_model(checkpoint_every=1)))
        # Recomputation stops when it has what the backward needs: without the last product of a block.
        assert twice["backward", "mlp"] > once["backward", "mlp"]
        assert twice["backward", "attention: scores"] == once["backward", "attention: scores"] + LAYERS
        assert twice["forward", "mlp"] == once["forward", "mlp"]

    def test_any_module_with_its_own_regions(self, calls_of):
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))

            def forward(self, tokens, targets):
                return self.layers(tokens.float()).square().mean()

        calls = calls_of(Model(), region_of=lambda path, module: path if "." in path else None)
        # The first layer's input needs no gradient.
        products = {("forward", "layers.0"): 1, ("forward", "layers.2"): 1}
        assert counted(calls) == products | {("backward", "layers.0"): 1, ("backward", "layers.2"): 2}
        assert counted(calls, "aten::threshold_backward") == {("backward", "layers.1"): 1}
        assert set(counted(calls, "aten::mean")) == {("forward", "model")}


class TestRanges:
    @pytest.fixture
    def opened(self, monkeypatch):
        """Depth and label of each NVTX range, in order; all must be closed at the end."""
        opened, depth = [], [0]

        def push(label):
            opened.append((depth[0], label))
            depth[0] += 1

        def pop():
            depth[0] -= 1

        monkeypatch.setattr(torch.cuda.nvtx, "range_push", push)
        monkeypatch.setattr(torch.cuda.nvtx, "range_pop", pop)
        yield opened
        assert depth == [0]

    def test_nvtx_ranges(self, opened):
        model = make_model()
        with ModuleRanges(model, nvtx=True) as ranges:
            with ranges.phase("forward"):
                loss = model(TOKENS, targets=TOKENS)
            with ranges.phase("backward"):
                loss.backward()
        assert opened[:3] == [(0, "[phase] forward"), (1, "[model] "), (2, "[embedding] token_embeddings")]
        labels = [label for _, label in opened]
        for layer in range(LAYERS):
            # The blocks share one RoPE, whose ranges have the path below the caller.
            assert labels.count(f"[rope] layers.{layer}.attn.rope") == 2
            assert (5, f"[attention: softmax] layers.{layer}.attn.attend") in opened
            assert f"[attention: softmax] layers.{layer}.attn.attend backward" in labels
        backward = labels[labels.index("[phase] backward") :]
        assert backward.index("[mlp] layers.1.ffn backward") < backward.index("[mlp] layers.0.ffn backward")

    def test_a_forward_that_raises_leaves_no_range_open(self, opened):
        model = make_model()
        with ModuleRanges(model, nvtx=True) as ranges:
            with pytest.raises(IndexError):
                model(TOKENS + 99, targets=TOKENS)
            with ranges.phase("forward"):
                model(TOKENS, targets=TOKENS)
        assert [label for depth, label in opened if depth == 0] == ["[model] ", "[phase] forward"]

    def test_hooks_and_ranges_exist_only_in_the_block(self, opened):
        model = make_model()
        expected = model(TOKENS, targets=TOKENS)
        expected.backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        assert opened == []
        model.zero_grad()
        with ModuleRanges(model, nvtx=True):
            assert all(len(block._forward_hooks) == 1 for block in model.layers)
            with pytest.raises(RuntimeError, match="named ranges are already being recorded"):
                ModuleRanges(model).__enter__()
            assert all(len(block._forward_hooks) == 1 for block in model.layers)
            loss = model(TOKENS, targets=TOKENS)
            loss.backward()
        assert torch.equal(loss, expected)
        assert all(torch.equal(each.grad, one) for each, one in zip(model.parameters(), gradients, strict=True))
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        assert named._open_range is None

    @pytest.mark.slow
    @pytest.mark.usefixtures("compile_afresh")
    def test_compiled_attention_has_no_ranges(self):
        q, seen = torch.randn(1, 2, 8, 4), []
        expected = attention(q, q, q, causal=True, impl="naive")

        def open_range(name):
            seen.append(name)
            return torch.profiler.record_function(name)

        with named.ranges_opened_by(open_range):
            # Compiled with fullgraph=True.
            torch.testing.assert_close(attention(q, q, q, causal=True, impl="compiled"), expected)
            assert seen == []
            attention(q, q, q, causal=True, impl="naive")
        assert seen == list(ATTENTION_STEPS)

    def test_nodes_created_outside_of_the_model_have_no_range(self, opened):
        model = nn.Linear(4, 4)
        with ModuleRanges(model, nvtx=True) as ranges, ranges.phase("forward"):
            model(torch.ones(2, 4, requires_grad=True) * 2).sum().backward()
        assert {label for _, label in opened} == {"[phase] forward", "[model] ", "[model]  backward"}

    def test_nodes_that_outlive_the_graph_have_no_hooks(self, opened):
        model, x = nn.Linear(4, 4), torch.ones(2, 4)
        with ModuleRanges(model, nvtx=True) as ranges, ranges.range("outer"):
            kept = model(x).sum()  # keeps the AccumulateGrad nodes alive
            kept.backward()
        assert opened[:2] == [(0, "[outer] "), (1, "[model] ")]
        count = len(opened)
        model(x).sum().backward()
        assert len(opened) == count

    @pytest.mark.usefixtures("compile_afresh")
    def test_compiled_modules_have_no_ranges_inside(self, opened):
        model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        with ModuleRanges(model, lambda path, module: type(module).__name__, nvtx=True):
            torch.testing.assert_close(compiled(x), model[1](model[0](x)))
        assert [label for _, label in opened] == ["[Linear] 0", "[ReLU] 1"]  # of the eager calls


class TestRegions:
    @pytest.mark.parametrize("hook_all", [True, False])
    def test_shared_modules_have_the_path_below_their_caller(self, hook_all):
        model, seen = make_model(), []
        tracker = RegionTracker(model, hook_all=hook_all)
        with tracker:
            handle = model.get_submodule("layers.0.attn.rope").register_forward_pre_hook(
                lambda *args: seen.append(tracker.current)
            )
            model(TOKENS)
        handle.remove()
        assert seen == [("rope", f"layers.{layer}.attn.rope") for layer in (0, 0, 1, 1)]
        assert tracker.current == ("", "")

    def test_modules_of_this_library(self):
        found = collections.defaultdict(set)
        for path, module in make_model().named_modules():
            found[region_of_module(path, module)].add(type(module).__name__)
        assert found == {
            "model": {"Transformer"},
            "embedding": {"Embedding"},
            "residual": {"TransformerBlock"},
            "norm": {"RMSNorm"},
            "attention": {"MultiHeadAttention", "Attention"},
            "projections": {"Linear"},
            "rope": {"RotaryEmbedding"},
            "mlp": {"SwiGLU"},
            "head and loss": {"Linear"},
            None: {"ModuleList", "Linear"},
        }

    def test_modules_of_llama(self):
        transformers = pytest.importorskip("transformers")
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **sizes))
        found = {path: region_of_module(path, module) for path, module in model.named_modules()}
        expected = {
            "model.embed_tokens": "embedding",
            "model.rotary_emb": "rope",
            "model.norm": "norm",
            "model.layers.0.input_layernorm": "norm",
            "model.layers.0.self_attn.q_proj": "projections",
            "model.layers.0.self_attn": "attention",
            "model.layers.0.mlp": "mlp",
            "model.layers.0": "residual",
            "lm_head": "head and loss",
        }
        assert expected.items() <= found.items()
