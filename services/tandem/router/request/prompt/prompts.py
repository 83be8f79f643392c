"""Turns prompts into token ids and block hashes, off the event loop.

The length of a prompt determines how it is prepared:
- short prompt: A thread tokenizes and hashes it. A thread is faster than a process here, because no
  message to a process is needed, and tokenizing releases the GIL.
- longer prompt: A process tokenizes and hashes it. Hashing many blocks holds the GIL, so a thread
  would delay the event loop.
- very long text, of which all tokens are needed: The tokens are first counted piece by piece
  (`pieces.py`). If the text certainly does not fit, it is refused with ContextTooLong. Otherwise a
  process tokenizes and hashes the text.
- very long text, of which only the last tokens are needed (truncation): Only the end is tokenized,
  piece by piece. A text that cannot be cut into pieces, or of which an encoder needs the first
  tokens, is tokenized whole, in a separate process, so that the text delays no other prompt.

The processes load the tokenizer and nothing else. Tenants take turns at the threads and processes
(`fair_executor.py`). Each piece is a separate job, so a client that leaves occupies at most one
running job. A process whose job exceeds the deadline is killed. This module knows no workers and no
placement.

Grammars are checked in further processes (grammar_checker.py). Tenants take turns at these checks,
too. A grammar that exceeds the CPU time limit of the first try gets a second try:
    Try    CPU time limit    Checks at a time    Grammars
    1      0.5 s             2                   all; nearly all compile in this time
    2      5 s               1                   very large grammars, which delay no first tries
A grammar that exceeds the second limit, too, is refused. The refusal is cached for `_REFUSED_S`
seconds.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import resource
import signal
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain as chained
from itertools import takewhile
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

import msgspec

from tandem.common.block_hash import Chain, hash_blocks
from tandem.common.process.garbage import exempt_loaded
from tandem.common.prompt_image import PromptImage, image_marks
from tandem.errors import BadRequest, CompilerBusy, ConfigError, TokenizerLate
from tandem.models.files import first_line
from tandem.models.grammars.text import StructuredOutput, refused
from tandem.models.images import IMAGES_MAX, ImageRules, ReadImage, read_image, with_images
from tandem.models.tokenizer.check import MEMORY_BYTES
from tandem.models.tokenizer.pair_template import Pair
from tandem.models.tokenizer.tokenizer import RenderedText, Tokenizer, check_unicode
from tandem.router.request.conversation import Conversation
from tandem.router.request.prompt.fair_executor import FairExecutor, LateJob
from tandem.router.request.prompt.grammar_checker import RETRY_AFTER_S, GrammarChecker
from tandem.router.request.prompt.pieces import (
    CONTEXT_CHARACTERS,
    PIECE_CHARACTERS,
    at_least,
    cut,
    find_cut,
    is_counted_first,
)
from tandem.router.request.request import ClientRequest, Prompt, num_characters

# The cost of preparing a prompt is measured in characters: each character of text costs 1.
INLINE_COST_MAX = 8_192  # a thread prepares prompts up to this cost; processes prepare the others
_TOKEN_COST = 4  # cost of one token id of a prompt that is sent as token ids
_MESSAGE_COST = 32  # cost of a chat message besides its characters: the text around the message
_NUM_THREADS = 2
# a prompt before it is tokenized
_Text = RenderedText | tuple[int, ...] | Conversation | Pair
# Largest time in seconds of one job of a thread or process. The longest text takes a few seconds.
JOB_DEADLINE_S = 60.0
# Largest time in seconds of the check of one grammar: both tries, the waits for the tenant's turn,
# and the start of the checker process before the first check.
GRAMMAR_DEADLINE_S = 15.0
GRAMMAR_CPU_S = 5.0  # largest CPU time of the second try of a grammar's check
_QUICK_CPU_S = 0.5  # largest CPU time of the first try of a grammar's check
_NUM_QUICK_CHECKS = 2
_CHECKED_MAX = 64  # largest number of cached grammars that have passed the check
_REFUSED_MAX = 1024  # largest number of cached refusals of grammars
_REFUSED_S = 600.0


class PreparedPrompt(NamedTuple):
    token_ids: list[int]
    block_hashes: list[bytes]  # hashes of the prompt's full blocks; empty if none were requested
    # Number of leading tokens whose KV is to be pinned, if the client requested a pin. 0: all.
    pinned_tokens: int = 0
    # Number of leading tokens that all prompts with the same system prompt and tools have. 0: the
    # number is unknown or not wanted.
    system_tokens: int = 0
    images: tuple[PromptImage, ...] = ()


class PromptPreparer:
    """The threads and processes that prepare prompts. `close` ends them."""

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        *,
        num_processes: int,
        finds_system: bool = False,
        image_rules: ImageRules | str = "this model takes text only",
    ) -> None:
        """With `finds_system`, prompts of chats have their `system_tokens`. `image_rules` says how
        the model processes images, or why it takes none."""
        self._tokenizer = tokenizer
        self._finds_system = finds_system
        self._image_rules = image_rules
        self._file = folder / "tokenizer.json"
        self._joined: frozenset[bytes] | None = None
        self._checked: OrderedDict[StructuredOutput, str] = OrderedDict()
        # hash of a refused grammar -> (time when the refusal expires, reason)
        self._refused: OrderedDict[int, tuple[float, str]] = OrderedDict()
        self._checking: dict[StructuredOutput, asyncio.Future[str]] = {}
        self._threads = FairExecutor(
            lambda: ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenize"),
            num_workers=_NUM_THREADS,
            deadline_s=JOB_DEADLINE_S,
        )

        def tokenizers(num_processes: int) -> FairExecutor:
            return FairExecutor(
                lambda: ProcessPoolExecutor(
                    num_processes,
                    mp_context=multiprocessing.get_context("spawn"),
                    initializer=_start_process,
                    initargs=(folder, tokenizer.nonce),
                ),
                num_workers=num_processes,
                deadline_s=JOB_DEADLINE_S,
            )

        self._processes = tokenizers(num_processes)
        # A process for very long texts that cannot be cut into pieces. The first use starts it.
        self._uncut = tokenizers(1)
        self._checker = GrammarChecker(
            folder / "tokenizer.json", tokenizer.vocab_size, tokenizer.eos_token_ids
        )
        self._quick_checks = FairExecutor(
            lambda: ThreadPoolExecutor(_NUM_QUICK_CHECKS, thread_name_prefix="grammar"),
            num_workers=_NUM_QUICK_CHECKS,
        )
        self._long_checks = FairExecutor(
            lambda: ThreadPoolExecutor(1, thread_name_prefix="long-grammar"), num_workers=1
        )

    @property
    def takes_images(self) -> bool:
        return not isinstance(self._image_rules, str)

    async def check(self) -> None:
        """Tests in a process whether the rules in the tokenizer's file work.

        Raises ConfigError if a rule fails or does not end.
        """
        why = "the tokenizer fails or does not end on a few short texts"
        with suppress(LateJob, BrokenExecutor):
            why = await self._processes.run("", 1.0, _check_in_process)
        if why:
            raise ConfigError(f"{self._file} cannot be used: {why}")

    async def prepare(
        self,
        request: ClientRequest,
        chain: Chain | None,
        *,
        max_model_len: int,
    ) -> PreparedPrompt:
        """Returns the prompt's token ids and block hashes.

        If `chain` is None or the request has a KV budget, no block is hashed. Raises BadRequest if
        the chat template rejects the chat, or if an image cannot be read. Raises ContextTooLong if
        a very long text cannot fit and must not be truncated.
        """
        if request.kv_budget is not None:
            chain = None
        tenant = request.tenant
        cost = _cost(request.prompt)
        kept = request.prompt_tokens_max(max_model_len)
        images = await self._read_images(request)
        starts = Starts(request.pinned_chat)
        if self._finds_system and kept is None and isinstance(request.prompt, Conversation):
            starts = starts._replace(system=request.prompt.beginning)
        text: _Text = (
            RenderedText(request.prompt, add_special_tokens=request.add_special_tokens)
            if isinstance(request.prompt, str)
            else request.prompt
        )
        with _reporting_late_jobs():
            if cost <= INLINE_COST_MAX and not self._threads.num_late:
                prepared = await self._threads.run(
                    tenant,
                    cost,
                    prepare_prompt,
                    self._tokenizer,
                    text,
                    kept,
                    chain,
                    starts,
                    images,
                )
                return with_data(prepared, images)
            processes = self._processes
            if not isinstance(text, tuple | Pair):
                if kept is None and is_counted_first(cost, max_model_len):
                    text = await self._count(request, text, max_model_len)
                elif kept is not None and cost > 2 * PIECE_CHARACTERS:
                    text = await self._rendered(request, text)
                    ids = None
                    if not self._tokenizer.cuts_end:
                        ids = await self._last(request, text, kept, max_model_len)
                    if ids is not None:
                        text = ids
                    else:
                        processes = self._uncut
            # The processes get the images without their data.
            shown = images and images._replace(
                read=tuple(image._replace(data=b"") for image in images.read)
            )
            found, hashes, pinned, system, placed = await processes.run(
                tenant, cost, _prepare_in_process, text, kept, chain, starts, shown
            )
        prepared = PreparedPrompt(found.tolist(), hashes, pinned, system, placed)
        return with_data(prepared, images)

    async def _read_images(self, request: ClientRequest) -> ReadImages | None:
        """Reads the images of a chat. Raises BadRequest if the model takes none."""
        sent = request.prompt.images if isinstance(request.prompt, Conversation) else []
        if not sent:
            return None
        cost = sum(len(image.url) for image in sent)
        with _reporting_late_jobs():
            return await self._threads.run(
                request.tenant, cost, read_images, request, self._image_rules
            )

    async def bad_words(self, request: ClientRequest) -> list[list[int]]:
        """Returns the sequences of token ids that spell the request's bad words."""
        words = request.sampling.bad_words
        if not words:
            return []
        cost = sum(map(len, words))
        with _reporting_late_jobs():
            return await self._threads.run(request.tenant, cost, spell, self._tokenizer, words)

    async def decode(self, token_ids: list[int], *, tenant: str, skip_special_tokens: bool) -> str:
        """Returns the text of token ids."""
        decode = partial(self._tokenizer.decode, skip_special_tokens=skip_special_tokens)
        cost = _TOKEN_COST * max(1, len(token_ids))
        with _reporting_late_jobs():
            return await self._threads.run(tenant, cost, decode, token_ids)

    async def grammar(self, wanted: StructuredOutput | None, tenant: str) -> str:
        """Returns the checked grammar for the constraint `wanted`; "" if there is no constraint.

        Raises BadRequest if the grammar cannot be compiled. Raises CompilerBusy if the check did
        not end in time.
        """
        if wanted is None:
            return ""
        until, why = self._refused.get(hash(wanted), (0.0, ""))
        if time.monotonic() < until:
            raise BadRequest(why, param=wanted.field)
        if wanted in self._checked:
            self._checked.move_to_end(wanted)
            return self._checked[wanted]
        # Requests with equal grammars share one check, which continues if a client disconnects.
        checking = self._checking.get(wanted)
        if checking is None:
            checking = asyncio.ensure_future(self._check(wanted, tenant))
            self._checking[wanted] = checking
            checking.add_done_callback(partial(self._on_checked, wanted))
        return await asyncio.shield(checking)

    def _on_checked(self, wanted: StructuredOutput, checking: asyncio.Future[str]) -> None:
        del self._checking[wanted]
        if checking.cancelled():
            return
        if (error := checking.exception()) is None:
            self._checked[wanted] = checking.result()
            if len(self._checked) > _CHECKED_MAX:
                self._checked.popitem(last=False)
        elif isinstance(error, BadRequest):
            self._refused[hash(wanted)] = (time.monotonic() + _REFUSED_S, error.message)
            if len(self._refused) > _REFUSED_MAX:
                self._refused.popitem(last=False)

    async def _check(self, wanted: StructuredOutput, tenant: str) -> str:
        tries = (self._quick_checks, _QUICK_CPU_S), (self._long_checks, GRAMMAR_CPU_S)
        try:
            async with asyncio.timeout(GRAMMAR_DEADLINE_S):
                for checks, cpu_s in tries:
                    cost = len(wanted.source)
                    text = await checks.run(tenant, cost, self._checker.check, wanted, cpu_s)
                    if text is not None:
                        return text
        except TimeoutError:
            raise CompilerBusy(
                f"{wanted.field}: the grammar compiler is busy; try again",
                param=wanted.field,
                retry_after_s=RETRY_AFTER_S,
            ) from None
        raise refused(
            wanted.field, f"compiling the grammar takes over {GRAMMAR_CPU_S:g} s of CPU time"
        )

    def close(self) -> None:
        self._threads.close()
        self._processes.close()
        self._uncut.close()
        self._checker.close()  # before the checks' executors, whose threads wait for the checker
        self._quick_checks.close()
        self._long_checks.close()

    async def _count(
        self, request: ClientRequest, text: RenderedText | Conversation, max_model_len: int
    ) -> RenderedText:
        """Renders a very long text. Raises ContextTooLong if the text certainly does not fit.

        The tokens are counted piece by piece, which does not give the exact token ids. So the
        returned text must still be tokenized as a whole.
        """
        run = self._processes.run
        tenant = request.tenant
        rendered = await self._rendered(request, text)
        num_tokens = 0
        for num_pieces, part in enumerate(cut(rendered.text), start=1):
            piece = replace(rendered, text=part, add_special_tokens=False)
            try:
                num_tokens += await run(tenant, len(part), _count_in_process, piece)
            except BadRequest:
                break  # the text is invalid; tokenizing the whole text will report the position
            if (certain := at_least(num_tokens, num_pieces)) >= max_model_len:
                raise request.too_long(f"at least {certain}", max_model_len)
        return rendered

    async def _rendered(
        self, request: ClientRequest, text: RenderedText | Conversation
    ) -> RenderedText:
        if isinstance(text, RenderedText):
            return text
        return await self._processes.run(request.tenant, _cost(text), _render_in_process, text)

    async def _last(
        self, request: ClientRequest, rendered: RenderedText, kept: int, max_model_len: int
    ) -> tuple[int, ...] | None:
        """Returns the ids of at least the last `kept` tokens of a very long text.

        Returns all ids if the text has fewer than `kept` tokens. Returns None if the text has no
        place to cut. Raises BadRequest, and ContextTooLong if the tokens cannot fit into the
        context.
        """
        run = self._processes.run
        tenant = request.tenant
        text = rendered.text
        check_unicode(text)
        if self._joined is None:
            self._joined = await run(tenant, INLINE_COST_MAX, _joined_in_process)
        parts: list[array[int]] = []
        num_tokens = 0
        start = len(text)
        while start and num_tokens < kept:
            if num_tokens >= max_model_len:
                raise request.too_long(f"at least {num_tokens}", max_model_len)
            stop = start
            found = find_cut(text, start, self._joined)
            if found is None:
                return None
            start = found
            left = max(0, start - CONTEXT_CHARACTERS)
            right = stop + CONTEXT_CHARACTERS
            window = replace(rendered, text=text[left:right])
            cost = len(window.text)
            part = await run(
                tenant, cost, _encode_part_in_process, window, start - left, stop - left
            )
            if part is None:
                return None
            parts.append(part)
            num_tokens += len(part)
        return tuple(chained.from_iterable(reversed(parts)))


