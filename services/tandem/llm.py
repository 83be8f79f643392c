"""A model in this process: `LLM` generates, chats and embeds without a server.

  1. The caller's thread checks, renders and tokenizes a prompt, and sends a SequenceSpec to the
     engine's thread.
  2. The engine's thread adds the sequence to the engine, and computes steps while there is work.
     It sends NewTokens or an error to the caller's thread.
  3. The caller's thread detokenizes the new tokens and looks for stop strings.

The functions that check, prepare and read requests are those of the HTTP API, so a request gets the
same answer from `LLM` as over HTTP. Methods and arguments that vLLM's `LLM` also has mean the same
as in vLLM. Several threads may use one `LLM` at the same time: the engine computes their requests
in common batches.
"""

import asyncio
import gc
import logging
import os
import random
import warnings
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, closing, suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock, Thread, current_thread
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar

import msgspec

from tandem.api.openai.requests import (
    ChatBody,
    CompletionBody,
    ConversationFields,
    validate,
)
from tandem.api.openai.structured import StructuredOutputs
from tandem.api.openai.tools import call_body, joined
from tandem.cluster.launch.checked_model import download_built_in
from tandem.common.adapter import Adapter
from tandem.common.config.answers import AnswerConfig
from tandem.common.config.engine import EngineConfig, EngineOptions
from tandem.common.sampling_params import SamplingParams as SamplingParams
from tandem.common.sampling_params import StructuredOutputsParams as StructuredOutputsParams
from tandem.engine.engine import Engine
from tandem.engine.executor.runner import ModelRunner
from tandem.engine.executor.vision_tower import make_image_rows
from tandem.engine.tiers.io_thread import IoThread
from tandem.engine.types import Mode, NewTokens, SequenceSpec, StepReport, TokenLogprobs
from tandem.errors import BadRequest, ConfigError, NotNow, TandemError, from_code
from tandem.models.files import naming, read_json_if_any
from tandem.models.folder import ModelFolder
from tandem.models.grammars.compiler import GrammarCompiler
from tandem.models.images import read_rules
from tandem.models.lora.adapter import open_lora
from tandem.models.source import BUILT_IN, built_in_file, resolve
from tandem.models.tokenizer.tokenizer import RenderedText, Tokenizer
from tandem.router.parsers.machine import CallDelta
from tandem.router.parsers.model_format import ModelFormat
from tandem.router.request.allowed import name_prompt, refusal
from tandem.router.request.choices.children import child_request
from tandem.router.request.delta import normalized
from tandem.router.request.job import PreparedRequest, model_input, prepare_request
from tandem.router.request.prompt.formats import (
    wanted_form,
    with_template_options,
    without_effect,
)
from tandem.router.request.prompt.grammar_checker import checked_grammar
from tandem.router.request.prompt.prompts import (
    prepare_prompt,
    read_images,
    spell,
    with_data,
)
from tandem.router.request.request import MODEL_DEFAULTS, ClientRequest, read_model_defaults
from tandem.router.request.text import TextStream, text_stream
from tandem.worker.convert import sequence_spec

log = logging.getLogger(__name__)

_T = TypeVar("_T")
# A prompt is a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": token ids}.
Prompt: TypeAlias = str | list[int] | Mapping[str, Any]
Message: TypeAlias = Mapping[str, Any]

_QUEUE_MAX = 2**31 - 1  # maximum number of sequences that wait to run; in practice no limit
# Other threads prepare the grammars and adapters of requests. The engine's thread checks at this
# interval, in seconds, whether one is ready.
_TICK_S = 0.002
# Maximum seconds that `close` waits. It waits for the running step, and for the KV tiers to write
# those blocks of which no other copy exists.
_CLOSE_MAX_S = 30.0
# vLLM's name of an engine option -> Tandem's name
_VLLM_OPTIONS = {
    "revision": "model_revision",
    "model_impl": "model_impl",
    "kv_cache_dtype": "kv_dtype",
    "kv_cache_memory_bytes": "kv_bytes_max",
    "num_gpu_blocks_override": "num_blocks",
    "max_num_batched_tokens": "max_tokens_per_step",
    "tensor_parallel_size": "tensor_parallel",
    "enable_expert_parallel": "expert_parallel",
}
_ANSWER_OPTIONS = ("generation_config", "tool_parser", "reasoning_parser")
_ENGINE_OPTIONS = {f.name for f in fields(EngineOptions)} - {"lora", "queue_max"}


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """A LoRA adapter in PEFT's format that a request uses."""

    lora_name: str
    lora_int_id: int  # ignored: adapters are identified by the contents of their files
    lora_path: str


