"""Turns prompts into token ids and block hashes, off the event loop.

Short prompts go to a thread (tokenizing runs without the GIL, and is over before a process had
been asked); long ones, and the hashing of many blocks, which holds the GIL, go to a pool of
processes that have loaded the tokenizer and nothing else. Knows no worker and no placement.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import threading
from array import array
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

from tandem.block_hash import hash_blocks
from tandem.errors import BadRequest
from tandem.models.tokenizer import Tokenizer
from tandem.router.request.request import Prompt, num_characters
from tandem.store.registry import KvCompatibility

log = logging.getLogger(__name__)

INLINE_CHARACTERS_MAX = 8_192
INLINE_TOKENS_MAX = 2_048


class PreparedPrompt(NamedTuple):
    token_ids: list[int]
    block_hashes: list[bytes]  # of the full blocks; empty while no KV compatibility is known


class PromptPreparer:
    """Threads and processes that prepare prompts. `close` ends them."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, *, num_processes: int) -> None:
        self._folder = folder
        self._tokenizer = tokenizer
        self._num_processes = num_processes
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenize")
        self._processes = self._new_processes()

    def warm_up(self) -> None:
        """Starts the first process now rather than with the first long prompt."""
        self._processes.submit(os.getpid)

    async def prepare(
        self, prompt: Prompt, compatibility: KvCompatibility | None, cache_salt: bytes = b""
    ) -> PreparedPrompt:
        """Raises BadRequest for a chat that the model's template refuses."""
        loop = asyncio.get_running_loop()
        work = (prompt, compatibility, cache_salt)
        if _is_short(prompt):
            return await loop.run_in_executor(self._threads, _prepare, self._tokenizer, *work)
        try:
            ids, hashes = await loop.run_in_executor(self._processes, _prepare_there, *work)
        except BrokenProcessPool:
            log.exception("a tokenizer process died; starting anew")
            self._processes.shutdown(wait=False)
            self._processes = self._new_processes()
            ids, hashes = await loop.run_in_executor(self._processes, _prepare_there, *work)
        return PreparedPrompt(ids.tolist(), hashes)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._processes.shutdown(wait=False, cancel_futures=True)

    def _new_processes(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(
            self._num_processes,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start_process,
            initargs=(self._folder,),
        )


def _is_short(prompt: Prompt) -> bool:
    if isinstance(prompt, tuple):
        return len(prompt) <= INLINE_TOKENS_MAX
    return num_characters(prompt) <= INLINE_CHARACTERS_MAX


def _prepare(
    tokenizer: Tokenizer, prompt: Prompt, compatibility: KvCompatibility | None, cache_salt: bytes
) -> PreparedPrompt:
    if isinstance(prompt, tuple):
        token_ids = list(prompt)
    elif isinstance(prompt, str):
        token_ids = tokenizer.encode(prompt)
    else:
        token_ids = tokenizer.encode_chat([asdict(m) for m in prompt.messages])
    if compatibility is None:
        return PreparedPrompt(token_ids, [])
    root = compatibility.chain_root(cache_salt)
    return PreparedPrompt(token_ids, hash_blocks(root, token_ids, compatibility.block_size))


_process_tokenizer: Tokenizer | None = None


def _start_process(folder: Path) -> None:
    global _process_tokenizer
    # Ctrl-C reaches the whole process group; the router ends this process when it is ready to.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _process_tokenizer = Tokenizer(folder)


def _exit_with_parent() -> None:
    """Exits with the router, even with a killed one: the pool's pipes alone would not tell."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(0)


def _prepare_there(
    prompt: Prompt, compatibility: KvCompatibility | None, cache_salt: bytes
) -> tuple[array[int], list[bytes]]:
    """Returns token ids as an array: a list of 100,000 ints is slow to unpickle."""
    assert _process_tokenizer is not None
    try:
        prepared = _prepare(_process_tokenizer, prompt, compatibility, cache_salt)
    except BadRequest as error:
        # Its keyword arguments do not survive pickling.
        raise BadRequest(error.message) from None
    return array("I", prepared.token_ids), prepared.block_hashes