@contextmanager
def _reporting_late_jobs() -> Iterator[None]:
    try:
        yield
    except LateJob:
        raise TokenizerLate(
            f"the model's tokenizer did not finish within {JOB_DEADLINE_S:g} s and was stopped, "
            "because it is too slow for this text; send a shorter text"
        ) from None


def _cost(prompt: Prompt) -> int:
    """Returns the cost of preparing a prompt. The unit is one character of text to tokenize."""
    if isinstance(prompt, tuple):
        return _TOKEN_COST * len(prompt)
    if isinstance(prompt, str):
        return len(prompt)
    if isinstance(prompt, Pair):
        return num_characters(prompt)
    return num_characters(prompt) + _MESSAGE_COST * len(prompt.messages)


class ReadImages(NamedTuple):
    """The images of a chat, and how the model processes images."""

    rules: ImageRules
    read: tuple[ReadImage, ...]


def read_images(request: ClientRequest, rules: ImageRules | str) -> ReadImages | None:
    """Reads the images of a request. Returns None if it has none.

    `rules` says how the model processes images, or why it takes none. Raises BadRequest if it takes
    none, or if an image is not allowed or cannot be decoded.
    """
    sent = request.prompt.images if isinstance(request.prompt, Conversation) else []
    if not sent:
        return None
    if isinstance(rules, str):
        raise BadRequest(f"the messages have an image, but {rules}", param="messages")
    if len(sent) > IMAGES_MAX:
        raise BadRequest(
            f"the messages have {len(sent)} images; they may have at most {IMAGES_MAX}",
            param="messages",
        )
    if request.sampling.truncate_prompt_tokens is not None:
        raise BadRequest(
            "truncate_prompt_tokens cannot be used with images, because it could cut one",
            param="truncate_prompt_tokens",
        )
    return ReadImages(rules, tuple(read_image(image.url, rules) for image in sent))