@dataclass(frozen=True, slots=True)
class Logprob:
    """The natural log probability of a token, before temperature, filters and penalties are
    applied."""

    logprob: float
    rank: int  # rank of the token in the whole vocabulary; 1: the most likely token
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One completion. In a chat, `reasoning` and `tool_calls` are separate from `text`."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    # One dict for each generated token: token id -> log probability, for the generated token and
    # the most likely tokens at its position. None: not requested.
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None  # stop, length or tool_calls; None: more tokens follow
    # The stop string or the id of the stop token that ended the completion. None: something else
    # did, such as max_tokens.
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = None
    reasoning: str = ""
    # tool calls in the form that OpenAI's chat messages have
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The completions of one prompt. In a stream, each output contains everything generated so
    far."""

    request_id: str
    prompt: str | None  # None: the prompt was sent as token ids or as a chat
    prompt_token_ids: list[int]
    # One entry for each prompt token: None for the first token, and for each other token a dict as
    # in CompletionOutput.logprobs. None: not requested.
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    lora_request: LoRARequest | None
    num_cached_tokens: int  # number of prompt tokens whose KV was cached and not computed


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    embedding: list[float]  # embedding, scaled to length 1

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """The embedding of one prompt."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True


Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None
Adapters: TypeAlias = LoRARequest | Sequence[LoRARequest] | None
Prompts: TypeAlias = Prompt | Sequence[Prompt]
Chats: TypeAlias = Sequence[Message] | Sequence[Sequence[Message]]


