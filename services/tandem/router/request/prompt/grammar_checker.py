"""Checks clients' grammars in separate processes that may fail.

A grammar may exhaust the stack, memory or time of the process that compiles it. A worker compiles
in its engine process, which must not be killed. So the router compiles each grammar first, and no
worker receives a grammar that failed:
1. The first check starts the checker process, which loads the tokenizer.
2. For each check, a thread of the router sends a socket to the checker process, and then sends the
wanted form through that socket.
3. The checker process forks an overseer, which forks a compiling process. The compiling process has
limits of CPU time, memory and stack, and sends its answer through the socket.
4. If the compiling process dies, the overseer sends the reason through the socket.
A grammar that exceeds a limit ends only the compiling process. Nothing has to be restarted, and no
other check is affected. CPU time does not depend on the load of the machine.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path

from tandem.errors import BadRequest, CompilerBusy
from tandem.models.grammars.compiler import GrammarCompiler
from tandem.models.grammars.text import StructuredOutput, grammar_text, refused

MEMORY_BYTES = 256 << 20  # limit of one check, in addition to the memory of the idle checker
RETRY_AFTER_S = 2.0
_WAIT_S = 60.0  # longest wait for an answer; the first one includes loading the tokenizer
# Stack of the thread that compiles. An engine's threads have four times as much, so a grammar that
# passes the check does not exhaust the stack of an engine.
_STACK_BYTES = 2 << 20
_BEGUN = b" "  # sent when a check begins; the answer, which is JSON, follows
_FAILED = 1  # exit status of a check that ended without an answer
_ENDS = {
    -signal.SIGPROF: "time",
    -signal.SIGABRT: "memory",  # Rust aborts when an allocation fails
    -signal.SIGSEGV: "stack",
    -signal.SIGBUS: "stack",
    _FAILED: "failed",
}


class GrammarChecker:
    """The process that checks grammars. The first check starts it; `close` ends it.

    `check` may be called in any thread and blocks it.
    """

    def __init__(
        self,
        tokenizer_file: Path,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        self._arguments = json.dumps([str(tokenizer_file), vocab_size, list(eos_token_ids)])
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._closed = False

    def check(self, wanted: StructuredOutput, cpu_s: float) -> str | None:
        """Returns the grammar, or None if `cpu_s` seconds of CPU time are not enough to compile it.

        Raises BadRequest if the grammar cannot be compiled, and CompilerBusy if the checker process
        ended or took too long.
        """
        form = json.dumps([cpu_s, self._memory_bytes, *astuple(wanted)]).encode()
        if not (answer := self._ask(form)):
            # The process ended before it began this check, so the grammar is not the cause.
            with self._lock, contextlib.suppress(subprocess.TimeoutExpired):
                if self._process is not None:
                    self._process.wait(1.0)
            answer = self._ask(form)
        try:
            end, text = json.loads(answer)
        except ValueError:
            raise CompilerBusy(
                "the grammar compiler ended or took too long; try again",
                retry_after_s=RETRY_AFTER_S,
            ) from None
        match end:
            case "done":
                return str(text)
            case "refused":
                raise BadRequest(text, param=wanted.field)
            case "time":
                return None
            case "memory":
                why = f"to compile it takes over {self._memory_bytes >> 20} MB of memory"
            case "stack":
                why = "it is too deeply nested: the compiler ran out of its stack"
            case _:
                why = "the compiler failed"
        raise refused(wanted.field, why)

    def close(self) -> None:
        """Ends the process and all checks."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            if self._control is not None:
                self._control.close()

    def _ask(self, form: bytes) -> bytes:
        """Runs a check and returns the answer.

        The answer is empty if no check began, and incomplete if the process ended during the check.
        """
        ours, theirs = socket.socketpair()
        answer = b""
        with ours:
            with theirs:
                self._send(theirs)
            ours.settimeout(_WAIT_S)
            with contextlib.suppress(OSError):
                ours.sendall(form)
                ours.shutdown(socket.SHUT_WR)
                while part := ours.recv(1 << 16):
                    answer += part
        return answer

    def _send(self, connection: socket.socket) -> None:
        """Sends a check's socket to the process; starts the process if necessary."""
        with self._lock:
            if self._closed:
                raise CompilerBusy("the router stops", retry_after_s=RETRY_AFTER_S)
            if self._process is None or self._process.poll() is not None:
                if self._control is not None:
                    self._control.close()
                self._start()
            assert self._control is not None
            with contextlib.suppress(OSError):  # the process has just ended, so no check begins
                socket.send_fds(self._control, [b"\0"], [connection.fileno()])

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            arguments = [sys.executable, "-m", "tandem.router.request.prompt.grammar_checker"]
            self._process = subprocess.Popen(
                [*arguments, str(theirs.fileno()), self._arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # Ctrl-C must reach only the router, which ends this process
                start_new_session=True,
                env={**os.environ, "MALLOC_ARENA_MAX": "1", "TOKENIZERS_PARALLELISM": "false"},
            )


def _serve(control: socket.socket, compiler: GrammarCompiler) -> None:
    """Forks a process for each check until the router has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks are not awaited
    while fds := socket.recv_fds(control, 1, 1)[1]:
        with socket.socket(fileno=fds[0]) as connection:
            if not os.fork():
                control.close()
                _oversee(connection, compiler)


def _oversee(connection: socket.socket, compiler: GrammarCompiler) -> None:
    """Answers one check, even if the process that runs it is killed."""
    connection.sendall(_BEGUN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if not pid:
        os._exit(_answer(connection, compiler))
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if end := _ENDS.get(status):
        connection.sendall(json.dumps([end, ""]).encode())
    os._exit(0)


def _answer(connection: socket.socket, compiler: GrammarCompiler) -> int:
    """Runs one check in a thread with a small stack; returns the exit status."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # no output of the compiler in the router's log
    request = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    cpu_s, memory_bytes, *fields = json.loads(request)
    answers: list[tuple[str, str]] = []
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(
        target=lambda: answers.append(_check(compiler, StructuredOutput(*fields)))
    )
    with open("/proc/self/statm") as statm:
        own_bytes = int(statm.read().split()[0]) * resource.getpagesize()
    limit = own_bytes + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    thread.start()
    thread.join()
    signal.setitimer(signal.ITIMER_PROF, 0)
    if not answers:
        return _FAILED
    connection.sendall(json.dumps(answers[0]).encode())
    return 0


def _check(compiler: GrammarCompiler, wanted: StructuredOutput) -> tuple[str, str]:
    """Returns (result, grammar or reason) of a check."""
    try:
        return "done", checked_grammar(compiler, wanted)
    except BadRequest as error:
        return "refused", error.message
    except MemoryError:
        return "memory", ""


def checked_grammar(compiler: GrammarCompiler, wanted: StructuredOutput) -> str:
    """Returns the grammar of a form. Raises BadRequest if no completion can follow it."""
    text = grammar_text(wanted)
    if why := compiler.check(text):
        raise refused(wanted.field, why)
    return text


def main() -> None:
    """Runs the checker process, which only a router starts."""
    control = socket.socket(fileno=int(sys.argv[1]))
    file, vocab_size, eos_token_ids = json.loads(sys.argv[2])
    compiler = GrammarCompiler(Path(file), vocab_size, eos_token_ids)
    compiler.load()
    gc.freeze()
    _serve(control, compiler)


if __name__ == "__main__":
    main()