def with_data(prepared: PreparedPrompt, images: ReadImages | None) -> PreparedPrompt:
    """Adds the data of the images to a prompt that was prepared without them."""
    if images is None:
        return prepared
    pairs = zip(prepared.images, images.read, strict=True)
    return prepared._replace(
        images=tuple(msgspec.structs.replace(placed, data=read.data) for placed, read in pairs)
    )


class Starts(NamedTuple):
    """Chats whose prompts begin as the prompt that is prepared. The numbers of their common tokens
    are wanted. None: no number is."""

    pinned: Conversation | None = None  # the first messages, if only they are to be pinned
    system: Conversation | None = None  # `Conversation.beginning`


def prepare_prompt(
    tokenizer: Tokenizer,
    text: _Text,
    kept: int | None,
    chain: Chain | None,
    starts: Starts = Starts(),
    images: ReadImages | None = None,
) -> PreparedPrompt:
    """Tokenizes and hashes a prompt.

    `kept` is the number of the prompt's tokens to keep, in general the last ones
    (`Tokenizer.truncated`); None means all. A pair keeps as many tokens, but loses the last ones of
    its document. The result has the images without their data.
    """
    if isinstance(text, tuple):
        token_ids = list(text)
    elif isinstance(text, Pair):
        token_ids = tokenizer.encode_pair(text, kept)
    else:
        rendered = text if isinstance(text, RenderedText) else _render(tokenizer, text)
        token_ids = tokenizer.encode_rendered(rendered)
    placed: tuple[PromptImage, ...] = ()
    if images is not None:
        token_ids, placed = with_images(tokenizer, token_ids, images.read, images.rules)
    pinned, system = (_num_equal(tokenizer, chat, token_ids, images) for chat in starts)
    if kept is not None:
        token_ids = tokenizer.truncated(token_ids, kept)
    hashes: list[bytes] = []
    if chain is not None:
        marks = image_marks(placed, chain.block_size)
        hashes = hash_blocks(chain.root, token_ids, chain.block_size, marks)
    return PreparedPrompt(token_ids, hashes, pinned, system, placed)


