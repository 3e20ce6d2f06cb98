"""The named suites of the report, as data: which programs are run, with what, on a GPU and without one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Program:
    """A measurement program of this folder: it takes --output and --commit, and writes results.csv and tables.md.

    Attributes:
        file: its name.
        title: of its section in the report.
        about: what it measures, in a sentence.
        resumes: it takes --resume. Without it, attention.py goes on with what its folder has, and others begin anew.
        lists: it takes --dry-run.
    """

    file: str
    title: str
    about: str
    resumes: bool = True
    lists: bool = True


PROGRAMS = {
    program.file.removesuffix(".py"): program
    for program in (
        Program("transformer.py", "The passes of a model", "The time of forward, backward and AdamW's update."),
        Program("attention.py", "Attention alone", "Every implementation, in time and memory.", resumes=False),
        Program("breakdown.py", "Where the time goes", "Kernels by their share of a pass."),
        Program("memory.py", "Where the memory goes", "Peaks, the largest allocations, and what is held."),
        Program("precision.py", "Precision", "Sums, the dtypes of autocast, and attention's error."),
        Program("training_step.py", "Whole training steps", "This library's model beside torch's and Llama's."),
        Program("generation.py", "Generation", "The time of a token, beside the bytes that it reads.", lists=False),
        Program(
            "host_overhead.py",
            "Host time of a call",
            "How long an eager call keeps the processor.",
            resumes=False,
            lists=False,
        ),
        Program(
            "leaderboard.py",
            "The course's leaderboard",
            "Its one problem, timed as the course times it.",
            resumes=False,
            lists=False,
        ),
    )
}
"""By name, which is that of the file."""


@dataclass(frozen=True)
class Part:
    """One run of a program: the name of its folder, other than all others of a suite, its arguments, and its limit."""

    name: str
    program: str
    arguments: tuple[str, ...] = ()
    minutes: float = 60.0


@dataclass(frozen=True)
class Suite:
    """What is run by a name: on a GPU, and elsewhere."""

    about: str
    gpu: tuple[Part, ...]
    cpu: tuple[Part, ...]

    def parts(self, on_gpu: bool) -> tuple[Part, ...]:
        """Those for a device."""
        return self.gpu if on_gpu else self.cpu


def _part(program: str, arguments: str = "", *, name: str = "", minutes: float = 60.0) -> Part:
    return Part(name or program, program, tuple(arguments.split()), minutes)


_TINY_STEP = "--preset tiny --context 64 --tokens 128 --vocab-size 512 --compile none --steps 3 --warmup 1"

_QUICK_CPU = (
    _part("precision", "--dtype fp32 bf16 --length 128", minutes=5),
    _part(
        "attention",
        "--preset course --lengths 128 256 --dims 32 --dtype fp32 --rounds 3 --impl naive tiled torch-math",
        minutes=5,
    ),
    _part("transformer", "--preset tiny --context-length 64 --mode step --steps 3 --warmup 0 1", minutes=5),
    _part("breakdown", "--preset tiny --context 64 --steps 3 --warmup 1", minutes=5),
    _part("memory", "--preset tiny --context 64 128 --mode forward step --checkpoint-every 2 --steps 1", minutes=5),
    _part("training_step", f"{_TINY_STEP} --model flash sdpa naive", minutes=5),
    _part("generation", "--preset small --layers 2 --context 32 --new-tokens 2", minutes=5),
    _part("host_overhead", "--length 64 --heads 2 --calls 5 --rounds 3", minutes=5),
    _part("leaderboard", "--length 128 --seconds 0.2 --warmup 0.1 --eager", minutes=5),
)
_QUICK_GPU = (
    _part("precision"),
    _part("attention", "--preset quick --lengths 1024 4096 --dims 64"),
    _part("transformer", "--preset small --context-length 512 --mode forward step --compile none model"),
    _part("transformer", "--preset small --context-length 512 --mode step --warmup 0 5", name="transformer-warmup"),
    _part("breakdown", "--preset small --context 512"),
    _part("memory", "--preset small --context 512"),
    _part("training_step", "--preset small --context 1024 --model flash sdpa"),
    _part("generation", "--preset small --batch 1 --context 512 --modes eager graph"),
    _part("host_overhead"),
    _part("leaderboard", "--seconds 2"),
)


_LONG = "--lengths 128 512 2048 8192 32768 65536"
"""Of the course's second sweep, whose lengths are each twice the one before."""


