"""Converts gRPC requests for embeddings to ClientRequests, and the resulting deltas to gRPC
responses."""

import uuid

from tandem.api.grpc.usage import usage_message
from tandem.api.openai.embeddings import INPUTS_MAX, to_requests
from tandem.errors import BadRequest
from tandem.net.rpc.tandem.v1 import inference_pb2 as pb
from tandem.router.request.allowed import name_prompt, refusal
from tandem.router.request.delta import Delta, Usage, normalized
from tandem.router.request.request import ClientRequest
from tandem.router.request.urgency import priority_of


def parse_inputs(message: pb.EmbedRequest) -> list[ClientRequest]:
    """Builds one request for each input. Raises BadRequest, whose message names the fields of
    a completion, such as `prompt`. Inside `with renamed(NAMES)`, it names `input` instead."""
    if not 0 < len(message.input) <= INPUTS_MAX:
        raise BadRequest(
            f"input must be a list of 1 to {INPUTS_MAX} texts or lists of token ids; it has "
            f"{len(message.input)}",
            param="input",
        )
    cut = message.truncate_prompt_tokens if message.HasField("truncate_prompt_tokens") else None
    return to_requests(
        [_input(message, index) for index in range(len(message.input))],
        message.model,
        add_special_tokens=not message.HasField("add_special_tokens") or message.add_special_tokens,
        truncate_prompt_tokens=cut,
        priority=priority_of(message.priority, None),
        request_id=uuid.uuid4().hex,
    )


def _input(message: pb.EmbedRequest, index: int) -> str | tuple[int, ...]:
    given = message.input[index]
    kind = given.WhichOneof("kind")
    if kind == "text":
        return given.text
    if kind == "token_ids":
        return tuple(given.token_ids.ids)
    missing = refusal("prompt", why="missing: set text or token_ids")
    raise name_prompt(missing, index) if len(message.input) > 1 else missing


class EmbedAnswer:
    """Builds the response messages of one call, in the order of the inputs. The last message has
    the usage of the whole call."""

    def __init__(self, requests: list[ClientRequest]) -> None:
        self._requests = requests
        self._index = 0
        self._usage = Usage(0, 0, 0)

    def next(self, delta: Delta) -> pb.EmbedResponse:
        """Builds the response for the next input from the delta of this input. Raises Incompatible
        if the delta has no usable embedding."""
        index = self._index
        self._index += 1
        self._usage += Usage(
            delta.usage.prompt_tokens,
            0,
            delta.usage.cached_tokens,
            cached_by_tier=delta.usage.cached_by_tier,
        )
        response = pb.EmbedResponse(
            request_id=self._requests[index].request_id,
            index=index,
            embedding=normalized(delta.embedding),
        )
        if self._index == len(self._requests):
            response.usage.CopyFrom(usage_message(self._usage))
        return response
