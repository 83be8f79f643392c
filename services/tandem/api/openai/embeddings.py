"""Request bodies and replies of OpenAI's embeddings API.

An embedding is the hidden state of the prompt's last token after the final norm, scaled to length
1. The last token is used because it is the only token of a decoder that attends to all others.

`dimensions` must equal the model's hidden size. A shorter embedding is useful only if the model was
trained to give useful shortened embeddings, and model files do not state whether it was.
"""

import base64
import sys
from array import array
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Literal, cast

from pydantic import Discriminator, Field, Tag

from tandem.api.openai.choices import generate_choices
from tandem.api.openai.fields import FieldPolicy
from tandem.api.openai.requests import (
    OnePrompt,
    PriorityFields,
    TextPrompt,
    TokenIdsPrompt,
    prompt_kind,
)
from tandem.common.sampling_params import CHOICES_MAX, SamplingParams
from tandem.errors import BadRequest
from tandem.router.request.allowed import ALLOWED, name_prompt
from tandem.router.request.delta import Delta, Usage, normalized
from tandem.router.request.generator import Generator
from tandem.router.request.request import ClientRequest

# OpenAI's limit on the number of inputs. At most CHOICES_MAX inputs are sent to the workers at a
# time.
INPUTS_MAX = 2048
NAMES = {"prompt": "input"}
_ALLOWED = {
    "input": "a non-empty string, a list of token ids, or a list of at most "
    f"{INPUTS_MAX} such inputs",
    "encoding_format": "float or base64",
    "dimensions": "the model's own number of dimensions",
}
_Inputs = Annotated[list[OnePrompt], Field(min_length=1, max_length=INPUTS_MAX), Tag("list[str]")]
InputField = Annotated[TextPrompt | TokenIdsPrompt | _Inputs, Discriminator(prompt_kind)]


class EmbeddingsBody(PriorityFields):
    field_policy = FieldPolicy(records=frozenset(("user",)))
    allowed = _ALLOWED

    model: str = Field("", description=ALLOWED["model"])
    input: InputField = Field(description=_ALLOWED["input"])
    encoding_format: Literal["float", "base64"] = Field(
        "float", description=_ALLOWED["encoding_format"]
    )
    dimensions: int | None = Field(None, description=_ALLOWED["dimensions"])
    add_special_tokens: bool = Field(True, description=ALLOWED["add_special_tokens"])
    truncate_prompt_tokens: int | None = Field(None, description=ALLOWED["truncate_prompt_tokens"])

    def to_requests(self, request_id: str) -> list[ClientRequest]:
        """Builds one request for each input. Raises the errors of the function `to_requests`."""
        return to_requests(
            prompts_of(self.input),
            self.model,
            add_special_tokens=self.add_special_tokens,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            priority=self.resolved_priority(),
            request_id=request_id,
        )


def prompts_of(sent: Any) -> list[str | tuple[int, ...]]:
    """Returns the prompts in a field of the type `InputField`."""
    is_list = prompt_kind(sent) == "list[str]"
    inputs = cast("list[str | list[int]]", sent if is_list else [sent])
    return [one if isinstance(one, str) else tuple(one) for one in inputs]


def to_requests(
    inputs: Sequence[str | tuple[int, ...]],
    model: str,
    *,
    add_special_tokens: bool,
    truncate_prompt_tokens: int | None,
    priority: int,
    request_id: str,
) -> list[ClientRequest]:
    """Builds one request for each input. Raises BadRequest, whose message names the fields of
    a completion, such as `prompt`. Inside `with renamed(NAMES)`, it names `input` instead."""
    requests = []
    for index, prompt in enumerate(inputs):
        try:
            request = ClientRequest(
                prompt,
                model,
                SamplingParams(max_tokens=0, truncate_prompt_tokens=truncate_prompt_tokens),
                embed=True,
                add_special_tokens=add_special_tokens,
                priority=priority,
                request_id=request_id if len(inputs) == 1 else f"{request_id}-{index}",
            )
        except BadRequest as error:
            raise name_prompt(error, index) if len(inputs) > 1 else error from None
        requests.append(request)
    return requests


def check_dimensions(dimensions: int | None, generator: Generator) -> None:
    """Raises BadRequest unless the model has embeddings, and `dimensions` is None or their size."""
    if generator.model is None:
        return
    generator.model.check_task("embed")
    if dimensions is None:
        return
    hidden_size = generator.model.folder.config.hidden_size
    if dimensions != hidden_size:
        raise BadRequest(
            f"dimensions must be {hidden_size}, the size of the model's embeddings, not "
            f"{dimensions}",
            param="dimensions",
        )


async def embed(
    generator: Generator, requests: Sequence[ClientRequest], trace: Mapping[str, str]
) -> AsyncGenerator[Delta, None]:
    """Yields one delta for each request, in order. At most CHOICES_MAX requests run at once."""
    for start in range(0, len(requests), CHOICES_MAX):
        group = requests[start : start + CHOICES_MAX]
        by_index: dict[int, Delta] = {}
        async with aclosing(generate_choices(generator, group, trace, start)) as deltas:
            async for index, delta in deltas:
                by_index.setdefault(index, delta)
        for index in range(len(group)):
            yield by_index[index]


def embeddings_reply(body: EmbeddingsBody, model: str, deltas: Sequence[Delta]) -> dict[str, Any]:
    """Builds the reply body. `deltas` has one delta for each input."""
    total = sum((delta.usage for delta in deltas), Usage(0, 0, 0))
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": _encoded(normalized(delta.embedding), body.encoding_format),
        }
        for index, delta in enumerate(deltas)
    ]
    usage = {
        "prompt_tokens": total.prompt_tokens,
        "total_tokens": total.prompt_tokens,
        "prompt_tokens_details": total.cached_details,
    }
    return {"object": "list", "data": data, "model": model, "usage": usage}


def _encoded(embedding: "array[float]", encoding_format: str) -> str | list[float]:
    if encoding_format == "float":
        return embedding.tolist()
    if sys.byteorder == "big":
        embedding.byteswap()
    return base64.b64encode(embedding.tobytes()).decode()
