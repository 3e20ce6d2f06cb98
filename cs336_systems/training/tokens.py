"""From text to tokens and back: bytes by default, or the vocabulary of a `tokenizers` or tiktoken file."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

END_OF_DOCUMENT = "<|endoftext|>"
"""The token that separates documents, in the vocabularies that have it by this name."""


class Tokenizer(Protocol):
    """What training needs of a tokenizer.

    Attributes:
        name: what it is, and of which content; equal names give equal tokens.
        size: how many tokens there are.
        end_of_document: the token after each file.
    """

    name: str
    size: int
    end_of_document: int

    def encode(self, text: str) -> Sequence[int]:
        """The tokens of a text."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens. What is no character becomes U+FFFD, and the end of a document a line of its own."""
        ...


class ByteTokenizer:
    """Each byte of UTF-8 is a token, and a 257th ends a document."""

    name = "bytes"
    size = 257
    end_of_document = 256

    def encode(self, text: str) -> Sequence[int]:
        """The bytes."""
        return text.encode()

    def decode(self, tokens: Sequence[int]) -> str:
        """The text; tokens that no text has, with which a vocabulary is filled up, become U+FFFD."""
        pieces: list[bytes] = []
        for token in tokens:
            if token < 256:
                pieces.append(bytes((token,)))
            else:
                pieces.append(_END_LINE.encode() if token == self.end_of_document else "�".encode())
        return b"".join(pieces).decode(errors="replace")


_END_LINE = f"\n{END_OF_DOCUMENT}\n"


class TokenizersFile:
    """A JSON file of Hugging Face's `tokenizers`. It must have the token ``<|endoftext|>``.

    Raises:
        ValueError: the file is no such JSON, the package is not installed, or that token is missing.
    """

    def __init__(self, path: Path) -> None:
        try:
            import tokenizers
        except ImportError:
            raise ValueError(
                f"tokenizer {path} needs the package tokenizers, which is not installed: pip install tokenizers"
            ) from None
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises plain Exception
            raise ValueError(f"tokenizer must be a JSON file of the package tokenizers; got {path}: {error}") from error
        self.name = f"tokenizers {_hash_of(path)}"
        # Identifiers may have gaps, and added tokens may lie above them.
        self.size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        end = self._tokenizer.token_to_id(END_OF_DOCUMENT)
        if end is None:
            raise ValueError(f"tokenizer must have the token {END_OF_DOCUMENT}, which ends documents; {path} has not")
        self.end_of_document = int(end)

    def encode(self, text: str) -> Sequence[int]:
        """The tokens, without any that a template would add."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text, special tokens among it."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))


class TiktokenFile:
    """A file of tiktoken's: a token in base64 and its rank on each line.

    Such a file does not say how text is split into words before its pairs are merged: here as GPT-2's vocabulary does.

    Raises:
        ValueError: the file is no such file, or the package is not installed.
    """

    def __init__(self, path: Path) -> None:
        try:
            import tiktoken
            from tiktoken.load import load_tiktoken_bpe
            from tiktoken_ext.openai_public import r50k_pat_str
        except ImportError:
            raise ValueError(
                f"tokenizer {path} needs the package tiktoken, which is not installed: pip install tiktoken"
            ) from None
        try:
            ranks = load_tiktoken_bpe(str(path))
            self.end_of_document = 1 + max(ranks.values())
            special = {END_OF_DOCUMENT: self.end_of_document}
            self._encoding: Any = tiktoken.Encoding(
                path.stem, pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special
            )
        except Exception as error:  # a wrong file fails in many ways, in Python and in Rust
            raise ValueError(f"tokenizer must be a file of ranks for tiktoken; got {path}: {error}") from error
        self.name = f"tiktoken {_hash_of(path)}"
        self.size = self.end_of_document + 1

    def encode(self, text: str) -> Sequence[int]:
        """The tokens; the name of a special one is ordinary text."""
        return list(self._encoding.encode_ordinary(text))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text, the end of a document among it; identifiers above the vocabulary become U+FFFD."""
        known = [token for token in tokens if token < self.size]
        return str(self._encoding.decode(known)) + "�" * (len(tokens) - len(known))


def open_tokenizer(file: str | None) -> Tokenizer:
    """The tokenizer of a file: ``.json`` for tokenizers, ``.tiktoken`` for tiktoken; bytes if None.

    Raises:
        ValueError: there is no such file, it has another ending, or the package that reads it is missing.
    """
    if file is None:
        return ByteTokenizer()
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"tokenizer must be a file; got {file}")
    if path.suffix == ".json":
        return TokenizersFile(path)
    if path.suffix == ".tiktoken":
        return TiktokenFile(path)
    raise ValueError(f"tokenizer must be a file that ends in .json or .tiktoken; got {file}")


def _hash_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