def _of_year(year: str, presets: str, breakdown: str, memory: str) -> Suite:
    """Each program, on the presets of a year of the course; without a GPU, on the smallest one."""
    of = f"--suite {year} --preset"
    # A part for each preset, and a few minutes each, so that several GPUs can share them out.
    passes = "--context-length 128 256 512 1024 --mode forward step --compile none blocks"
    gpu = (
        *(_part("transformer", f"{of} {name} {passes}", name=f"transformer-{name}") for name in presets.split()),
        # The step has the phases of this mode; what is beside it is memory, for which one length will do.
        _part(
            "transformer", f"{of} {presets} --context-length 512 --mode forward+backward", name="transformer-backward"
        ),
        _part("transformer", f"{of} small --context-length 512 --warmup 0 1 2 5", name="transformer-warmup"),
        _part("transformer", "--compare-compile", name="transformer-compile"),
        _part("attention", "--preset course", minutes=90),
        _part(
            "attention", f"--preset course-causal {_LONG} --impl naive flash sdpa --rounds 3", name="attention-causal"
        ),
        _part("breakdown", f"{of} {breakdown} --context 128 512 1024"),
        *(
            _part("memory", f"{of} {name} --context 128 256 512 --mode forward step", name=f"memory-{name}")
            for name in memory.split()
        ),
        _part("precision"),
        _part("training_step", f"{of} {breakdown} --context 1024 --compile blocks"),
        _part("generation"),
        _part("host_overhead"),
        _part("leaderboard"),
    )
    small = "--batch-size 1 --steps 3 --dtype float32"
    cpu = (
        _part("transformer", f"{of} small --context-length 128 {small} --mode forward step"),
        _part("transformer", "--preset tiny --context-length 64 --steps 5 --warmup 0 1 2 5", name="transformer-warmup"),
        _part("transformer", "--preset 4-256-256-4-8 --compile none model --steps 3", name="transformer-compile"),
        _part("attention", "--preset course --lengths 256 1024 --dims 16 64 --dtype fp32"),
        _part("breakdown", f"{of} small --context 128"),
        _part("memory", f"{of} small --context 128"),
        _part("precision"),
        _part("training_step"),
        _part("generation"),
        _part("host_overhead"),
        _part("leaderboard"),
    )
    return Suite(f"tables for the systems assignment of {year}, with its presets", gpu, cpu)


def _everything(year: Suite) -> Suite:
    """The parts of 2025, what 2026 has beside it, the second attention sweep whole, and attention over a cache."""
    gpu = (
        *(part for part in year.gpu if part.name != "attention-causal"),
        _part("transformer", "--suite 2026 --preset xl 10B --context-length 512 1024", name="transformer-2026"),
        _part("transformer", "--preset wide --context-length 512", name="transformer-wide"),
        _part("attention", "--preset course-causal", name="attention-causal", minutes=90),
        _part("attention", "--preset paper", name="attention-paper"),
        _part("generation", "--attention", name="generation-attention"),
    )
    cpu = (
        *year.cpu,
        _part("attention", "--preset course-causal --lengths 128 512 --dims 64", name="attention-causal"),
        _part("generation", "--attention", name="generation-attention"),
    )
    return Suite("all of 2025, the models of 2026 beyond it, and attention's other sweeps", gpu, cpu)


_2025 = _of_year("2025", "small medium large xl 2.7B", "small medium large", "small 2.7B")
_2026 = _of_year("2026", "small medium large xl 10B", "small large xl", "small xl")

SUITES = {
    "quick": Suite("a short run of each program, in a few minutes", _QUICK_GPU, _QUICK_CPU),
    "2025": _2025,
    "2026": _2026,
    "full": _everything(_2025),
}
"""By name."""
