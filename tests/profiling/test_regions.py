"""Work of a model is attributed to its regions, forward and backward, by ranges that are there only when wanted."""

from __future__ import annotations

import collections

import pytest
import torch
from torch import nn

from cs336_systems import parts
from cs336_systems.attention import attention
from cs336_systems.profiling import regions as regions_module
from cs336_systems.profiling.regions import Regions, label_of, region_of_label, region_of_module
from cs336_systems.profiling.trace import ELSEWHERE, read_trace, record_trace
from cs336_systems.transformer import Transformer, TransformerConfig

LAYERS = 2
SIZES = {"vocab_size": 32, "context_length": 16, "d_model": 16, "d_ff": 32, "num_layers": LAYERS, "num_heads": 2}
TOKENS = torch.arange(32).reshape(2, 16)
PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm")


def work_of_a_step(tmp_path, model, **options):
    with Regions(model, nvtx=False, **options) as regions:

        def step():
            with regions.during("forward"):
                loss = model(TOKENS, targets=TOKENS)
            with regions.during("backward"):
                loss.backward()
            model.zero_grad()

        record_trace(step, tmp_path / "trace.json", device="cpu")
    return read_trace(tmp_path / "trace.json")


def counted(work, names=PRODUCTS):
    return collections.Counter((one.of_pass, one.region) for one in work if one.name in names)


def make_model(attn="naive", **options):
    return Transformer(TransformerConfig(**SIZES, attn=attn), **options)


class TestAttribution:
    def test_every_product_is_in_its_region(self, tmp_path):
        found = counted(work_of_a_step(tmp_path, make_model()))
        each = {"projections": 4, "mlp": 3, "attention: scores": 1, "attention: values": 1}
        expected = {("forward", region): LAYERS * count for region, count in each.items()}
        expected |= {("backward", region): 2 * LAYERS * count for region, count in each.items()}
        assert found == expected | {("forward", "head and loss"): 1, ("backward", "head and loss"): 2}

    def test_softmax_mask_embedding_and_loss(self, tmp_path):
        work = work_of_a_step(tmp_path, make_model())
        assert counted(work, ["aten::_softmax"]) == {("forward", "attention: softmax"): LAYERS}
        assert counted(work, ["aten::_softmax_backward_data"]) == {("backward", "attention: softmax"): LAYERS}
        assert counted(work, ["aten::masked_fill_"])["backward", "attention: mask"] == LAYERS
        assert counted(work, ["aten::embedding"]) == {("forward", "embedding"): 1}
        assert counted(work, ["aten::embedding_dense_backward"]) == {("backward", "embedding"): 1}
        assert counted(work, ["aten::nll_loss_backward"]) == {("backward", "head and loss"): 1}
        assert counted(work, ["aten::rms_norm"]) == {("forward", "norm"): 2 * LAYERS + 1}
        assert counted(work, ["aten::flip"])["forward", "rope"] == 2 * LAYERS

    def test_nothing_but_sums_of_gradients_is_elsewhere(self, tmp_path):
        work = work_of_a_step(tmp_path, make_model())
        lost = {one.name for one in work if one.region == ELSEWHERE and one.of_pass == "backward"}
        computed = {name for name in lost if name.startswith("aten::") and "detach" not in name}
        # The first gradient is one, of the loss by itself.
        assert computed <= {"aten::add", "aten::add_", "aten::ones_like", "aten::empty_like", "aten::empty_strided"} | {
            "aten::fill_"
        }
        assert "aten::add_" in computed or "aten::add" in computed

    @pytest.mark.parametrize("attn", ["tiled", "sdpa"])
    def test_fused_attention_is_one_region(self, tmp_path, attn):
        work = work_of_a_step(tmp_path, make_model(attn))
        found = {one.region for one in work}
        assert "attention" in found
        assert not any(region.startswith("attention: ") for region in found)
        assert any(one.region == "attention" and one.of_pass == "backward" for one in work)

    def test_what_is_computed_again_has_the_names_of_the_forward_pass(self, tmp_path):
        once = counted(work_of_a_step(tmp_path, make_model()))
        twice = counted(work_of_a_step(tmp_path, make_model(checkpoint_every=1)))
        # Recomputation stops when it has what the backward pass needs: the last product of a block is not among it.
        assert twice["backward", "mlp"] > once["backward", "mlp"]
        assert twice["backward", "attention: scores"] == once["backward", "attention: scores"] + LAYERS
        assert twice["forward", "mlp"] == once["forward", "mlp"]

    def test_any_module_with_names_of_ones_own(self, tmp_path):
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))

            def forward(self, tokens, targets):
                return self.layers(tokens.float()).square().mean()

        model = Model()
        work = work_of_a_step(tmp_path, model, name_of=lambda path, module: path if "." in path else None)
        # The first layer's input needs no gradient.
        assert counted(work) == {
            ("forward", "layers.0"): 1,
            ("forward", "layers.2"): 1,
            ("backward", "layers.0"): 1,
            ("backward", "layers.2"): 2,
        }
        assert counted(work, ["aten::threshold_backward"]) == {("backward", "layers.1"): 1}
        assert set(counted(work, ["aten::mean"])) == {("forward", "model")}

    def test_ranges_of_ones_own(self, tmp_path):
        model = nn.Linear(4, 4)
        x = torch.randn(3, 4)
        with Regions(model, nvtx=False) as regions:

            def step():
                with regions.range("loss"):
                    model(x).square().sum()

            record_trace(step, tmp_path / "trace.json", device="cpu")
        assert set(counted(read_trace(tmp_path / "trace.json"), ["aten::sum"])) == {(ELSEWHERE, "loss")}


