"""Compiles clients' grammars in separate processes, so that a bad grammar harms no worker.

A grammar may exhaust the stack, memory or time of the process that compiles the grammar. A worker
compiles grammars in its engine process, which must not die. So the router compiles each grammar
first, as a check, and workers receive only grammars that have passed. There are three kinds of
processes:
    checker      one for the router; started by the first check; loads the tokenizer
    overseer     one for each check, forked by the checker
    compiler     one for each check, forked by the overseer, with limits of CPU time, memory and
                 stack
For a check, the router sends a socket to the checker, and then the grammar through this socket. The
compiler sends the result through the socket. If the compiler dies, the overseer sends the reason
instead. So a grammar that exceeds a limit ends only its own compiler, and affects no other check.
CPU time is limited instead of real time, because it does not depend on the load of the machine.
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

MEMORY_BYTES = 256 << 20  # largest memory of one check, on top of the memory of the idle checker
RETRY_AFTER_S = 2.0
_WAIT_S = 60.0  # longest wait for a result, including the load of the tokenizer by the first check
# Stack size in bytes of the thread that compiles a grammar for a check. An engine's threads have
# four times as much, so a grammar that passes the check does not exhaust an engine's stack.
_STACK_BYTES = 2 << 20
_BEGUN = b" "  # the overseer sends this when a check begins, before the result in JSON
_FAILED = 1  # exit status of a compiler that ended without a result
_ENDS = {
    -signal.SIGPROF: "time",
    -signal.SIGABRT: "memory",  # Rust aborts when an allocation fails
    -signal.SIGSEGV: "stack",
    -signal.SIGBUS: "stack",
    _FAILED: "failed",
}


class GrammarChecker:
    """Checks grammars for the router. The first check starts the checker process; `close` ends it.

    `check` may be called in any thread, and blocks until the result is there.
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
            # The checker process ended before the check began, so the grammar is not the cause. The
            # check is tried once more, in a new checker process.
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
                why = f"compiling it takes over {self._memory_bytes >> 20} MB of memory"
            case "stack":
                why = "it is too deeply nested: the compiler ran out of its stack"
            case _:
                why = "the compiler failed"
        raise refused(wanted.field, why)

    def close(self) -> None:
        """Ends the checker process and all running checks."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            if self._control is not None:
                self._control.close()

    def _ask(self, form: bytes) -> bytes:
        """Runs a check and returns the result as JSON.

        The JSON is empty if no check began, and incomplete if the checker ended during the check.
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
        """Sends a check's socket to the checker process, and starts that process if necessary."""
        with self._lock:
            if self._closed:
                raise CompilerBusy("the router is shutting down", retry_after_s=RETRY_AFTER_S)
            if self._process is None or self._process.poll() is not None:
                if self._control is not None:
                    self._control.close()
                self._start()
            assert self._control is not None
            with contextlib.suppress(OSError):  # raised if the checker has just ended
                socket.send_fds(self._control, [b"\0"], [connection.fileno()])

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            arguments = [sys.executable, "-m", "tandem.router.request.prompt.grammar_checker"]
            self._process = subprocess.Popen(
                [*arguments, str(theirs.fileno()), self._arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # Ctrl-C must not reach the checker, because the router ends the checker.
                start_new_session=True,
                env={**os.environ, "MALLOC_ARENA_MAX": "1", "TOKENIZERS_PARALLELISM": "false"},
            )


def _serve(control: socket.socket, compiler: GrammarCompiler) -> None:
    """Forks an overseer for each check until the router has ended. Runs in the checker."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended overseers leave no zombie processes
    while fds := socket.recv_fds(control, 1, 1)[1]:
        with socket.socket(fileno=fds[0]) as connection:
            if not os.fork():
                control.close()
                _oversee(connection, compiler)


def _oversee(connection: socket.socket, compiler: GrammarCompiler) -> None:
    """Forks a compiler for one check, and reports the reason if the compiler dies."""
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
    """Compiles one grammar in a thread with a small stack. Returns the compiler's exit status."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # keep stderr of llguidance out of the log
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
    """Returns ("done", grammar), ("refused", reason) or ("memory", "")."""
    try:
        return "done", checked_grammar(compiler, wanted)
    except BadRequest as error:
        return "refused", error.message
    except MemoryError:
        return "memory", ""


def checked_grammar(compiler: GrammarCompiler, wanted: StructuredOutput) -> str:
    """Returns the grammar of a constraint. Raises BadRequest if no completion can satisfy it."""
    text = grammar_text(wanted)
    if why := compiler.check(text):
        raise refused(wanted.field, why)
    return text


def main() -> None:
    """The program of the checker process. The router starts it (`GrammarChecker`)."""
    control = socket.socket(fileno=int(sys.argv[1]))
    file, vocab_size, eos_token_ids = json.loads(sys.argv[2])
    compiler = GrammarCompiler(Path(file), vocab_size, eos_token_ids)
    compiler.load()
    gc.freeze()
    _serve(control, compiler)


if __name__ == "__main__":
    main()
