"""Tokenizers: text comes back, and what is missing is said."""

from __future__ import annotations

import base64

import pytest

from cs336_systems.training.tokens import ByteTokenizer, open_tokenizer


def test_bytes_come_back():
    tokenizer = ByteTokenizer()
    text = "plain, naïve, 你好\n"
    assert tokenizer.decode(list(tokenizer.encode(text))) == text
    assert tokenizer.decode([*b"a", 256, *b"b", 300, 0xC3]) == "a\n<|endoftext|>\nb\ufffd\ufffd"


def test_a_tokenizers_file(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(["the cat sat on the mat"] * 10, trainer)
    trained.save(str(tmp_path / "bpe.json"))
    tokenizer = open_tokenizer(str(tmp_path / "bpe.json"))
    tokens = list(tokenizer.encode("the cat"))
    assert len(tokens) < len("the cat")
    assert tokenizer.decode(tokens) == "the cat"
    assert max(tokens) < tokenizer.size
    assert tokenizer.end_of_document == 0


def test_a_tiktoken_file(tmp_path):
    pytest.importorskip("tiktoken")
    ranks = [bytes((byte,)) for byte in range(256)] + [b"th", b"the"]
    lines = [base64.b64encode(token) + b" " + str(rank).encode() for rank, token in enumerate(ranks)]
    (tmp_path / "small.tiktoken").write_bytes(b"\n".join(lines) + b"\n")
    tokenizer = open_tokenizer(str(tmp_path / "small.tiktoken"))
    assert list(tokenizer.encode("the")) == [257]
    assert tokenizer.decode(list(tokenizer.encode("the cät <|endoftext|>"))) == "the cät <|endoftext|>"
    assert (tokenizer.end_of_document, tokenizer.size) == (258, 259)
    assert tokenizer.decode([258, 300]) == "<|endoftext|>\ufffd"


@pytest.mark.parametrize("ending", ["json", "tiktoken"])
def test_without_the_package_the_message_says_what_to_install(tmp_path, monkeypatch, ending):
    package = {"json": "tokenizers", "tiktoken": "tiktoken"}[ending]
    monkeypatch.setitem(__import__("sys").modules, package, None)
    (tmp_path / f"file.{ending}").write_text("{}")
    with pytest.raises(ValueError, match=f"pip install {package}"):
        open_tokenizer(str(tmp_path / f"file.{ending}"))


def test_wrong_files(tmp_path):
    with pytest.raises(ValueError, match="tokenizer must be a file; got"):
        open_tokenizer(str(tmp_path / "none.json"))
    (tmp_path / "model.bin").write_text("")
    with pytest.raises(ValueError, match=r"ends in \.json or \.tiktoken"):
        open_tokenizer(str(tmp_path / "model.bin"))
