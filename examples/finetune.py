"""Fine-tunes a model of transformers with this library's attention.

    python examples/finetune.py                                                        # random weights, no download
    python examples/finetune.py --model HuggingFaceTB/SmolLM2-135M --file my.txt --length 1024 --steps 200

Without --model it is a Llama of two layers with random weights that reads bytes. Prints the largest difference of the
logits from those of transformers' own "eager" attention, the loss of each step, and a continuation of the text.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cs336_systems.compat import huggingface

try:
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
except ImportError:
    sys.exit("transformers is missing; install it: pip install 'cs336_systems[hf]', or pip install 'transformers>=5.5'")


def load(name: str | None, device: str) -> tuple[Any, Any]:
    """The model and its tokenizer; None for bytes."""
    huggingface.register()  # attn_implementation="cs336_systems"
    if name is not None:
        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation=huggingface.NAME)
        return model.to(device), AutoTokenizer.from_pretrained(name)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=huggingface.NAME).to(device), None


def difference_from_eager(model: Any, tokens: Tensor) -> float:
    """Of the logits, relative to the largest."""
    with torch.no_grad():
        ours = model(tokens).logits
        model.set_attn_implementation("eager")
        eager = model(tokens).logits
        model.set_attn_implementation(huggingface.NAME)
    return ((ours - eager).abs().max() / eager.abs().max()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a name or a folder, as from_pretrained takes it")
    parser.add_argument("--file", type=Path, default=Path(__file__).parents[1] / "README.md")
    for name, value in (("length", 128), ("batch", 8), ("steps", 20)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, help="1e-2 for random weights, 2e-5 for others")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)

    model, tokenizer = load(options.model, device)
    text = options.file.read_text(encoding="utf-8")
    ids = list(text.encode()) if tokenizer is None else tokenizer(text).input_ids
    if len(ids) < options.length:
        parser.error(f"--file must have at least {options.length} tokens; got {len(ids)}")
    windows = torch.tensor(ids).unfold(0, options.length, options.length).to(device)

    model.eval()
    print(f"largest difference from eager: {difference_from_eager(model, windows[:1]):.1e} of the largest logit")
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr or (2e-5 if options.model else 1e-2))
    for step in range(1, options.steps + 1):
        rows = windows[torch.randint(len(windows), (options.batch,))]
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 or step % max(1, options.steps // 5) == 0:
            print(f"[{step}/{options.steps}] loss {loss.item():.3f}")

    model.eval()
    prompt = windows[:1, : options.length // 2]
    (written,) = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=32, do_sample=False)
    new = written[prompt.shape[1] :].tolist()
    print(f"continuation: {(bytes(new).decode(errors='replace') if tokenizer is None else tokenizer.decode(new))!r}")


if __name__ == "__main__":
    main()
