"""Host time of an eager attention call: how long Python and the launches keep the processor, not the GPU.

    python benchmarks/host_overhead.py --length 256                # writes into results/host_overhead

Many calls are made in a row without waiting for the device; the median over several such batches is shown for every
implementation beside torch's `scaled_dot_product_attention`: of the forward pass without and with its graph recorded,
and of the backward pass. On a CPU a call computes before it returns, so there the figure is the whole time of a call.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F

from benchmarks.flags import DTYPE_ALIASES, DTYPES
from benchmarks.suite_rows import write_at_once
from cs336_systems.attention import attention
from cs336_systems.kernels.torch_names import without_donated_buffers
from cs336_systems.profiling.environment import Environment, collect_environment
from cs336_systems.profiling.memory import collection_paused
from cs336_systems.profiling.report import ABSENT, collected, format_number, markdown_table, report_page
from cs336_systems.profiling.sweep import Row, Status
from cs336_systems.profiling.timing import RoundTimes, TimingMethod, interleave, synchronize

REFERENCE = "torch"
IMPLEMENTATIONS = ("auto", "flash", "sdpa", "compiled", "naive", "tiled")

COLUMNS = {"forward": "forward, µs", "recorded": "with its graph, µs", "backward": "backward, µs"}
"""What is measured, and how the table names it."""
WHOLE_TIME = "Not on a GPU: a call computes before it returns, so this is its whole time."

FIELDS = (
    *("what", "implementation", "status", "reason", "median_us", "min_us", "over_torch", "rounds", "calls"),
    *("batch", "heads", "length", "head_dim", "dtype", "causal"),
)
"""The columns of results.csv, before those of the run."""

Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def host_milliseconds(call: Callable[[], object], device: torch.device, calls: int) -> float:
    """Wall-clock milliseconds of one of `calls` calls made in a row; the device is idle before and waited for after.

    Keep `calls` small enough for the device's queue (about a thousand launches), or the host waits for room in it.
    """
    synchronize(device)
    with collection_paused():
        start = time.perf_counter()
        for _ in range(calls):
            call()
        elapsed = time.perf_counter() - start
    synchronize(device)
    return elapsed * 1e3 / calls


def call_of(candidate: Call, tensors: Sequence[torch.Tensor], what: str) -> Callable[[], object]:
    """A function of which one call is a forward pass, or a backward pass on a graph that is kept."""
    if what != "backward":
        return functools.partial(candidate, *tensors)
    output = candidate(*tensors)
    gradient = torch.randn_like(output)
    return lambda: torch.autograd.grad(output, tensors, gradient, retain_graph=True)


def contenders(
    tensors: Sequence[torch.Tensor], causal: bool, what: str
) -> tuple[dict[str, Callable[[], object]], dict[str, str]]:
    """A call without arguments for each implementation that can do it, warmed up, and why the others cannot."""
    candidates: dict[str, Call] = {REFERENCE: functools.partial(F.scaled_dot_product_attention, is_causal=causal)}
    for name in IMPLEMENTATIONS:
        candidates[name] = functools.partial(attention, causal=causal, impl=name)
    ready: dict[str, Callable[[], object]] = {}
    refused: dict[str, str] = {}
    torch.compiler.reset()  # what was compiled before has its own idea of the setting below
    for name, candidate in candidates.items():
        try:
            # A compiled backward may otherwise overwrite what it was given, and cannot run again on the same graph.
            with without_donated_buffers():
                call = call_of(candidate, tensors, what)
                for _ in range(3):
                    call()
        except ValueError as error:
            refused[name] = " ".join(str(error).split())
        else:
            ready[name] = call
    return ready, refused


def measure(options: argparse.Namespace, what: str) -> tuple[dict[str, RoundTimes], dict[str, str]]:
    """Host time of one of `COLUMNS` by implementation, interleaved, and the reasons of those that were left out."""
    generator = torch.Generator(options.device).manual_seed(0)
    draw = functools.partial(
        torch.randn, shape_of(options), generator=generator, device=options.device, dtype=options.dtype
    )
    tensors = [draw(requires_grad=what != "forward") for _ in range(3)]
    ready, refused = contenders(tensors, options.causal, what)
    measurements = {
        name: functools.partial(host_milliseconds, call, options.device, options.calls) for name, call in ready.items()
    }
    method = TimingMethod(rounds=options.rounds, pause_ms=5.0)
    return interleave(measurements, method=method), refused


def table(measured: Mapping[str, Mapping[str, RoundTimes]]) -> str:
    """Microseconds a call by implementation, and as a multiple of torch's, for each of `COLUMNS` that was measured."""
    lines = []
    for name in dict.fromkeys(name for times in measured.values() for name in times):
        line = [name]
        for times in measured.values():
            if name not in times or REFERENCE not in times:
                line += [ABSENT, ABSENT]
                continue
            ratio = 1 / times[name].speedup_over(times[REFERENCE])
            line += [format_number(times[name].median * 1e3), f"{ratio:.2f} ×"]
        lines.append(line)
    headers = [header for what in measured for header in (COLUMNS[what], "of torch's")]
    return markdown_table(["implementation", *headers], lines)


