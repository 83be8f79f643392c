"""A validated body of a generation request: what to generate, and how to format the reply."""

from dataclasses import dataclass

from tandem.router.request.request import ClientRequest


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """The requests of one body, one for each prompt, and the options of the reply."""

    request_id: str
    requests: tuple[ClientRequest, ...]  # not empty; all of the same kind
    stream: bool
    include_usage: bool
    continuous_usage: bool  # add the usage so far to each chunk
    return_token_ids: bool
    prompt_logprobs: int | None  # the client's value; an echo may need more from workers
    tokens_as_ids: bool

    @property
    def num_choices(self) -> int:
        return len(self.requests) * self.requests[0].sampling.n

    def request_of(self, choice: int) -> ClientRequest:
        """Finds the request of a choice. The choices of a prompt have consecutive indices."""
        return self.requests[choice // self.requests[0].sampling.n]
