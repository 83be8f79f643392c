"""Makes requests whose sampling parameters are given beside the other fields."""

from typing import Any

from tandem.common.sampling_params import SamplingParams
from tandem.router.request.request import ClientRequest


def client_request(prompt: Any, **fields: Any) -> ClientRequest:
    """Returns a request; `max_tokens` is None by default, as in an API."""
    names = fields.keys() & {*SamplingParams.__struct_fields__}
    drawn = {name: fields.pop(name) for name in names}
    return ClientRequest(prompt, sampling=SamplingParams(**{"max_tokens": None, **drawn}), **fields)