def rows_of(what: str, measured: Mapping[str, RoundTimes], refused: Mapping[str, str], facts: Row) -> list[Row]:
    """A row for each implementation that was asked for one of `COLUMNS`, those that cannot do it too."""
    rows = [
        {
            "implementation": name,
            "status": Status.OK.value,
            "median_us": times.median * 1e3,
            "min_us": times.minimum * 1e3,
            "over_torch": 1 / times.speedup_over(measured[REFERENCE]) if REFERENCE in measured else None,
            "rounds": len(times.milliseconds),
        }
        for name, times in measured.items()
    ]
    rows += [
        {"implementation": name, "status": Status.UNSUPPORTED.value, "reason": reason}
        for name, reason in refused.items()
    ]
    return [{"what": what, **row, **facts} for row in rows]


def page(text: str, rows: Sequence[Row], options: argparse.Namespace, environment: Environment) -> str:
    """The tables for people."""
    method = [
        f"q, k and v of shape {shape_of(options)}, {dtype_of(options)}, {'causal' if options.causal else 'no'} mask",
        f"the median over {options.rounds} batches of {options.calls} calls in a row, interleaved, which do not wait "
        "for the device; ratios are medians of those within a round",
        f"torch: scaled_dot_product_attention; {', '.join(IMPLEMENTATIONS)}: attention() with that implementation",
    ]
    if options.device.type != "cuda":
        method.append(WHOLE_TIME)
    reasons = [f"{row['implementation']}, {row['what']}: {row['reason']}" for row in rows if row.get("reason")]
    return report_page("Host time of an eager call", environment, method, [text], reasons=collected(reasons))


def shape_of(options: argparse.Namespace) -> tuple[int, int, int, int]:
    """Of q, k and v."""
    return (options.batch, options.heads, options.length, options.dim)


def dtype_of(options: argparse.Namespace) -> str:
    """The dtype's name."""
    return str(options.dtype).removeprefix("torch.")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    available = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=torch.device, default=torch.device(available), help="default: %(default)s")
    parser.add_argument("--dtype", default="bfloat16", choices=[*DTYPES, *DTYPE_ALIASES], help="default: %(default)s")
    for name, value in (("batch", 1), ("heads", 8), ("length", 256), ("dim", 64)):
        parser.add_argument(f"--{name}", type=int, default=value, help="default: %(default)s")
    parser.add_argument("--causal", action="store_true", help="with a causal mask")
    parser.add_argument("--calls", type=int, default=100, help="calls in a row (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="batches of calls (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("results/host_overhead"), help="default: %(default)s")
    parser.add_argument("--commit", help="the commit to record where the checkout is not in a git repository")
    options = parser.parse_args(arguments)
    options.dtype = DTYPES[DTYPE_ALIASES.get(options.dtype, options.dtype)]
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, and write it."""
    options = parse(arguments)
    environment = collect_environment(options.device, commit=options.commit)
    sizes = dict(zip(("batch", "heads", "length", "head_dim"), shape_of(options), strict=True))
    facts = {**sizes, "dtype": dtype_of(options), "causal": options.causal, "calls": options.calls}
    measured, rows = dict[str, dict[str, RoundTimes]](), list[Row]()
    for what in COLUMNS:
        measured[what], refused = measure(options, what)
        rows += rows_of(what, measured[what], refused, facts)
    text = table(measured)
    print(f"Host time of one eager call, {options.device}, {dtype_of(options)}, q {shape_of(options)}")
    if options.device.type != "cuda":
        print(WHOLE_TIME)
    print(text)
    for name, row in {row["implementation"]: row for row in reversed(rows) if row.get("reason")}.items():
        print(f"{name} was not measured, {row['what']}: {row['reason']}")
    written = write_at_once(options.output, rows, FIELDS, environment, page(text, rows, options, environment))
    print(f"wrote {written}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
