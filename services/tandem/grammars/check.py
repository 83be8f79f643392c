"""Checks what clients ask for, in a process of its own.

A grammar that exhausts the stack ends the process that compiles it. So a router compiles each one
before a worker does: on a smaller stack, in a process that has nothing else to do.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tandem.errors import BadRequest
from tandem.grammars.compiler import GrammarCompiler
from tandem.grammars.text import StructuredOutput, grammar_text, refused

_STACK_BYTES = 1 << 20  # an engine's threads have twice as much at least

_thread: ThreadPoolExecutor | None = None
_compiler: GrammarCompiler | None = None


def start(tokenizer_file: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
    """Prepares the process."""
    global _thread, _compiler
    threading.stack_size(_STACK_BYTES)
    _thread = ThreadPoolExecutor(1)
    _compiler = GrammarCompiler(tokenizer_file, vocab_size, eos_token_ids)


def check(wanted: StructuredOutput) -> tuple[str, str]:
    """Returns the grammar, and why it is refused; empty if it is not."""
    assert _thread is not None
    return _thread.submit(_check, wanted).result()


def _check(wanted: StructuredOutput) -> tuple[str, str]:
    assert _compiler is not None
    try:
        text = grammar_text(wanted)
        if why := _compiler.check(text):
            raise refused(wanted.field, why)
    except BadRequest as error:
        return "", error.message
    return text, ""
