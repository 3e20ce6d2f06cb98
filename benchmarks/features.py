"""The cost of what attention can compute besides causality: time of each feature, ours and FlexAttention's.

    python benchmarks/features.py                                    # every case; short ones without a GPU
    python benchmarks/features.py --cases window document --dims 128 --length 65536 --batch 1

All contenders of a case are measured in the same run, interleaved in rounds. Beside each time is its multiple of plain
causal attention by the same implementation, which is measured with it. Rows are written to a CSV file as they are made.
"""

from __future__ import annotations

import argparse
import csv
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.attention_peers import causal_block_mask
from benchmarks.attention_presets import DTYPE_ALIASES, DTYPES
from cs336_systems.attention import attention, variants
from cs336_systems.profiling.environment import collect_environment
from cs336_systems.profiling.report import environment_lines, format_number, markdown_table
from cs336_systems.profiling.timing import RoundTimes, TimingMethod, interleave, measure_ms

COLUMNS = ("case", "head_dim", "batch", "heads", "length", "dtype", "pass", "implementation", "median_ms", "status")
PASSES = ("forward", "backward")
PLAIN = "causal"

Attend = Callable[..., Tensor]


class Sizes(NamedTuple):
    """Of q, k and v: (batch, heads, length, head_dim)."""

    batch: int
    heads: int
    length: int
    head_dim: int


class Contenders(NamedTuple):
    """Ours, FlexAttention's (None where it has no such thing), and further tensors that get gradients."""

    ours: Attend
    flex: Attend | None
    leaves: tuple[Tensor, ...] = ()


Make = Callable[[Sizes, torch.device, torch.dtype], Contenders]


def flex(**settings: Any) -> Attend:
    """FlexAttention, compiled, in whole graphs alone."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Attend = functools.partial(torch.compile(flex_attention, dynamic=False, fullgraph=True), **settings)
    return compiled


def flex_mask(visible: Callable[..., Tensor], sizes: Sizes, device: torch.device) -> Any:
    """FlexAttention's lists of blocks of a mask, which all heads and batch entries share."""
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(visible, None, None, sizes.length, sizes.length, device=str(device))


