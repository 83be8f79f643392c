"""The messages and stubs of Tandem's public gRPC API, for programs that call a router.

  with grpc.insecure_channel("127.0.0.1:8001") as channel:
      chat = inference.Chat(messages=[inference.ChatMessage(role="user", content="Hello!")])
      for response in InferenceStub(channel).Generate(inference.GenerateRequest(chat=chat)):
          print(response.text, end="")

The modules are generated from proto/tandem/v1. A program must not load a second copy that it
generates itself: protobuf registers each message once per process, and raises TypeError for the
second copy.
"""

from tandem.net.rpc.tandem.v1 import cluster_pb2 as cluster
from tandem.net.rpc.tandem.v1 import inference_pb2 as inference
from tandem.net.rpc.tandem.v1.cluster_pb2_grpc import ClusterStub
from tandem.net.rpc.tandem.v1.inference_pb2_grpc import InferenceStub

__all__ = ["ClusterStub", "InferenceStub", "cluster", "inference"]
