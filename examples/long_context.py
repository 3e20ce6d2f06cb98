"""Trains on sequences that several processes share: each has two chunks of every sequence.

    torchrun --standalone --nproc-per-node 2 examples/long_context.py                     # two CPU processes, by gloo
    torchrun --standalone --nproc-per-node 8 examples/long_context.py --length 131072     # eight GPUs, by NCCL

Keys and values are gathered layer by layer, and freed until the backward pass; see docs/scaling.md. Prints the tokens
of each process; the loss of the whole sequence on one process, which is that of the first step but for rounding; the
loss and the rate of each step; and on GPUs the peak memory of a process.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor

from cs336_systems.parallel import Layout, ParallelModel, start, zigzag_shard
from cs336_systems.transformer import Transformer, TransformerConfig


def sequence_of(path: Path, length: int) -> tuple[Tensor, Tensor]:
    """The first bytes of a file and the next of each, (1, length); a shorter file is repeated."""
    text = path.read_bytes()
    text *= length // max(1, len(text)) + 1
    tokens = torch.tensor(bytearray(text[: length + 1]), dtype=torch.int64)[None]
    return tokens[:, :-1], tokens[:, 1:]


def train(layout: Layout, options: argparse.Namespace) -> None:
    """Some steps on one sequence."""
    tokens, targets = sequence_of(options.file, options.length)
    config = TransformerConfig(
        vocab_size=256,
        context_length=options.length,
        d_model=options.d_model,
        d_ff=4 * options.d_model,
        num_layers=options.layers,
        num_heads=options.d_model // 64 or 1,
    )
    torch.manual_seed(0)  # the same parameters on all processes
    on_gpu = layout.device.type == "cuda"
    parallel = ParallelModel(
        lambda device: Transformer(config, device=device, checkpoint_every=1), layout, autocast=on_gpu
    )
    optimizer = torch.optim.AdamW(parallel.model.parameters(), lr=1e-3)

    positions = zigzag_shard(tokens, targets, layout.context_rank, layout.context_size).positions[0].tolist()
    half = len(positions) // 2
    for rank, (early, late) in enumerate(layout.all_gather((positions[:half], positions[half:]))):
        if layout.is_main:
            print(f"process {rank}: tokens {early[0]} to {early[-1]} and {late[0]} to {late[-1]}")

    if options.check:
        with parallel.evaluating(whole=True):  # every process computes the whole sequence, as one alone would
            whole = parallel.model(tokens.to(layout.device), targets=targets.to(layout.device))
        if layout.is_main:
            print(f"loss of the whole sequence on one process: {whole.item():.5f}")

    for step in range(1, options.steps + 1):
        began = time.perf_counter()
        with torch.autocast(layout.device.type, torch.bfloat16, enabled=on_gpu), parallel.micro_batch(last=True):
            # This process's share of the mean loss, times the number of processes, over which gradients are averaged.
            loss = parallel.loss(tokens, targets, count=targets.numel() * layout.data_size, chunk=4096)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = layout.all_reduce(loss.detach()) / layout.size  # waits for the step on a GPU
        if layout.is_main:
            rate = tokens.numel() / (time.perf_counter() - began)
            print(f"[{step}/{options.steps}] loss {mean.item():.5f}  {rate:,.0f} tokens/s")
    if layout.is_main and on_gpu:
        print(f"peak memory of a process: {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, default=Path(__file__).parents[1] / "README.md")
    for name, value in (("length", 1024), ("layers", 2), ("d-model", 64), ("steps", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--mode", choices=("context", "fsdp+context"), default="context")
    parser.add_argument(
        "--check", action=argparse.BooleanOptionalAction, default=True, help="compute the first loss on one process too"
    )
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with start(options.mode, device) as layout:
        train(layout, options)


if __name__ == "__main__":
    main()
