"""Tokenizers, text files as one memory-mapped array of tokens, and the order in which training visits it."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int
from torch import Tensor

from ..files import replacing
from .config import TrainingConfig

TRAIN, VALIDATION = "train.bin", "validation.bin"
CHARACTERS_AT_A_TIME = 2**24
END_OF_DOCUMENT = "<|endoftext|>"

Tokens = npt.NDArray[np.unsignedinteger[Any]]


class ByteTokenizer:
    """Each byte of UTF-8 is a token; token 256 ends a document.

    Attributes:
        size: number of tokens; each is below it.
        end_of_document: the token after each file.
    """

    size = 257
    end_of_document = 256

    def encode(self, text: str) -> Sequence[int]:
        """The tokens of a text, in a buffer that NumPy reads as it is."""
        return bytearray(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; what is not text, such as the padding of the vocabulary, becomes U+FFFD."""
        special = {self.end_of_document: f"\n{END_OF_DOCUMENT}\n"}
        pieces = (bytes((t,)) if t < 256 else special.get(t, "\ufffd").encode() for t in tokens)
        return b"".join(pieces).decode(errors="replace")


class FileTokenizer:
    """The tokenizer in a ``tokenizer.json`` of the package tokenizers; ValueError if it cannot be read."""

    def __init__(self, path: Path) -> None:
        try:
            import tokenizers
        except ImportError:
            raise ValueError(f"tokenizer {path} needs the package tokenizers: pip install tokenizers") from None
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
            vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
            self.end_of_document = vocabulary[END_OF_DOCUMENT]
        except Exception as error:  # the package raises plain Exception
            raise ValueError(f"tokenizer must be a file with {END_OF_DOCUMENT}; got {path}: {error}") from error
        self.size = 1 + max(vocabulary.values())  # ids can have gaps

    def encode(self, text: str) -> Sequence[int]:
        """The tokens, without those that a template adds."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text, including special tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))


Tokenizer = ByteTokenizer | FileTokenizer


def open_tokenizer(config: TrainingConfig, folder: Path | None = None) -> Tokenizer:
    """The tokenizer of the options; for a run's folder, from the copy of its file there."""
    if config.tokenizer is None:
        return ByteTokenizer()
    path = Path(config.tokenizer)
    return FileTokenizer(path if folder is None else folder / path.name)


def text_files(paths: Sequence[str], pattern: str) -> list[Path]:
    """Files as given, and those in folders whose names match the pattern, searched recursively, in sorted order.

    Each file comes once. Raises ValueError if a path has none.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        found = [path] if path.is_file() else sorted(file for file in path.rglob(pattern) if file.is_file())
        if not found:
            raise ValueError(f"data must be text files, or folders with files that match {pattern!r}; got {path}")
        files += found
    return list(dict.fromkeys(files))


def write_tokens(target: Path, files: Sequence[Path], tokenizer: Tokenizer) -> None:
    """Write the tokens of files, each followed by ``end_of_document``, atomically. ValueError if one is not UTF-8."""
    with replacing(target) as out:
        for path in files:
            try:
                with path.open(encoding="utf-8", newline="") as file:
                    while lines := file.readlines(CHARACTERS_AT_A_TIME):
                        out.write(np.asarray(tokenizer.encode("".join(lines)), _dtype(tokenizer)).tobytes())
            except UnicodeDecodeError as error:
                raise ValueError(f"data must be text in UTF-8; got {path}: {error}") from None
            out.write(np.asarray([tokenizer.end_of_document], _dtype(tokenizer)).tobytes())


def _dtype(tokenizer: Tokenizer) -> np.dtype[Any]:
    return np.dtype("<u2" if tokenizer.size <= 2**16 else "<u4")


def prepare(config: TrainingConfig, folder: Path) -> None:
    """Write the tokens and a copy of the tokenizer's file into the folder of a new run, which then needs no other.

    Raises ValueError if the folder has other files, or if the text or the tokenizer cannot be read.
    """
    tokenizer = open_tokenizer(config)
    expected = {TRAIN, VALIDATION, Path(config.tokenizer or "").name}
    if {path.name for path in folder.glob("[!.]*")} - expected:
        raise ValueError(f"out must be a new folder; {folder} has files: --resume {folder} resumes a run")
    sources = {TRAIN: text_files(config.data, config.files)}
    if config.val_data:
        sources[VALIDATION] = text_files(config.val_data, config.files)
    for name, files in sources.items():
        write_tokens(folder / name, files, tokenizer)
    if config.tokenizer is not None:
        shutil.copy(config.tokenizer, folder)


def open_tokens(config: TrainingConfig, folder: Path, tokenizer: Tokenizer) -> tuple[Tokens, Tokens | None]:
    """The tokens that `prepare` wrote, memory-mapped: for training, and for validation unless there are none."""
    train: Tokens = np.memmap(folder / TRAIN, _dtype(tokenizer), "r")
    if config.val_data:
        return train, np.memmap(folder / VALIDATION, _dtype(tokenizer), "r")
    held_out = int(len(train) * config.val_fraction)
    return train[: len(train) - held_out], train[len(train) - held_out :] if config.val_fraction else None


class EpochOrder:
    """The order in which a run visits the windows of its tokens.

    Each epoch cuts the tokens into windows of ``length`` that do not overlap, beginning at a random offset, and visits
    every window once in random order. Sequence n of a run is window n mod W of epoch n // W, for W windows. So the
    number of the step is all that a resumed run needs, and processes share a step without communication.
    Raises ValueError for fewer than ``2 * length`` tokens: the offset takes up to ``length``.
    """

    def __init__(self, tokens: int, length: int, seed: int) -> None:
        self.length, self.seed = length, seed
        self.windows = (tokens - length) // length
        if self.windows < 1:
            raise ValueError(f"data must have at least 2 · context_length = {2 * length} tokens; got {tokens}")
        self._epoch = functools.lru_cache(maxsize=2)(self._draw)  # a step can span two epochs

    def _draw(self, epoch: int) -> npt.NDArray[np.int64]:
        generator = np.random.default_rng((self.seed, epoch))
        return generator.integers(self.length) + generator.permutation(self.windows) * self.length

    def starts(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """Index of the first token of sequences ``first`` to ``first + count - 1`` of the run."""
        return np.array([self._epoch(n // self.windows)[n % self.windows] for n in range(first, first + count)])


def evaluation_starts(tokens: int, length: int, count: int) -> npt.NDArray[np.int64]:
    """Index of the first token of up to ``count`` windows, spread evenly. ValueError if there is none."""
    windows = (tokens - 1) // length
    if windows < 1:
        raise ValueError(f"validation must have more than context_length = {length} tokens; got {tokens}")
    return np.linspace(0, windows - 1, min(count, windows)).round().astype(np.int64) * length


def sequences(
    tokens: Tokens, starts: npt.NDArray[np.int64], length: int
) -> tuple[Int[Tensor, "batch length"], Int[Tensor, "batch length"]]:
    """The sequences at `starts` and the token after each of their tokens; int64, on the CPU."""
    rows = torch.from_numpy(np.stack([tokens[start : start + length + 1] for start in starts]).astype(np.int64))
    return rows[:, :-1], rows[:, 1:]
