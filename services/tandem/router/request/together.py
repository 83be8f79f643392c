"""The requests of one body: none is placed before all are prepared, and they share one answer.

An answer that is not streamed is built in memory. Log probabilities cost a worker little, because a
prompt is computed once for `n` choices, but each choice contains all of them. So their number is
bounded before anything is computed.
"""

import asyncio

from tandem.errors import BadRequest
from tandem.router.request.request import ClientRequest


class BodyRequests:
    """The requests of one body. `logprobs_max` bounds the log probabilities of their answer."""

    def __init__(self, num_requests: int = 1, *, logprobs_max: int) -> None:
        self._all_prepared = asyncio.Barrier(num_requests)
        self._logprobs_max = logprobs_max
        self._num_logprobs = 0

    async def begin(self) -> None:
        """Waits until all requests of the body are prepared."""
        await self._all_prepared.wait()

    def limit_logprobs(self, request: ClientRequest, num_prompt_tokens: int, limit: int) -> int:
        """Counts the log probabilities of a request with at most `limit` completion tokens.

        Returns `limit`, or a smaller one if the client did not set max_tokens. Raises BadRequest.
        """
        of_token = request.num_logprobs_kept
        needed = self._num_logprobs + request.num_prompt_logprobs * num_prompt_tokens
        least = limit
        if of_token and request.max_tokens is None:
            limit = min(limit, (self._logprobs_max - needed) // of_token)
            least = max(1, request.sampling.min_tokens)
        needed += of_token * max(limit, least)
        if needed > self._logprobs_max:
            name = "prompt_logprobs" if request.prompt_logprobs is not None else "logprobs"
            if request.echoes_prompt and request.logprobs is not None:
                name = "logprobs"
            raise BadRequest(
                f"{name} is too much for one answer: it would have {needed} log probabilities or "
                f"more, and may have at most {self._logprobs_max} (those of each token and of its "
                "most likely ones, in all prompts and choices); ask for fewer of them, or for "
                "fewer tokens, choices or prompts",
                param=name,
            )
        self._num_logprobs = needed
        return limit
