"""A validated body of a generation request: what to generate, and how to format the reply."""

from dataclasses import dataclass

from tandem.router.request.request import ClientRequest


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """The requests of one body, one for each prompt, and the options of the reply."""

    request_id: str
    requests: tuple[ClientRequest, ...]  # at least one; all completions or all chats
    stream: bool
    include_usage: bool
    continuous_usage: bool  # True: each chunk of a stream has the usage so far
    return_token_ids: bool
    # number of most likely tokens to show for each prompt token, as the client sent it; workers may
    # compute more, because an echoed prompt needs `logprobs`, too
    prompt_logprobs: int | None
    tokens_as_ids: bool

    @property
    def num_choices(self) -> int:
        return len(self.requests) * self.requests[0].sampling.n

    def request_of(self, choice: int) -> ClientRequest:
        """Returns the request to which a choice belongs. The choices of a request have consecutive
        indices."""
        return self.requests[choice // self.requests[0].sampling.n]
