"""Prompts on real tokenizer processes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.errors import BadRequest, ContextTooLong
from tandem.models.source import resolve
from tandem.models.tokenizer.tokenizer import RenderedText, Tokenizer
from tandem.router.request.conversation import Conversation, Message
from tandem.router.request.prompt import prompts
from tandem.router.request.prompt.pieces import CUT_TOKENS, PIECE_CHARACTERS
from tandem.router.request.prompt.prompts import PreparedPrompt, PromptPreparer
from tandem.router.request.request import ClientRequest, Prompt
from tests.harness.client_requests import client_request
from tests.harness.models import encode_chat

FOLDER = resolve("smollm2").path
MAX_LEN = 8192


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(FOLDER)


@pytest.fixture(scope="module")
def preparer(tokenizer: Tokenizer) -> Iterator[PromptPreparer]:
    preparer = PromptPreparer(FOLDER, tokenizer, num_processes=2)
    yield preparer
    preparer.close()


async def prepare(preparer: PromptPreparer, prompt: Prompt, max_model_len: int) -> list[int]:
    request = ClientRequest(prompt)
    return (await preparer.prepare(request, None, max_model_len=max_model_len)).token_ids


def chat(*contents: str) -> Conversation:
    return Conversation(tuple(Message("user", content) for content in contents))


def ids_of(tokenizer: Tokenizer, prompt: str | Conversation) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    return encode_chat(tokenizer, [{"role": m.role, "content": m.content} for m in prompt.messages])


@settings(max_examples=25, deadline=None)
@given(
    word=st.sampled_from([" 1x", "hello world ", "a", "東京", " <|im_end|>", "\n\n"]),
    num_characters=st.integers(PIECE_CHARACTERS // 4, 5 * PIECE_CHARACTERS),
    room=st.integers(-3 * CUT_TOKENS, 3 * CUT_TOKENS),
    as_chat=st.booleans(),
)
def test_a_prompt_that_fits_has_its_exact_ids(
    preparer: PromptPreparer,
    tokenizer: Tokenizer,
    word: str,
    num_characters: int,
    room: int,
    as_chat: bool,
) -> None:
    text = word * (num_characters // len(word))
    prompt = chat("x", text) if as_chat else text
    expected = ids_of(tokenizer, prompt)
    max_model_len = max(64, len(expected) + room)
    try:
        ids = asyncio.run(prepare(preparer, prompt, max_model_len))
    except ContextTooLong:
        assert len(expected) >= max_model_len
    else:
        assert ids == expected


@pytest.mark.parametrize("word", [" 1x", "abc", "<|im_end|>"])
@pytest.mark.parametrize("as_chat", [False, True])
async def test_a_text_that_cannot_fit_is_refused_after_its_first_tokens(
    preparer: PromptPreparer,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    word: str,
    as_chat: bool,
) -> None:
    run = preparer._processes.run
    counted: list[RenderedText] = []

    async def noting(tenant: str, cost: float, function: object, *arguments: object) -> object:
        assert function is not prompts._prepare_in_process
        if function is prompts._count_in_process:
            counted.append(arguments[0])  # type: ignore[arg-type]
        return await run(tenant, cost, function, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(preparer._processes, "run", noting)
    text = word * (510_000 // len(word))
    param = "messages" if as_chat else "prompt"
    message = rf"maximum context length is {MAX_LEN} tokens; the prompt has at least \d+ tokens"
    with pytest.raises(ContextTooLong, match=message) as refused:
        await prepare(preparer, chat(text) if as_chat else text, MAX_LEN)
    assert refused.value.param == param
    assert sum(map(tokenizer.count_tokens, counted[:-1])) < MAX_LEN + CUT_TOKENS * len(counted)


async def test_a_client_that_leaves_stops_the_count(preparer: PromptPreparer) -> None:
    text = "hello world " * 40_000
    task = asyncio.create_task(prepare(preparer, text, 10**6 // 4))
    while preparer._processes._num_free == 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert preparer._processes.num_waiting == 0
    async with asyncio.timeout(60):
        while preparer._processes._num_free < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_what_is_wrong_with_a_long_text_is_told_as_of_the_whole(
    preparer: PromptPreparer,
) -> None:
    text = "hello world " * (3 * PIECE_CHARACTERS // 12)
    with pytest.raises(BadRequest, match=f"surrogate at character {len(text)}"):
        await prepare(preparer, text + "\ud800", 20_000)
    with pytest.raises(BadRequest, match="surrogate"):
        await prepare(preparer, chat(text + "\ud800<|im_end|>"), 20_000)


@pytest.mark.parametrize("num_words", [100, 8_000])
async def test_a_truncated_prompt_keeps_its_last_tokens(
    preparer: PromptPreparer, tokenizer: Tokenizer, num_words: int
) -> None:
    text = " ".join(map(str, range(num_words)))
    request = client_request(text, truncate_prompt_tokens=9)
    prepared = await preparer.prepare(request, None, max_model_len=64)
    assert prepared.token_ids == tokenizer.encode(text)[-9:]


@pytest.mark.parametrize("as_chat", [False, True])
@pytest.mark.parametrize("kept", [9, -1])
@pytest.mark.parametrize("word", [" 1x", "hello <|im_end|> world ", "東京", "a"])
async def test_a_long_text_keeps_the_last_tokens_of_the_whole(
    preparer: PromptPreparer, tokenizer: Tokenizer, word: str, kept: int, as_chat: bool
) -> None:
    text = f"the beginning {word * (300_000 // len(word))}the end\n"
    prompt = chat("x", text) if as_chat else text
    request = client_request(prompt, truncate_prompt_tokens=kept)
    prepared = await preparer.prepare(request, None, max_model_len=32_768)
    num_kept = kept if kept > 0 else 32_767
    assert prepared.token_ids == ids_of(tokenizer, prompt)[-num_kept:]


async def test_more_tokens_than_fit_are_refused_before_all_are_tokenized(
    preparer: PromptPreparer,
) -> None:
    request = client_request(" 1x" * 100_000, truncate_prompt_tokens=100_000)
    with pytest.raises(ContextTooLong, match=r"at least \d+"):
        await preparer.prepare(request, None, max_model_len=8192)
    with pytest.raises(BadRequest, match="surrogate at character 3"):
        await preparer.prepare(
            client_request("abc\ud800" + " 1x" * 100_000, truncate_prompt_tokens=9),
            None,
            max_model_len=8192,
        )


async def test_bad_words_are_spelled_at_a_start_and_after_a_space(
    preparer: PromptPreparer, tokenizer: Tokenizer
) -> None:
    request = client_request("x", bad_words=["Paris", "."])
    spelled = [tokenizer.decode(run) for run in await preparer.bad_words(request)]
    assert spelled == ["Paris", " Paris", ".", " ."]


@pytest.mark.parametrize("num_words", [1, 20_000])  # in a thread, in a process
async def test_the_tokens_of_the_part_to_be_pinned_are_counted(
    preparer: PromptPreparer, tokenizer: Tokenizer, num_words: int
) -> None:
    system = Message("system", "be brief " * num_words)
    whole = Conversation((system, Message("user", "one two"), Message("assistant", "three")))
    for part, first_other in (
        ((system, Message("user", "one")), " two"),
        ((system, Message("user", "")), "one"),
        (whole.messages, None),
    ):
        pinned = Conversation(part, add_generation_prompt=False)
        request = ClientRequest(whole, pinned_chat=pinned)
        prepared = await preparer.prepare(request, None, max_model_len=1 << 20)
        end = prepared.pinned_tokens
        text = tokenizer.decode(prepared.token_ids)
        beginning = tokenizer.decode(prepared.token_ids[:end])
        assert text.startswith(beginning)
        rest = text[len(beginning) :]
        expected = first_other or "assistant"  # the head of the answer
        assert rest.lstrip().startswith(expected.lstrip()), rest[:40]


@pytest.mark.parametrize("is_long", [False, True])
async def test_chats_with_the_same_system_prompt_and_tools_have_the_same_system_tokens(
    tokenizer: Tokenizer, is_long: bool
) -> None:
    """Both in a thread and in a process."""
    preparer = PromptPreparer(FOLDER, tokenizer, num_processes=1, finds_system=True)
    system = Message("system", "You answer in one word. " * (500 if is_long else 5))
    others = (Message("user", "What is the capital of Peru?"), Message("user", "Lima is where?"))

    async def prepared(*messages: Message, truncate: int | None = None) -> PreparedPrompt:
        request = client_request(prompt=Conversation(messages), truncate_prompt_tokens=truncate)
        return await preparer.prepare(request, None, max_model_len=MAX_LEN)

    try:
        first, second = [await prepared(system, other) for other in others]
        longer = await prepared(system, others[0], Message("assistant", "Lima."), others[1])
        plain = await prepared(others[0])
        truncated = await prepared(system, others[0], truncate=20)
    finally:
        preparer.close()
    num = first.system_tokens
    assert num == second.system_tokens == longer.system_tokens
    assert first.token_ids[:num] == second.token_ids[:num] == longer.token_ids[:num]
    assert first.token_ids[num] != second.token_ids[num]  # the users' messages begin here
    assert plain.system_tokens == truncated.system_tokens == 0