class LLM:
    """One model on this machine. `close`, the end of a `with` statement or the garbage collector
    frees the model's memory and ends its threads."""

    def __init__(
        self,
        model: str | Path,
        *,
        seed: int | None = None,
        enable_lora: bool = False,
        **options: Any,
    ) -> None:
        """`model` is a Hugging Face folder, a GGUF file, a name on the hub or `smollm2`. `seed`
        makes the results of requests without a seed reproducible. `options` are fields of
        EngineOptions (under vLLM's name if vLLM has the option), `generation_config`, `tool_parser`
        and `reasoning_parser`. Raises ConfigError."""
        answers = {name: options.pop(name) for name in _ANSWER_OPTIONS if name in options}
        config = _engine_config(str(model), enable_lora, options)
        self._answer_config = AnswerConfig(**answers)
        if config.model == BUILT_IN and not Path(BUILT_IN).exists() and built_in_file() is None:
            download_built_in()
        self._folder = resolve(
            config.model, revision=config.model_revision, model_impl=config.model_impl
        )
        self._tokenizer = Tokenizer.of(self._folder)
        self._image_rules = read_rules(self._folder)
        self._answers = ModelFormat(self._tokenizer, self._answer_config)
        self._compiler = GrammarCompiler.of(self._folder)
        self._defaults = self._read_defaults()
        self._config = config
        self._rng = random.Random(seed)
        self._adapters: dict[tuple[str, str], Adapter] = {}
        self._ids = count()
        self._engine = _EngineThread(self._folder, config, self._compiler)
        self._finalizer = weakref.finalize(self, self._engine.close)

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a prompt and its completion together."""
        return self._engine.max_model_len

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the engine. If other threads still wait for requests, NotNow is raised there."""
        self._finalizer()

    def generate(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        lora_request: Adapters = None,
    ) -> list[RequestOutput]:
        """Returns one output for each prompt, in the order of the prompts. Without
        `sampling_params`, the model's own defaults and at most 16 new tokens apply. Raises
        BadRequest if a prompt is invalid or does not fit into the KV pool; nothing is computed
        then."""
        return self._outputs(self._completions(prompts, sampling_params, lora_request))

    def generate_stream(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        lora_request: Adapters = None,
    ) -> Generator[RequestOutput, None, None]:
        """Whenever a prompt gets new tokens, yields the prompt's output so far. Closing the
        generator ends the requests. The errors of `generate` are raised before the first output."""
        return self._stream(self._completions(prompts, sampling_params, lora_request))

    def chat(
        self,
        messages: Chats,
        sampling_params: Params = None,
        *,
        lora_request: Adapters = None,
        **fields: Any,
    ) -> list[RequestOutput]:
        """Returns one output for each conversation. `messages` is one conversation (a list of
        messages) or a list of conversations. `fields` may be these fields of the HTTP API's chat
        requests: tools, tool_choice, parallel_tool_calls, reasoning_effort, chat_template_kwargs,
        add_generation_prompt, continue_final_message and add_special_tokens."""
        return self._outputs(self._chats(messages, sampling_params, lora_request, fields))

    def chat_stream(
        self,
        messages: Chats,
        sampling_params: Params = None,
        *,
        lora_request: Adapters = None,
        **fields: Any,
    ) -> Generator[RequestOutput, None, None]:
        """Whenever a conversation gets new tokens, yields the conversation's output so far.
        Arguments are those of `chat`."""
        return self._stream(self._chats(messages, sampling_params, lora_request, fields))

    def embed(
        self,
        prompts: Prompts,
        *,
        truncate_prompt_tokens: int | None = None,
        lora_request: Adapters = None,
    ) -> list[EmbeddingRequestOutput]:
        """Returns the embedding of each prompt: the last token's hidden state after the final norm,
        scaled to length 1."""
        requests = self._embeddings(prompts, truncate_prompt_tokens, lora_request)
        for _ in self._follow(requests):
            pass
        return [request.embedding_output() for request in requests]

    def _outputs(self, requests: "list[_Request]") -> list[RequestOutput]:
        for _ in self._follow(requests):
            pass
        return [request.output() for request in requests]

    def _stream(self, requests: "list[_Request]") -> Generator[RequestOutput, None, None]:
        with closing(self._follow(requests)) as running:
            for request in running:
                yield request.output()

    def _follow(self, requests: "list[_Request]") -> "Generator[_Request, None, None]":
        """Runs requests to their end. Yields a request whenever it has new tokens."""
        news: SimpleQueue[_News] = SimpleQueue()
        with closing(_Batch(self._engine, requests, news.put)) as batch:
            while batch.is_open:
                if (request := batch.take(news.get())) is not None:
                    yield request

    def _completions(
        self,
        prompts: Prompts,
        params: Params,
        lora: Adapters,
    ) -> "list[_Request]":
        return self._requests(_prompts(prompts), params, lora, _completion)

    def _chats(
        self,
        messages: Chats,
        params: Params,
        lora: Adapters,
        chat_fields: dict[str, Any],
    ) -> "list[_Request]":
        are_many = isinstance(messages, list) and bool(messages) and isinstance(messages[0], list)
        make = partial(_chat, chat_fields)
        return self._requests(list(messages) if are_many else [messages], params, lora, make)

    def _embeddings(
        self,
        prompts: Prompts,
        truncate_prompt_tokens: int | None,
        lora: Adapters,
    ) -> "list[_Request]":
        def make(prompt: Any, params: SamplingParams | None) -> ClientRequest:
            kept = truncate_prompt_tokens
            params = SamplingParams(max_tokens=0, truncate_prompt_tokens=kept)
            return ClientRequest(_single_prompt(prompt), sampling=params, embed=True)

        return self._requests(_prompts(prompts), None, lora, make)

    def _requests(
        self,
        prompts: Sequence[Any],
        params: Params,
        lora: Adapters,
        make: Callable[[Any, SamplingParams | None], ClientRequest],
    ) -> "list[_Request]":
        """Checks and tokenizes requests without starting any of them. Raises BadRequest."""
        all_params = _each(params, len(prompts), "sampling_params")
        all_lora = _each(lora, len(prompts), "lora_request")
        requests = []
        for index, (prompt, own, adapter) in enumerate(
            zip(prompts, all_params, all_lora, strict=True)
        ):
            try:
                prepared = self._prepare(make(prompt, own), adapter)
            except BadRequest as error:
                raise name_prompt(error, index) if len(prompts) > 1 else error from None
            text = prompt if isinstance(prompt, str) else None
            request_id = str(next(self._ids))
            texts = partial(text_stream, self._tokenizer, self._answers)
            requests.append(_Request(request_id, text, prepared, adapter, texts, self._token_text))
        return requests

    def _prepare(self, request: ClientRequest, lora: LoRARequest | None) -> PreparedRequest:
        vocab_size, max_model_len = self._folder.config.vocab_size, self.max_model_len
        model = self._folder.config
        if not (model.embeds if request.embed else model.generates):
            does = "no embeddings" if request.embed else "no answers"
            raise BadRequest(f"this model has {does}: it is made for classification or embeddings")
        request = request.with_defaults(self._defaults)
        if request.sampling.seed is None:
            seed = self._rng.getrandbits(64)
            seeded = msgspec.structs.replace(request.sampling, seed=seed)
            request = replace(request, sampling=seeded)
        adapter = None if lora is None else self._adapter(lora)
        request.check_against(vocab_size=vocab_size, max_model_len=max_model_len)
        if names := without_effect(self._answers, request):
            warnings.warn(f"fields without effect: {', '.join(names)}", stacklevel=2)
        request = with_template_options(self._answers, request)
        prompt = request.prompt
        images = read_images(request, self._image_rules)
        prepared = prepare_prompt(
            self._tokenizer,
            RenderedText(prompt, add_special_tokens=request.add_special_tokens)
            if isinstance(prompt, str)
            else prompt,
            request.prompt_tokens_max(max_model_len),
            None,
            images=images,
        )
        token_ids = prepared.token_ids
        pool_tokens = self._engine.pool_tokens
        max_tokens = request.resolved_max_tokens(
            len(token_ids), max_model_len, pool_tokens=pool_tokens
        )
        form = wanted_form(self._answers, request, token_ids)
        return prepare_request(
            request,
            token_ids,
            max_tokens=max_tokens,
            vocab_size=vocab_size,
            eos_token_ids=self._tokenizer.eos_token_ids,
            bad_words=spell(self._tokenizer, request.sampling.bad_words or ()),
            grammar="" if form is None else checked_grammar(self._compiler, form),
            adapter=adapter,
            images=with_data(prepared, images).images,
        )

    def _token_text(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode(errors="replace")

    def _read_defaults(self) -> Mapping[str, float]:
        """Returns the sampling defaults from the model's `generation_config.json`, or {} if the
        defaults are switched off."""
        if self._answer_config.generation_config == "none":
            return {}
        file = self._folder.path / "generation_config.json"
        with naming(file):
            return read_model_defaults(read_json_if_any(file))

    def _adapter(self, lora: LoRARequest) -> Adapter:
        """Returns the engine's description of an adapter. The adapter's folder is read only at the
        first use. Raises BadRequest if adapters are switched off, and ConfigError if the folder
        cannot be used."""
        if not self._config.max_loras:
            raise BadRequest("lora_request needs LLM(..., enable_lora=True)", param="lora_request")
        key = lora.lora_name, lora.lora_path
        if key not in self._adapters:
            rank_max = self._config.max_lora_rank
            folder = open_lora(lora.lora_path, self._folder.config, rank_max=rank_max)
            self._adapters[key] = Adapter(
                lora.lora_name, folder.digest(), lora.lora_path, folder.rank
            )
        return self._adapters[key]


class AsyncLLM:
    """`LLM` for programs with an event loop. Methods do not block the loop. The constructor blocks,
    because it loads the model: create the object by `await asyncio.to_thread(AsyncLLM, model)`."""

    def __init__(self, model: str | Path, **options: Any) -> None:
        """Takes the arguments of `LLM`. Raises ConfigError."""
        self._llm = LLM(model, **options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the engine, as `LLM.close` does."""
        await asyncio.to_thread(self._llm.close)

    async def generate(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        lora_request: Adapters = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Whenever a prompt gets new tokens, yields the prompt's output so far, as
        `LLM.generate_stream` does. Closing the generator ends the requests."""
        make = partial(self._llm._completions, prompts, sampling_params, lora_request)
        async with aclosing(self._stream(await asyncio.to_thread(make))) as outputs:
            async for output in outputs:
                yield output

    async def chat(
        self,
        messages: Chats,
        sampling_params: Params = None,
        *,
        lora_request: Adapters = None,
        **fields: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Whenever a conversation gets new tokens, yields the output so far, as `LLM.chat_stream`
        does."""
        make = partial(self._llm._chats, messages, sampling_params, lora_request, fields)
        async with aclosing(self._stream(await asyncio.to_thread(make))) as outputs:
            async for output in outputs:
                yield output

    async def embed(self, prompts: Prompts, **arguments: Any) -> list[EmbeddingRequestOutput]:
        """Runs `LLM.embed` with these arguments in a thread and returns the result."""
        return await asyncio.to_thread(partial(self._llm.embed, prompts, **arguments))

    async def _stream(self, requests: "list[_Request]") -> AsyncGenerator[RequestOutput, None]:
        loop, news = asyncio.get_running_loop(), asyncio.Queue[_News]()

        def listen(told: _News) -> None:
            with suppress(RuntimeError):  # If the event loop is closed, no caller waits any more.
                loop.call_soon_threadsafe(news.put_nowait, told)

        with closing(_Batch(self._llm._engine, requests, listen)) as batch:
            while batch.is_open:
                if (request := batch.take(await news.get())) is not None:
                    yield request.output()


class _Completion:
    """One completion that is being generated: the engine's sequence, and the output so far."""

    def __init__(self, index: int, spec: SequenceSpec, text: TextStream) -> None:
        self.spec = spec
        self._text = text
        self.output = CompletionOutput(index)
        self._calls: list[CallDelta] = []

    def take(
        self, news: NewTokens, read: "Callable[[int, TokenLogprobs], dict[int, Logprob]]"
    ) -> None:
        """Adds new tokens to the output. If the text of the tokens completes a stop string, the
        completion ends at once, although the engine may still compute the sequence for a moment."""
        output = self.output
        if self.spec.embed:
            output.finish_reason = news.finish_reason or None
            return
        piece = self._text.push(news.token_ids, news.finish_reason)
        output.text += piece.text
        output.reasoning += piece.reasoning
        output.token_ids += piece.token_ids
        if self.spec.sampling.logprobs is not None:
            measured = list(zip(piece.token_ids, news.logprobs, strict=False))
            output.logprobs = output.logprobs or []
            output.logprobs += (read(*one) for one in measured)
            total = sum(one.logprob for _, one in measured)
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + total
        if piece.tool_calls:
            self._calls += piece.tool_calls
            output.tool_calls = [call_body(call) for call in joined(self._calls)]
        output.finish_reason = piece.finish_reason or None
        output.stop_reason = piece.stop_reason


class _Request:
    """One prompt and its completions."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prepared: PreparedRequest,
        lora: LoRARequest | None,
        texts: Callable[[PreparedRequest], TextStream],
        token_text: Callable[[int], str],
    ) -> None:
        self._request_id = request_id
        self._prompt = prompt
        self._prepared = prepared
        self._lora = lora
        self._token_text = token_text
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._embedding: list[float] = []
        self._num_cached_tokens = 0
        self.completions = []
        for index in range(prepared.sampling.n):
            own = child_request(prepared, index)
            spec = sequence_spec(
                model_input(own),
                sequence_id=f"{request_id}.{index}",
                mode=Mode.LOCAL,
                fork_of=f"{request_id}.0" if index else "",
            )
            self.completions.append(_Completion(index, spec, texts(own)))

    def take(self, completion: _Completion, news: NewTokens) -> None:
        """Adds new tokens to one completion of the request."""
        if completion is self.completions[0] and not completion.output.token_ids:
            self._num_cached_tokens = news.num_cached_tokens
            self._embedding = news.embedding
            if self._prepared.sampling.prompt_logprobs is not None:
                pairs = zip(self._prepared.token_ids[1:], news.prompt_logprobs, strict=True)
                self._prompt_logprobs = [None, *(self._read(*pair) for pair in pairs)]
        completion.take(news, self._read)

    def output(self) -> RequestOutput:
        """Returns a copy of the output so far. Tokens that arrive later do not change the copy."""
        outputs = [
            replace(
                each.output,
                token_ids=list(each.output.token_ids),
                logprobs=None if each.output.logprobs is None else list(each.output.logprobs),
                lora_request=self._lora,
            )
            for each in self.completions
        ]
        return RequestOutput(
            self._request_id,
            self._prompt,
            self._prepared.token_ids,
            self._prompt_logprobs,
            outputs,
            all(output.finished() for output in outputs),
            self._lora,
            self._num_cached_tokens,
        )

    def embedding_output(self) -> EmbeddingRequestOutput:
        return EmbeddingRequestOutput(
            self._request_id,
            EmbeddingOutput(normalized(self._embedding).tolist()),
            self._prepared.token_ids,
            self._num_cached_tokens,
        )

    def _read(self, token_id: int, measured: TokenLogprobs) -> dict[int, Logprob]:
        """Returns a dict for one position: token id -> log probability. The chosen token is first,
        then come the most likely tokens."""
        top = zip(measured.top_ids, measured.top_logprobs, strict=True)
        ranked = [(one, logprob, rank) for rank, (one, logprob) in enumerate(top, start=1)]
        own = token_id, measured.logprob, measured.rank
        return {
            one: Logprob(logprob, rank, self._token_text(one))
            for one, logprob, rank in (own, *(each for each in ranked if each[0] != token_id))
        }


# (sequence id, new tokens of the sequence or the error that ended it)
_News: TypeAlias = tuple[str, NewTokens | TandemError]


class _Batch:
    """Requests that run at the same time. `close` ends the requests that still run."""

    def __init__(
        self,
        engine: "_EngineThread",
        requests: Sequence[_Request],
        listener: Callable[[_News], object],
    ) -> None:
        """Begins the first completion of each request. The engine's thread calls `listener` with
        each `_News`, and the caller then passes the `_News` to `take`."""
        self._engine = engine
        self._listener = listener
        self._running: dict[str, tuple[_Request, _Completion]] = {}
        try:
            for request in requests:
                self._begin(request, request.completions[0])
        except TandemError:
            self.close()
            raise

    @property
    def is_open(self) -> bool:
        return bool(self._running)

    def take(self, news: _News) -> _Request | None:
        """Adds new tokens to the request to which they belong, and returns the request. Returns
        None if the completion has already ended. If a sequence ended with an error, raises the
        error."""
        sequence_id, told = news
        if sequence_id not in self._running:
            return None
        request, completion = self._running[sequence_id]
        if isinstance(told, TandemError):
            raise told
        # The other completions of a request begin when the first completion has a token. By then
        # the KV of the prompt is computed, so all completions share it.
        is_first = completion is request.completions[0] and not completion.output.token_ids
        request.take(completion, told)
        if is_first:
            for other in request.completions[1:]:
                self._begin(request, other)
        if completion.output.finished():
            del self._running[sequence_id]
            self._engine.remove(sequence_id)
        return request

    def close(self) -> None:
        for sequence_id in self._running:
            self._engine.remove(sequence_id)
        self._running.clear()

    def _begin(self, request: _Request, completion: _Completion) -> None:
        self._running[completion.spec.sequence_id] = request, completion
        self._engine.add(completion.spec, self._listener)


class _EngineThread:
    """The engine and its thread. Only this thread calls the engine, and any thread may call the
    public methods."""

    def __init__(
        self, folder: ModelFolder, config: EngineConfig, compiler: GrammarCompiler
    ) -> None:
        """Starts the thread, and waits until the model is loaded. Raises ConfigError."""
        self._calls: SimpleQueue[Callable[[Engine], object] | None] = SimpleQueue()
        self._listeners: dict[str, Callable[[_News], object]] = {}
        self._lock = Lock()
        # Why the engine has ended. "": it has not ended, and takes new sequences.
        self._end_reason = ""
        self._rank_end = ""  # how a rank ended, if one ended early
        started: Future[tuple[int, int]] = Future()
        work = partial(self._run, folder, config, compiler, started)
        self._thread = Thread(target=work, name="engine", daemon=True)
        self._thread.start()
        self.max_model_len, pool_tokens = started.result()
        # Maximum length of a sequence, in tokens, for which the KV pool has room. None: no limit.
        self.pool_tokens = pool_tokens or None

    def add(self, spec: SequenceSpec, listener: Callable[[_News], object]) -> None:
        """Begins a sequence. `listener` is called with the new tokens of the sequence or the error
        that ended it. Raises NotNow if the engine has ended."""
        with self._lock:
            if self._end_reason:
                raise NotNow(self._end_reason)
            self._listeners[spec.sequence_id] = listener
            self._calls.put(partial(self._begin, spec))

    def remove(self, sequence_id: str) -> None:
        """Ends a sequence that has not ended yet. The listener of the sequence is not called any
        more."""
        if self._listeners.pop(sequence_id, None) is not None:
            self._calls.put(lambda engine: engine.remove(sequence_id))

    def close(self) -> None:
        """Ends the engine and its thread. Sequences that still run end with the error NotNow."""
        self._calls.put(None)
        if current_thread() is not self._thread:
            self._thread.join(_CLOSE_MAX_S)
            # The engine's objects refer to each other, so only the garbage collector frees them.
            # Some of the objects end their threads when they are freed.
            gc.collect()

    def _run(
        self,
        folder: ModelFolder,
        config: EngineConfig,
        compiler: GrammarCompiler,
        started: "Future[tuple[int, int]]",
    ) -> None:
        try:
            start_thread = partial(
                IoThread, on_job_end=lambda: self._calls.put(Engine.has_work)
            )  # any queued call wakes the engine's thread; this one has no other effect
            runner = ModelRunner(folder, config, on_rank_end=self._note_rank_end)
            images = make_image_rows(folder, runner, config)
            engine = Engine(config, runner, folder.fingerprint, compiler, start_thread, images)
            pool_tokens = engine.load().longest_sequence * config.block_size
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result((engine.max_model_len, pool_tokens))
        reason = "this LLM is closed"
        try:
            while self._apply_calls(engine):
                if engine.has_work():
                    self._deliver(engine.step())
        except BaseException as error:
            log.exception(
                "the engine of this LLM failed, so all requests of this LLM end with an error and "
                "new requests are refused; create a new LLM"
            )
            reason = f"the engine of this LLM failed: {self._rank_end or repr(error)}"
        finally:
            with self._lock:
                self._end_reason = reason
            for sequence_id in list(self._listeners):
                self._tell(sequence_id, NotNow(reason), is_last=True)
            engine.close()
            runner.close()

    def _note_rank_end(self, text: str) -> None:
        self._rank_end = text

    def _apply_calls(self, engine: Engine) -> bool:
        """Runs all queued calls of other threads. If the engine has no work, waits for a call
        first. Returns False when `close` was called."""
        wait_s = None
        if engine.has_work():
            wait_s = 0.0
        elif engine.awaits_silent_threads():
            wait_s = _TICK_S
        with suppress(Empty):
            call = self._calls.get(timeout=wait_s)
            while call is not None:
                call(engine)
                call = self._calls.get_nowait()
            return False
        return True

    def _begin(self, spec: SequenceSpec, engine: Engine) -> None:
        if spec.sequence_id in self._listeners:
            try:
                engine.add(spec)
            except TandemError as error:
                self._tell(spec.sequence_id, error, is_last=True)

    def _deliver(self, report: StepReport) -> None:
        for news in report.new_tokens:
            self._tell(news.sequence_id, news, is_last=bool(news.finish_reason))
        for failed in report.failed:
            error = from_code(failed.code, failed.message)
            self._tell(failed.sequence_id, error, is_last=True)

    def _tell(self, sequence_id: str, news: NewTokens | TandemError, *, is_last: bool) -> None:
        take = self._listeners.pop if is_last else self._listeners.get
        if (listener := take(sequence_id, None)) is not None:
            listener((sequence_id, news))


def _engine_config(model: str, enable_lora: bool, options: Mapping[str, Any]) -> EngineConfig:
    """Converts the options of `LLM` to an EngineConfig. Raises ConfigError for an unknown
    option."""
    if options.get("pipeline_parallel_size", 1) != 1:
        raise ConfigError(
            "pipeline parallelism (each device has only some layers) is not supported; "
            "use tensor_parallel_size, which divides each layer among processes"
        )
    named = {_VLLM_OPTIONS.get(name, name): value for name, value in options.items()}
    named.pop("pipeline_parallel_size", None)
    allowed = _ENGINE_OPTIONS | {"model_revision", "model_impl"}
    if unknown := [name for name in named if name not in allowed]:
        own = sorted({*_VLLM_OPTIONS, *_ENGINE_OPTIONS - {*_VLLM_OPTIONS.values()}})
        raise ConfigError(
            f"LLM has no option {unknown[0]}; allowed are model, seed, enable_lora, "
            f"{', '.join((*_ANSWER_OPTIONS, *own))}"
        )
    if not enable_lora:
        named["max_loras"] = 0
    if isinstance(named.get("speculative_config"), Mapping):  # as in vLLM
        named["speculative_config"] = msgspec.json.encode(named["speculative_config"]).decode()
    num_cores = len(os.sched_getaffinity(0))
    num_threads = max(1, num_cores // named.get("tensor_parallel", 1))
    defaults = {"num_threads": num_threads, "itl_target_s": 0.0}
    return EngineConfig(**defaults | named, model=model, queue_max=_QUEUE_MAX)


def _single_prompt(prompt: Any) -> str | tuple[int, ...]:
    """Returns the text or the token ids of a prompt, which may be in a dict. Raises BadRequest."""
    if isinstance(prompt, Mapping):
        if len(prompt) != 1 or not {"prompt", "prompt_token_ids"} & prompt.keys():
            raise BadRequest(
                "a prompt dict must have one key, prompt or prompt_token_ids; the dict has "
                f"{', '.join(map(str, prompt)) or 'none'}",
                param="prompt",
            )
        (prompt,) = prompt.values()
    one, *others = validate(CompletionBody, {"prompt": prompt}).prompts()
    if others:
        raise refusal("prompt", why="a list in a list")
    return one if isinstance(one, str) else tuple(one)


def _completion(prompt: Any, params: SamplingParams | None) -> ClientRequest:
    """Returns the request to complete a prompt. Raises BadRequest."""
    return ClientRequest(_single_prompt(prompt), **_sampling_fields(params))


def _chat(
    fields: Mapping[str, Any], messages: Sequence[Message], params: SamplingParams | None
) -> ClientRequest:
    """Returns the request to continue a conversation. Raises BadRequest."""
    if unknown := fields.keys() - set(ConversationFields.model_fields):
        allowed = ", ".join(sorted({*ConversationFields.model_fields} - {"messages"}))
        raise BadRequest(f"`chat` has no argument {min(unknown)}; allowed are {allowed}")
    body = validate(ChatBody, {"messages": list(messages), **fields})
    return ClientRequest(body.to_conversation(), **_sampling_fields(params))


def _sampling_fields(params: SamplingParams | None) -> dict[str, Any]:
    """Returns the arguments of ClientRequest that control sampling. If `params` is None, the
    model's defaults apply."""
    if params is None:
        return {"sampling": SamplingParams(), "omitted": MODEL_DEFAULTS}
    form = params.structured_outputs
    wanted = None if form is None else StructuredOutputs(**form.given).wanted()
    return {"sampling": params, "structured_output": wanted}


def _prompts(prompts: Any) -> Sequence[Any]:
    """Returns the prompts as a sequence. A single prompt (a text, a dict or a list of token ids)
    becomes a sequence of one."""
    is_many = isinstance(prompts, list | tuple) and not isinstance(next(iter(prompts), ""), int)
    return prompts if is_many else [prompts]


def _each(given: _T | Sequence[_T] | None, number: int, name: str) -> Sequence[_T | None]:
    """Returns one value for each of `number` prompts. If `given` is a list, it must have `number`
    values. A single value is repeated for all prompts. Raises BadRequest if the list has another
    length."""
    if not isinstance(given, list | tuple):
        return [given] * number  # type: ignore[list-item]
    if len(given) != number:
        raise BadRequest(
            f"{name} has {len(given)} values, but there are {number} prompts; give a list of "
            f"{number} values, or one value for all prompts",
            param=name,
        )
    return given
