"""Text files become tokens once, and again when they change."""

from __future__ import annotations

import os

import numpy as np
import pytest

from cs336_systems.training import corpus as module
from cs336_systems.training.corpus import text_files, tokenise
from cs336_systems.training.tokens import ByteTokenizer


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "tokens"


def made(text, folder, pattern="*"):
    return tokenise([str(text)], pattern, ByteTokenizer(), folder)


def test_tokens_are_the_bytes_of_the_files_in_order_with_an_end_after_each(text, folder):
    (text / "inner").mkdir()
    (text / "inner/c.txt").write_text("é\n")
    expected = [*(text / "a.txt").read_bytes(), 256, *(text / "b.txt").read_bytes(), 256, *"é\n".encode(), 256]
    corpus = made(text, folder)
    assert corpus.tokens.tolist() == expected
    assert corpus.tokens.dtype == np.uint16
    assert corpus.files == 3


def test_what_is_no_text_or_hidden_or_of_another_name_is_left_out(text):
    (text / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n\0")
    (text / "latin.txt").write_bytes("caf\u00e9".encode("latin-1"))
    (text / "zeros.txt").write_bytes(b"a\0b")
    (text / ".hidden.txt").write_text("secret")
    (text / ".git").mkdir()
    (text / ".git/config").write_text("secret")
    (text / "note.md").write_text("note")
    assert [file.name for file in text_files([str(text)])] == ["a.txt", "b.txt", "note.md"]
    assert [file.name for file in text_files([str(text)], "*.md")] == ["note.md"]
    assert [file.name for file in text_files([str(text / "b.txt"), str(text)], "*.txt")] == ["b.txt", "a.txt"]


def test_tokenised_text_is_used_again(text, folder, monkeypatch):
    first = made(text, folder)
    monkeypatch.setattr(module, "_write", lambda *_: pytest.fail("tokenised again"))
    second = made(text, folder)
    assert (first.reused, second.reused) == (False, True)
    assert second.digest == first.digest
    assert second.tokens.tolist() == first.tokens.tolist()


@pytest.mark.parametrize("change", ["content", "time", "another file", "cut off", "no json", "half a json"])
def test_tokenised_text_is_made_again(text, folder, change):
    first = made(text, folder)
    binary, description = next(folder.glob("*.bin")), next(folder.glob("*.json"))
    if change == "content":
        (text / "a.txt").write_text("new")
    elif change == "time":
        os.utime(text / "a.txt", ns=(0, 0))
    elif change == "another file":
        (text / "c.txt").write_text("new")
    elif change == "cut off":
        content = binary.read_bytes()[:-2]
        binary.unlink()
        binary.write_bytes(content)
    elif change == "no json":
        description.unlink()
    else:
        description.write_text(description.read_text()[:50])
    second = made(text, folder)
    assert not second.reused
    assert (second.digest == first.digest) == (change not in ("content", "another file"))
    assert made(text, folder).reused
    assert len(list(folder.iterdir())) == 2


def test_a_crash_while_writing_leaves_what_was_there(text, folder, monkeypatch):
    made(text, folder)
    (text / "a.txt").write_text("new " * 10)

    class Crash(ByteTokenizer):
        def encode(self, text):
            if text.startswith("one"):
                raise KeyboardInterrupt
            return super().encode(text)

    with pytest.raises(KeyboardInterrupt):
        tokenise([str(text)], "*", Crash(), folder)
    assert not list(folder.glob(".*"))
    assert not list(folder.glob("*.json"))
    assert made(text, folder).tokens[:4].tolist() == [*b"new "]


def test_long_files_are_read_in_pieces_that_end_with_lines(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(module, "_PIECE", 5)
    content = "äö\nüß and more\nlast"
    (tmp_path / "long.txt").write_text(content)
    pieces = list(module._pieces(tmp_path / "long.txt"))
    assert len(pieces) > 1
    assert all(piece.endswith("\n") for piece in pieces[:-1])
    assert "".join(pieces) == content


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [("missing.txt", None, "that exist"), ("wrong.txt", b"\xff\xfe", "text in UTF-8")],
)
def test_wrong_files(tmp_path, folder, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        made(tmp_path / name, folder)


def test_a_folder_without_text(tmp_path, folder):
    with pytest.raises(ValueError, match=r"text files that match '\*\.md'; got none"):
        made(tmp_path, folder, "*.md")
