"""Large answers are made beside the event loop, which serves others meanwhile."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from tandem.api.http.stream import collect
from tandem.api.openai.choices import ChoiceDelta
from tandem.api.openai.replies import Replies
from tandem.api.openai.requests import parse_completion
from tandem.net.rpc.tandem.v1.worker_pb2 import LogprobEntry
from tandem.router.request.delta import Delta, Usage

ENTRY = LogprobEntry(logprob=-1.0, rank=1)


class Noting(Replies):
    """Replies that note the thread that makes an answer."""

    def whole(self, choices: Sequence[Sequence[Delta]]) -> dict[str, Any]:
        return {"thread": threading.current_thread(), "num": sum(map(len, choices))}


async def deltas(*, num_choices: int, **measured: list[LogprobEntry]) -> AsyncGenerator[Any, None]:
    for choice in range(num_choices):
        yield ChoiceDelta(choice, Delta("x", [], Usage(1, 1, 0), index=choice, **measured))


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
async def test_an_answer_of_many_log_probabilities_is_made_in_a_thread(field: str) -> None:
    for num_choices, num, is_beside in ((2, 0, False), (2, 100, False), (3, 100, True)):
        replies = Noting(parse_completion({"prompt": "x", "n": num_choices}, "id"), "m")
        made, last = await collect(
            deltas(num_choices=num_choices, **{field: [ENTRY] * num}), replies
        )
        assert (made["thread"] is not threading.main_thread()) is is_beside
        assert (made["num"], last.index) == (num_choices, num_choices - 1)