class TestRanges:
    def labels(self, monkeypatch, model, call):
        """The labels of the ranges that are opened for Nsight Systems, in order, and how deep each was."""
        opened, depth = [], [0]

        def push(label):
            opened.append((depth[0], label))
            depth[0] += 1

        def pop():
            depth[0] -= 1

        monkeypatch.setattr(torch.cuda.nvtx, "range_push", push)
        monkeypatch.setattr(torch.cuda.nvtx, "range_pop", pop)
        with Regions(model, nvtx=True) as regions:
            call(regions)
        assert depth == [0]
        return opened

    def test_nsight_systems_sees_the_same(self, monkeypatch):
        model = make_model()

        def call(regions):
            with regions.during("forward"):
                loss = model(TOKENS, targets=TOKENS)
            with regions.during("backward"):
                loss.backward()

        opened = self.labels(monkeypatch, model, call)
        assert opened[:3] == [(0, "[pass] forward"), (1, "[model] "), (2, "[embedding] token_embeddings")]
        names = [label for _, label in opened]
        # The blocks share one RoPE, whose ranges have the names of where they are.
        for layer in range(LAYERS):
            assert names.count(f"[rope] layers.{layer}.attn.rope") == 2
            assert (5, f"[attention: softmax] layers.{layer}.attn.attend") in opened
            assert f"[attention: softmax] layers.{layer}.attn.attend backward" in names
        backward = names[names.index("[pass] backward") :]
        assert backward.index("[mlp] layers.1.ffn backward") < backward.index("[mlp] layers.0.ffn backward")

    def test_a_forward_pass_that_raises_leaves_no_range_open(self, monkeypatch):
        model = make_model()

        def call(regions):
            with pytest.raises(IndexError):
                model(TOKENS + 99, targets=TOKENS)
            with regions.during("forward"):
                model(TOKENS, targets=TOKENS)

        opened = self.labels(monkeypatch, model, call)
        assert [label for depth, label in opened if depth == 0] == ["[model] ", "[pass] forward"]

    def test_nothing_is_left_behind(self):
        model = make_model()
        with Regions(model, nvtx=False):
            assert all(block._forward_hooks for block in model.layers)
            with pytest.raises(RuntimeError, match="parts must be marked by one listener at a time"):
                Regions(model, nvtx=False).__enter__()
            assert all(len(block._forward_hooks) == 1 for block in model.layers)
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        assert parts._marker is None

    def test_without_a_listener_no_range_is_made(self, monkeypatch):
        def refused(*arguments):
            raise AssertionError("a range was opened")

        monkeypatch.setattr(regions_module, "_Open", refused)
        make_model()(TOKENS, targets=TOKENS).backward()

    @pytest.mark.usefixtures("compile_afresh")
    def test_compiled_attention_is_one_graph_with_a_listener(self, tmp_path):
        q = torch.randn(1, 2, 8, 4)
        expected = attention(q, q, q, causal=True, impl="naive")
        seen = []

        def marker(name):
            seen.append(name)
            return torch.profiler.record_function(name)

        with parts.marked_by(marker):
            # Compiled with fullgraph=True.
            torch.testing.assert_close(attention(q, q, q, causal=True, impl="compiled"), expected)
            assert seen == []
            attention(q, q, q, causal=True, impl="naive")
        assert seen == ["attention: scores", "attention: mask", "attention: softmax", "attention: values"]

    def test_results_and_gradients_are_the_same(self):
        model = make_model()
        results = []
        for listened in (False, True):
            model.zero_grad()
            if listened:
                with Regions(model, nvtx=False):
                    loss = model(TOKENS, targets=TOKENS)
                    loss.backward()
            else:
                loss = model(TOKENS, targets=TOKENS)
                loss.backward()
            results.append([loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


class TestNames:
    @pytest.mark.parametrize("backward", [False, True])
    def test_a_label_says_its_region(self, backward):
        label = label_of("attention: softmax", "layers.3.attn.attend", backward=backward)
        assert region_of_label(label) == "attention: softmax"
        assert label.endswith(" backward") == backward

    @pytest.mark.parametrize("label", ["ProfilerStep#3", "Optimizer.step#AdamW.step", "## Call CompiledFxGraph abc ##"])
    def test_other_ranges_have_none(self, label):
        assert region_of_label(label) is None

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
        assert found["model.embed_tokens"] == "embedding"
        assert found["model.rotary_emb"] == "rope"
        assert found["model.norm"] == found["model.layers.0.input_layernorm"] == "norm"
        assert found["model.layers.0.self_attn.q_proj"] == "projections"
        assert found["model.layers.0.self_attn"] == "attention"
        assert found["model.layers.0.mlp"] == "mlp"
        assert found["model.layers.0"] == "residual"
        assert found["lm_head"] == "head and loss"
