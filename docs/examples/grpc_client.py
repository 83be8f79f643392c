"""Streams a chat answer over gRPC: `python docs/examples/grpc_client.py [ADDRESS] [QUESTION]`."""

import sys

import grpc

from tandem.client import InferenceStub
from tandem.client import inference as pb


def main(address: str = "127.0.0.1:8001", question: str = "What is gravity?") -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=question)])
    request = pb.GenerateRequest(
        chat=chat, max_tokens=100, sampling=pb.SamplingParams(temperature=0)
    )
    with grpc.insecure_channel(address) as channel:
        try:
            for response in InferenceStub(channel).Generate(request, timeout=120):
                print(response.text, end="", flush=True)
        except grpc.RpcError as error:
            sys.exit(f"{error.code().name}: {error.details()}")
    usage = response.usage
    print(
        f"\n[{response.finish_reason}; {usage.prompt_tokens} prompt tokens, "
        f"{usage.cached_tokens} of them cached, {usage.completion_tokens} made]"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