def _num_equal(
    tokenizer: Tokenizer,
    chat: Conversation | None,
    token_ids: Sequence[int],
    images: ReadImages | None,
) -> int:
    """Returns how many leading tokens of the prompt `token_ids` are the tokens of `chat`.

    `chat` begins as the prompt's chat. Returns 0 if it is None or if the template rejects it.
    """
    if chat is None:
        return 0
    try:
        begins = tokenizer.encode_rendered(_render(tokenizer, chat))
        if images is not None:
            own = images.read[: len(chat.images)]
            begins, _ = with_images(tokenizer, begins, own, images.rules)
    except BadRequest:
        return 0
    pairs = zip(begins, token_ids, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def spell(tokenizer: Tokenizer, words: Sequence[str]) -> list[list[int]]:
    """Returns the token ids of each word, once without and once with a space before the word.

    The ids with a space are left out if they end with the ids without a space.
    """
    runs = []
    for word in words:
        bare = tokenizer.encode(word, add_special_tokens=False)
        spaced = tokenizer.encode(f" {word.lstrip()}", add_special_tokens=False)
        runs.append(bare)
        if spaced[-len(bare) :] != bare:
            runs.append(spaced)
    return [run for run in runs if run]


def _render(tokenizer: Tokenizer, chat: Conversation) -> RenderedText:
    rendered = tokenizer.render_prompt(
        *chat.template_input(),
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
    )
    return replace(rendered, add_special_tokens=chat.add_special_tokens)


_process_tokenizer: Tokenizer | None = None


def _start_process(folder: Path, nonce: str) -> None:
    global _process_tokenizer
    _tie_to_parent()
    _process_tokenizer = Tokenizer(folder, nonce=nonce)
    exempt_loaded()


def _tie_to_parent() -> None:
    # Ctrl-C sends a signal to all processes. This process ignores it; the router ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Exits when the router ends, even if the router was killed.

    The pipes of the process pool do not report that the router was killed.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(0)


def _render_in_process(chat: Conversation) -> RenderedText:
    assert _process_tokenizer is not None
    return _render(_process_tokenizer, chat)


def _count_in_process(piece: RenderedText) -> int:
    assert _process_tokenizer is not None
    return _process_tokenizer.count_tokens(piece)


def _check_in_process() -> str:
    """Returns why the tokenizer cannot be used; "" if it can."""
    assert _process_tokenizer is not None
    tries = ""
    soft, hard = before = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or hard > MEMORY_BYTES:
        soft = MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    try:
        for what in _process_tokenizer.check_rules():
            tries = what
    except ConfigError as error:
        return error.message
    except BaseException as error:  # a panic in Rust is a BaseException, not an Exception
        return f"{tries}: {first_line(error)}"
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    return ""


def _joined_in_process() -> frozenset[bytes]:
    assert _process_tokenizer is not None
    return _process_tokenizer.joined


def _encode_part_in_process(window: RenderedText, start: int, stop: int) -> array[int] | None:
    assert _process_tokenizer is not None
    ids = _process_tokenizer.encode_part(window, start, stop)
    return None if ids is None else array("I", ids)


def _prepare_in_process(
    text: _Text,
    kept: int | None,
    chain: Chain | None,
    starts: Starts,
    images: ReadImages | None,
) -> tuple[array[int], list[bytes], int, int, tuple[PromptImage, ...]]:
    """Tokenizes and hashes a prompt in a process.

    The token ids are an array, because a list of 100,000 ints is slow to unpickle.
    """
    assert _process_tokenizer is not None
    found = prepare_prompt(_process_tokenizer, text, kept, chain, starts, images)
    ids = array("I", found.token_ids)
    return ids, found.block_hashes, found.pinned_tokens, found.system_tokens, found.images
