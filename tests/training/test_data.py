"""Tokenizers, text files as tokens, and the order of the data: every window once per epoch, a function of the step."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from cs336_systems.training import data as module
from cs336_systems.training.data import (
    ByteTokenizer,
    EpochOrder,
    evaluation_starts,
    open_tokenizer,
    open_tokens,
    prepare,
    sequences,
    text_files,
    write_tokens,
)


def test_bytes_come_back():
    tokenizer = ByteTokenizer()
    text = "plain, naïve, 你好\n"
    assert tokenizer.decode(list(tokenizer.encode(text))) == text
    assert tokenizer.decode([*b"a", 256, *b"b", 300, 0xC3]) == "a\n<|endoftext|>\nb\ufffd\ufffd"


def test_a_tokenizer_file_is_copied_into_the_run(options, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer, trained.decoder = byte_level(add_prefix_space=False), tokenizers.decoders.ByteLevel()
    special = {"special_tokens": ["<|endoftext|>"], "initial_alphabet": byte_level.alphabet(), "show_progress": False}
    trained.train_from_iterator(["the cat sat"] * 9, tokenizers.trainers.BpeTrainer(vocab_size=300, **special))
    trained.save(str(tmp_path / "bpe.json"))
    config = options(tokenizer=str(tmp_path / "bpe.json"))
    prepare(config, tmp_path / "run")
    (tmp_path / "bpe.json").unlink()
    tokenizer = open_tokenizer(config, tmp_path / "run")
    tokens = list(tokenizer.encode("the cat"))
    assert len(tokens) < len("the cat")
    assert tokenizer.decode(tokens) == "the cat"
    assert max(tokens) < tokenizer.size
    assert open_tokens(config, tmp_path / "run", tokenizer)[0][: len(tokens)].tolist() == tokens
    assert tokenizer.end_of_document == 0


def test_tokenizer_files_that_cannot_be_used(options, tmp_path, monkeypatch):
    (tmp_path / "wrong.json").write_text("{}")
    config = options(tokenizer=str(tmp_path / "wrong.json"))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "tokenizers", None)
        with pytest.raises(ValueError, match="pip install tokenizers"):
            open_tokenizer(config)
    pytest.importorskip("tokenizers")
    with pytest.raises(ValueError, match=r"tokenizer must be a file with <\|endoftext\|>; got .*wrong\.json: "):
        open_tokenizer(config)


def test_which_files_are_read(text):
    for name in ("image.png", "note.md", "inner/c.md"):
        (text / name).parent.mkdir(exist_ok=True)
        (text / name).touch()
    assert [file.name for file in text_files([str(text)], "*.txt")] == ["a.txt", "b.txt"]
    assert [file.name for file in text_files([str(text / "b.txt"), str(text)], "*.txt")] == ["b.txt", "a.txt"]
    assert [file.name for file in text_files([str(text)], "*.md")] == ["c.md", "note.md"]
    for path, pattern in (("none.txt", "*"), ("inner", "*.rst")):
        with pytest.raises(ValueError, match="data must be text files, or folders with files that match"):
            text_files([str(text / path)], pattern)


def test_tokens_are_the_bytes_of_the_files_with_an_end_after_each(options, text, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHARACTERS_AT_A_TIME", 5)
    (text / "c.txt").write_bytes("äö\r\nüß and more\nlast".encode())
    config = options(val_fraction=0.1)
    prepare(config, tmp_path / "run")
    train, validation = open_tokens(config, tmp_path / "run", ByteTokenizer())
    assert validation is not None
    expected = [token for file in sorted(text.iterdir()) for token in (*file.read_bytes(), 256)]
    assert [*train, *validation] == expected
    assert len(validation) == len(expected) // 10
    assert train.dtype == np.uint16
    assert open_tokens(options(val_fraction=0.0), tmp_path / "run", ByteTokenizer())[1] is None


def test_separate_files_for_validation(options, text, tmp_path):
    (tmp_path / "other.txt").write_text("x" * 100)
    config = options(val_data=[str(tmp_path / "other.txt")])
    prepare(config, tmp_path / "run")
    train, validation = open_tokens(config, tmp_path / "run", ByteTokenizer())
    assert validation is not None
    assert validation.tolist() == [120] * 100 + [256]
    assert len(train) == sum(file.stat().st_size + 1 for file in text.iterdir())


def test_text_that_is_not_utf_8_leaves_no_file(tmp_path):
    (tmp_path / "wrong.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"data must be text in UTF-8; got .*wrong\.txt"):
        write_tokens(tmp_path / "run/train.bin", [tmp_path / "wrong.txt"], ByteTokenizer())
    assert not list((tmp_path / "run").iterdir())


def test_an_epoch_has_every_window_once_in_a_random_order():
    order = EpochOrder(203, 8, seed=3)
    assert order.windows == 24
    epochs = [order.starts(epoch * 24, 24) for epoch in range(9)]
    for starts in epochs:
        assert sorted(starts - min(starts)) == list(range(0, 192, 8))
        assert 0 <= min(starts) < 8
        assert max(starts) + 8 < 203  # the last target
    assert len({min(starts) for starts in epochs}) > 2
    assert len({tuple(starts - min(starts)) for starts in epochs}) == 9
    assert (EpochOrder(203, 8, seed=4).starts(0, 24) != epochs[0]).any()


def test_a_step_can_span_epochs_and_needs_only_its_number():
    order = EpochOrder(203, 8, seed=3)
    straight = order.starts(0, 100)
    assert EpochOrder(203, 8, seed=3).starts(40, 12).tolist() == straight[40:52].tolist()
    assert EpochOrder(16, 8, seed=0).windows == 1
    with pytest.raises(ValueError, match="data must have at least 2 · context_length = 16 tokens; got 15"):
        EpochOrder(15, 8, seed=0)


def test_targets_follow_tokens():
    tokens, targets = sequences(np.arange(100, dtype=np.uint16), np.array([3, 40]), 8)
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == [[*range(3, 11)], [*range(40, 48)]]
    assert torch.equal(targets, tokens + 1)


def test_windows_for_validation_are_spread_evenly():
    assert evaluation_starts(81, 8, 4).tolist() == [0, 24, 48, 72]
    assert evaluation_starts(81, 8, 99).tolist() == list(range(0, 80, 8))
    with pytest.raises(ValueError, match="validation must have more than context_length = 8 tokens; got 8"):
        evaluation_starts(8, 8, 4)