def _causal(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Contenders:
    ours = functools.partial(attention, causal=True)
    return Contenders(ours, flex(block_mask=causal_block_mask(sizes.length, device)))


def _window(share: int, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Contenders:
    size = sizes.length // share

    def visible(batch: Any, head: Any, row: Tensor, column: Tensor) -> Tensor:
        return (row >= column) & (row - column <= size)

    ours = functools.partial(attention, causal=True, window=(size, None))
    return Contenders(ours, flex(block_mask=flex_mask(visible, sizes, device)))


def _documents(listed: bool, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Contenders:
    generator = torch.Generator().manual_seed(0)
    ends = torch.randint(1, sizes.length, (max(1, sizes.length // 1024),), generator=generator).sort().values
    ids = torch.bucketize(torch.arange(sizes.length), ends, right=True, out_int32=True).to(device)

    def visible(batch: Any, head: Any, row: Tensor, column: Tensor) -> Tensor:
        return (row >= column) & (ids[row] == ids[column])

    mask = variants.document(ids[None])
    if listed:
        mask = mask.with_blocks(sizes.length, sizes.length, causal=True)
    ours = functools.partial(attention, causal=True, mask=mask)
    return Contenders(ours, flex(block_mask=flex_mask(visible, sizes, device)) if listed else None)


def _softcap(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Contenders:
    def capped(score: Tensor, *place: Any) -> Tensor:
        return 30.0 * torch.tanh(score / 30.0)

    theirs = flex(score_mod=capped, block_mask=causal_block_mask(sizes.length, device))
    return Contenders(functools.partial(attention, causal=True, softcap=30.0), theirs)


def _alibi(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Contenders:
    slopes = torch.logspace(-1, -8, sizes.heads, 2.0, device=device)

    def biased(score: Tensor, batch: Any, head: Any, row: Any, column: Any) -> Tensor:
        return score - slopes[head] * (row - column)

    theirs = flex(score_mod=biased, block_mask=causal_block_mask(sizes.length, device))
    return Contenders(functools.partial(attention, causal=True, alibi_slopes=slopes), theirs)


def _bias(learned: bool, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Contenders:
    bias = torch.randn(sizes.heads, sizes.length, sizes.length, device=device, dtype=dtype, requires_grad=learned)

    def biased(score: Tensor, batch: Any, head: Any, row: Any, column: Any) -> Tensor:
        return score + bias[head, row, column]

    theirs = flex(score_mod=biased, block_mask=causal_block_mask(sizes.length, device))
    ours = functools.partial(attention, causal=True, bias=bias)
    return Contenders(ours, theirs, (bias,) if learned else ())


def _relative_bias(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Contenders:
    table = torch.randn(sizes.heads, 2 * sizes.length - 1, device=device, requires_grad=True)

    def biased(score: Tensor, batch: Any, head: Any, row: Any, column: Any) -> Tensor:
        return score + table[head, column - row + sizes.length - 1]

    theirs = flex(score_mod=biased, block_mask=causal_block_mask(sizes.length, device))
    ours = functools.partial(attention, causal=True, scores=variants.relative_bias(table))
    return Contenders(ours, theirs, (table,))


def _sinks(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Contenders:
    sinks = torch.randn(sizes.heads, device=device, requires_grad=True)
    return Contenders(functools.partial(attention, causal=True, sinks=sinks), None, (sinks,))


def _dropout(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Contenders:
    seed = torch.tensor([7], device=device)
    return Contenders(functools.partial(attention, causal=True, dropout_p=0.1, seed=seed), None)


CASES: dict[str, Make] = {
    PLAIN: _causal,
    "window_quarter": functools.partial(_window, 4),
    "window_sixteenth": functools.partial(_window, 16),
    "document": functools.partial(_documents, True),
    "document_unlisted": functools.partial(_documents, False),
    "softcap": _softcap,
    "alibi": _alibi,
    "bias": functools.partial(_bias, False),
    "learned_bias": functools.partial(_bias, True),
    "relative_bias": _relative_bias,
    "sinks": _sinks,
    "dropout": _dropout,
}


def run_of(attend: Attend, tensors: Sequence[Tensor], leaves: Sequence[Tensor], which: str) -> Callable[[], object]:
    """A function whose call is one pass: a forward that keeps nothing, or a backward on a graph that is kept."""
    if which == "forward":

        def forward() -> Tensor:
            with torch.no_grad():
                return attend(*tensors)

        return forward
    output = attend(*tensors)
    gradient = torch.randn_like(output)
    wanted = (*tensors, *leaves)
    return lambda: torch.autograd.grad(output, wanted, gradient, retain_graph=True)


def measure(
    case: str, sizes: Sizes, which: str, options: argparse.Namespace
) -> tuple[dict[str, RoundTimes], dict[str, str]]:
    """Times of one case and of plain causal attention, by implementation and case, and why others have none."""
    device, dtype = options.device, options.dtype
    generator = torch.Generator(device).manual_seed(0)
    shape = tuple(sizes)
    tensors = [torch.randn(shape, device=device, dtype=dtype, generator=generator, requires_grad=True) for _ in "qkv"]
    runs: dict[str, Callable[[], object]] = {}
    failed: dict[str, str] = {}
    for name in dict.fromkeys((PLAIN, case)):
        ours, theirs, leaves = CASES[name](sizes, device, dtype)
        attends: dict[str, Attend] = {"ours": functools.partial(ours, impl=options.impl)}
        if theirs is not None and options.flex:
            attends["flex"] = theirs
        for implementation, attend in attends.items():
            key = f"{implementation} {name}"
            try:
                runs[key] = run_of(attend, tensors, leaves, which)
                runs[key]()
            except (RuntimeError, ValueError, torch.OutOfMemoryError) as error:
                runs.pop(key, None)
                failed[key] = " ".join(str(error).split())[:200] or type(error).__name__
    method = TimingMethod(rounds=options.rounds)
    measurements = {key: functools.partial(measure_ms, run, device=device, method=method) for key, run in runs.items()}

    def fail(key: str, error: Exception) -> None:
        failed[key] = str(error)

    return interleave(measurements, method=method, on_error=fail), failed


def line_of(case: str, sizes: Sizes, which: str, times: dict[str, RoundTimes]) -> list[str]:
    """A line of the table: times, the speed-up over FlexAttention, and multiples of plain causal attention."""
    ours, theirs = times.get(f"ours {case}"), times.get(f"flex {case}")
    plain = times.get(f"ours {PLAIN}")
    return [
        f"{case}, {which}",
        *map(str, sizes),
        format_number(ours.median if ours else None),
        format_number(theirs.median if theirs else None),
        format_number(ours.speedup_over(theirs) if ours and theirs else None),
        format_number(1 / ours.speedup_over(plain) if ours and plain else None),
    ]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpu = torch.cuda.is_available()
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES], help="default: all")
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=[*PASSES], help="default: both")
    parser.add_argument("--dims", nargs="+", type=int, default=[64, 128] if gpu else [64], help="head dimensions")
    for name, value in (("batch", 2 if gpu else 1), ("heads", 16 if gpu else 2), ("length", 8192 if gpu else 512)):
        parser.add_argument(f"--{name}", type=int, default=value, help="default: %(default)s")
    parser.add_argument("--dtype", default="bfloat16" if gpu else "float32", choices=[*DTYPES, *DTYPE_ALIASES])
    parser.add_argument("--impl", default="flash" if gpu else "tiled", help="ours (default: %(default)s)")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda" if gpu else "cpu"))
    parser.add_argument("--rounds", type=int, default=5, help="rounds for the median (default: %(default)s)")
    parser.add_argument("--no-flex", dest="flex", action="store_false", help="leave FlexAttention out")
    parser.add_argument("--output", type=Path, default=Path("results/features"), help="default: %(default)s")
    parser.add_argument("--commit", help="the commit to record where the checkout is not in a git repository")
    options = parser.parse_args(arguments)
    options.dtype = DTYPES[DTYPE_ALIASES.get(options.dtype, options.dtype)]
    options.flex = options.flex and options.device.type == "cuda"
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every case, and write the rows and the table."""
    options = parse(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    lines, failures = [], dict[str, str]()
    with (options.output / "results.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        for case in options.cases:
            for head_dim in options.dims:
                sizes = Sizes(options.batch, options.heads, options.length, head_dim)
                for which in options.passes:
                    times, failed = measure(case, sizes, which, options)
                    facts = (case, head_dim, *sizes[:3], str(options.dtype).removeprefix("torch."), which)
                    for key in (f"ours {case}", f"flex {case}"):
                        if key in times:
                            rows.writerow((*facts, key.split()[0], f"{times[key].median:.6g}", "ok"))
                        elif key in failed:
                            rows.writerow((*facts, key.split()[0], "", failed[key]))
                            failures[f"{key}, {which}, d {head_dim}"] = failed[key]
                    file.flush()
                    lines.append(line_of(case, sizes, which, times))
                    print(" ".join(lines[-1]), flush=True)
    headers = ["case", "batch", "heads", "length", "d", "ours, ms", "flex, ms", "speed-up, ×", "of plain causal, ×"]
    environment = environment_lines(collect_environment(options.device, commit=options.commit))
    report = ["# Features of attention", "", *environment, "", markdown_table(headers, lines), ""]
    report += [f"- {name}: {reason}" for name, reason in failures.items()]
    (options.output / "tables.md").write_text("\n".join(report) + "\n")
    print(f"wrote {options.output / 'tables.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
