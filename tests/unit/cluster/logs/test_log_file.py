"""Logs with a largest size: of a real detached process, and of one that it started."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from tandem.cluster.logs.run_logs import lines
from tandem.cluster.processes import process
from tandem.errors import BadRequest
from tandem.net.observability.log_file import LogPosition, older, read_piece

WRITER = """
import logging, os, socket, subprocess, sys
from pathlib import Path
from tandem.net.observability.log_file import FILE_VARIABLE, LogFileHandler

logging.basicConfig(handlers=[LogFileHandler(Path(os.environ[FILE_VARIABLE]), 2000)])
is_child = len(sys.argv) > 1
if is_child:
    turns = socket.socket(fileno=int(sys.argv[1]))
else:
    turns, other = socket.socketpair()
    command = [sys.executable, "-c", sys.orig_argv[2], str(other.fileno())]
    engine = subprocess.Popen(command, pass_fds=[other.fileno()])
for number in range(200):
    if is_child:
        turns.recv(1)
    logging.error("%s %04d", "child" if is_child else "parent", number)
    os.write(1, b"native code\\n")
    turns.send(b"x")
    if not is_child:
        turns.recv(1)
"""


def test_a_log_begins_anew_and_loses_nothing_of_what_is_kept(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER]
    running = process.start("decode-0", command, tmp_path, os.environ)
    assert running.wait(60.0)
    running.close()
    log = process.log_path(tmp_path, "decode-0")
    text = older(log).read_text() + log.read_text()
    assert sorted(path.name for path in log.parent.iterdir()) == ["decode-0.log", "decode-0.log.1"]
    for path in (log, older(log)):
        assert path.stat().st_size < 2000 + 1000, "one writes to the old file for ever"
    for writer in ("parent", "child"):
        numbers = [int(line[-4:]) for line in text.splitlines() if f":{writer} " in line]
        assert numbers == list(range(numbers[0], 200)), f"lines of the {writer} are missing"
    assert "native code" in log.read_text()


def test_a_log_is_followed_when_it_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "decode-0.log"
    older(path).write_text("zero\n")
    path.write_text("one\n")
    is_over = threading.Event()
    followed = lines(path, is_over.is_set)
    assert [next(followed), next(followed)] == ["zero\n", "one\n"]
    with path.open("a") as stream:
        stream.write("two\n")
    path.rename(older(path))
    path.write_text("three\n")
    is_over.set()
    assert list(followed) == ["two\n", "three\n"]


def read_all(
    path: Path, after: LogPosition, bytes_max: int = 1000
) -> tuple[list[str], LogPosition]:
    """Reads pieces until there are no more. Returns them, and the place."""
    found = []
    while True:
        text, after = read_piece(path, after, bytes_max)
        if not text:
            return found, after
        found.append(text.decode())


def test_a_log_is_read_in_pieces_of_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "decode-0.log"
    path.write_text("one\ntwo\nthree\nü\na line longer than a piece\n\nlast")
    pieces, place = read_all(path, LogPosition(), 10)
    assert "".join(pieces) == path.read_text()
    assert pieces[:3] == ["one\ntwo\n", "three\nü\n", "a line lon"]
    with path.open("a") as stream:
        stream.write(" one\nmore\n")
    assert read_all(path, LogPosition.parse(str(place)))[0] == [" one\nmore\n"]


def test_a_reader_goes_on_where_a_log_began_anew(tmp_path: Path) -> None:
    path = tmp_path / "decode-0.log"
    path.write_text("one\n")
    _, place = read_all(path, LogPosition())
    with path.open("a") as stream:
        stream.write("two\n")
    path.rename(older(path))
    assert read_all(path, place)[0] == ["two\n"]  # the new one is not there yet
    path.write_text("three\n")
    assert read_all(path, place)[0] == ["two\n", "three\n"]
    assert read_all(path, LogPosition())[0] == ["one\ntwo\n", "three\n"]
    place = read_all(path, place)[1]
    assert read_all(path, place) == ([], place)
    for text in ("four\n", "five\n"):  # now the file of the place is gone
        path.rename(older(path))
        path.write_text(text)
    path.rename(older(path))
    path.write_text("six\n")
    assert read_all(path, place)[0] == ["five\n", "six\n"]


def test_a_file_that_was_cut_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "decode-0.log"
    assert read_piece(path, LogPosition(7, 9)) == (b"", LogPosition(7, 9))  # no file
    path.write_text("a long line\n")
    place = read_all(path, LogPosition())[1]
    path.write_text("short\n")
    assert read_all(path, place)[0] == ["short\n"]


@pytest.mark.parametrize("text", ["x", "1", "-1", "1-", "1--2", "1-2\n", f"1-{'9' * 19}"])
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="it must be the `after` of the previous answer"):
        LogPosition.parse(text)
