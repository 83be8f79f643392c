"""A validated body of a generation request: what to generate, and how to format the reply."""

from dataclasses import dataclass

from tandem.router.request.request import ClientRequest


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """The requests of one body, one for each prompt, and the options of the reply."""

    request_id: str
    # one request for each prompt, at least one; all of the same kind (completion or chat)
    requests: tuple[ClientRequest, ...]
    stream: bool
    include_usage: bool
    continuous_usage: bool  # True: each chunk of a stream has the usage so far
    return_token_ids: bool
    # `prompt_logprobs` of the body: how many of the most likely tokens the reply shows for each
    # prompt token; None: the reply has no such list
    prompt_logprobs: int | None
    tokens_as_ids: bool
    custom_tools: frozenset[str] = frozenset()  # names of the tools of the type `custom`

    @property
    def num_choices(self) -> int:
        return len(self.requests) * self.requests[0].sampling.n

    def request_of(self, choice: int) -> ClientRequest:
        """Returns the request to which a choice belongs. With n=2, request 0 has the choices 0 and
        1, and request 1 has the choices 2 and 3."""
        return self.requests[choice // self.requests[0].sampling.n]
