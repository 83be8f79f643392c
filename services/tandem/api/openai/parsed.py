"""A checked body of OpenAI's completions or chat completions: what to generate, how to answer."""

from dataclasses import dataclass

from tandem.router.request.request import ClientRequest


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """The requests of one body, one for each prompt, and the form of the answer to them."""

    request_id: str
    requests: tuple[ClientRequest, ...]  # not empty, all of one kind
    stream: bool
    include_usage: bool
    continuous_usage: bool  # in each chunk: its choice's so far
    return_token_ids: bool
    prompt_logprobs: int | None  # as the client asked; an echo may ask the workers for more
    tokens_as_ids: bool

    @property
    def num_choices(self) -> int:
        return len(self.requests) * self.requests[0].sampling.n

    def request_of(self, choice: int) -> ClientRequest:
        """Returns the request of a choice: those of a prompt follow each other."""
        return self.requests[choice // self.requests[0].sampling.n]
