"""Trains a GPT of nanoGPT's shape on text files, with documents packed into one row of tokens.

    python examples/nanogpt.py                                     # this library's README, in seconds on a CPU
    python examples/nanogpt.py texts/*.txt --layers 12 --heads 12 --channels 768 --tokens 32768 --steps 5000

A document is a paragraph: what lies between blank lines. A step has documents in random order, one after another, until
there are --tokens bytes; the last one is cut. `attention_varlen` takes them without padding, and no token sees another
document. Prints the loss (nats per byte) and the time, the loss of held-out documents, and a sample.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cs336_systems.attention import attention_varlen

END = 256  # the token before and after each document; the others are bytes


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for _ in range(2))
        self.qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.mlp = nn.Sequential(nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels))

    def forward(self, x: Tensor, starts: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(1)  # (tokens, heads, d)
        x = x + self.out(attention_varlen(q, k, v, starts, causal=True).flatten(1))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """Bytes and their positions within documents to the logits of the next bytes."""

    def __init__(self, layers: int, heads: int, channels: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(END + 1, channels), nn.Embedding(length, channels)
        self.blocks = nn.ModuleList(Block(channels, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(channels), nn.Linear(channels, END + 1, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, tokens: Tensor, starts: Tensor) -> Tensor:
        first = torch.repeat_interleave(starts[:-1], starts.diff(), output_size=len(tokens))
        x = self.tokens(tokens) + self.positions(torch.arange(len(tokens), device=tokens.device) - first)
        for block in self.blocks:
            x = block(x, starts)
        return self.head(self.norm(x))


def pack(documents: list[list[int]], most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, next tokens, and where documents begin (int32, with the end), of at most ``most`` tokens."""
    tokens, targets, starts = list[int](), list[int](), [0]
    for document in documents:
        cut = document[: most - len(tokens) + 1]
        if len(cut) < 2:
            break
        tokens += cut[:-1]
        targets += cut[1:]
        starts.append(len(tokens))
    return torch.tensor(tokens), torch.tensor(targets), torch.tensor(starts, dtype=torch.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, default=[Path(__file__).parents[1] / "README.md"])
    for name, value in (("layers", 2), ("heads", 4), ("channels", 64), ("tokens", 512), ("steps", 60)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--length", type=int, default=256, help="documents are cut here")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    texts = [text for path in options.files for text in path.read_text(encoding="utf-8").split("\n\n") if text.strip()]
    documents = [[END, *text.encode()[: options.length - 1], END] for text in texts]
    random.Random(0).shuffle(documents)
    held_out, documents = documents[: len(documents) // 10 or 1], documents[len(documents) // 10 or 1 :]
    print(f"{len(documents)} documents for training, {len(held_out)} held out; device: {device}")

    model = GPT(options.layers, options.heads, options.channels, options.length).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)

    def loss_of(chosen: list[list[int]]) -> Tensor:
        tokens, targets, starts = (x.to(device) for x in pack(chosen, options.tokens))
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            return F.cross_entropy(model(tokens, starts).float(), targets)

    began = time.perf_counter()
    for step in range(1, options.steps + 1):
        loss = loss_of(random.sample(documents, len(documents)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % max(1, options.steps // 5) == 0:
            print(f"[{step}/{options.steps}] loss {loss.item():.3f}  {time.perf_counter() - began:.1f} s")

    with torch.no_grad():
        print(f"held out: loss {loss_of(held_out).item():.3f}")
        written = [END]
        while len(written) < min(80, options.length):
            starts = torch.tensor([0, len(written)], dtype=torch.int32, device=device)
            logits = model(torch.tensor(written, device=device), starts)[-1, :END]
            written.append(int(torch.multinomial((logits.float() / 0.7).softmax(-1), 1)))
    print(f"sample: {bytes(written[1:]).decode(errors='replace')!r}")


if __name__ == "__main__":
    main()
