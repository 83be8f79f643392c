"""Converts a request's usage to a gRPC message."""

from tandem.net.rpc.tandem.v1 import inference_pb2 as pb
from tandem.router.request.delta import Usage


def usage_message(usage: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        reasoning_tokens=usage.reasoning_tokens,
        **usage.cached_details,
        **usage.marks,
    )
