"""Valid inputs of each kind, which the fuzzing mutates."""

from __future__ import annotations

from typing import Any

import msgspec

from tandem.api.openai.requests import ChatBody, CompletionBody
from tandem.common.sampling_params import SamplingParams
from tandem.engine.types import Mode, SequenceSpec
from tandem.net.rpc.tandem.v1 import cluster_pb2, inference_pb2, worker_pb2
from tandem.net.security import keys
from tandem.net.security.audit_trail import AuditEntry, Caller
from tandem.net.store.registry import WorkerRecord
from tandem.worker.engine_process import messages
from tests.harness.scripted_worker import compatibility

_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": _SCHEMA}}
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}

# By path; the text after # only distinguishes several bodies of a path.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/v1/completions#all": {
        "prompt": ["x", [1, 2]],
        "max_tokens": 2,
        "logprobs": 2,
        "prompt_logprobs": 1,
        "echo": True,
        "logit_bias": {"5": -100},
        "stop": ["a", "b"],
        "bad_words": ["c"],
        "min_tokens": 1,
        "seed": 7,
        "truncate_prompt_tokens": 3,
        "structured_outputs": {"regex": "[ab]+"},
    },
    "/v1/completions#many": {"prompt": "x", "n": 2, "best_of": 3, "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "/v1/chat/completions#all": {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "s"}]},
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "content": "1", "tool_call_id": "c"},
            {"role": "user", "content": "x", "name": "n"},
        ],
        "max_completion_tokens": 2,
        "tools": [_TOOL],
        "tool_choice": "auto",
        "logprobs": True,
        "top_logprobs": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": _SCHEMA, "strict": True},
        },
    },
    "/tokenize": {"prompt": ["x", "y"], "return_token_strs": True},
    "/tokenize#chat": {"messages": [{"role": "user", "content": "x"}]},
    "/detokenize": {"tokens": [1, 2], "skip_special_tokens": True},
}
FIELDS = sorted(
    {*CompletionBody.supported, *ChatBody.supported, "prompt", "tokens", "n", "best_of"}
    | {"suffix", "user", "no such field"}
)

GENERATE = [
    inference_pb2.GenerateRequest(text="x", max_tokens=1),
    inference_pb2.GenerateRequest(text="x", max_tokens=1, n=2, best_of=3),
    inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=[1, 2]),
        max_tokens=2,
        logprobs=2,
        prompt_logprobs=1,
        stop=["a"],
        stop_token_ids=[3],
        echo=True,
        truncate_prompt_tokens=2,
        sampling=inference_pb2.SamplingParams(
            temperature=0.5, top_k=3, logit_bias={5: -1.0}, bad_words=["b"], seed=1
        ),
        structured_output=inference_pb2.StructuredOutput(regex="[ab]+"),
    ),
    inference_pb2.GenerateRequest(
        chat=inference_pb2.Chat(
            messages=[inference_pb2.ChatMessage(role="user", content="x")],
            tools=[msgspec.json.encode(_TOOL).decode()],
            chat_template_kwargs="{}",
        ),
        max_tokens=1,
    ),
]
_CLUSTER = "/tandem.v1.Cluster/"
ROUTER_CALLS: dict[str, list[Any]] = {
    "/tandem.v1.Inference/Generate": GENERATE,
    "/tandem.v1.Inference/Embed": [
        inference_pb2.EmbedRequest(
            input=[
                inference_pb2.EmbedInput(text="x"),
                inference_pb2.EmbedInput(token_ids=inference_pb2.TokenIds(ids=[1, 2])),
            ],
            dimensions=576,
            add_special_tokens=False,
            truncate_prompt_tokens=1,
        )
    ],
    "/tandem.v1.Inference/GetRequest": [inference_pb2.GetRequestRequest(request_id="x")],
    "/tandem.v1.Inference/GetUsage": [inference_pb2.GetUsageRequest(window="day", num_windows=2)],
    "/tandem.v1.Inference/ListModels": [inference_pb2.ListModelsRequest()],
    f"{_CLUSTER}GetCluster": [cluster_pb2.GetClusterRequest()],
    f"{_CLUSTER}ScalePools": [cluster_pb2.ScalePoolsRequest(sizes={"decode": 1})],
    f"{_CLUSTER}SetWorkerRole": [cluster_pb2.SetWorkerRoleRequest(worker_id="x", role="decode")],
    f"{_CLUSTER}FlipWorker": [cluster_pb2.SetWorkerRoleRequest(worker_id="x", role="decode")],
    f"{_CLUSTER}DrainWorker": [cluster_pb2.DrainWorkerRequest(worker_id="x", deadline_s=1.0)],
    f"{_CLUSTER}ResetPrefixCache": [cluster_pb2.ResetWorkersCacheRequest(worker_id="x")],
    "/grpc.health.v1.Health/Check": [inference_pb2.GetRequestRequest()],
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": [
        inference_pb2.GetRequestRequest(request_id="x")
    ],
}

_INPUT = worker_pb2.SequenceInput(
    token_ids=[1, 2, 3],
    num_prompt_tokens=3,
    max_tokens=2,
    stop_token_ids=[4],
    sampling=worker_pb2.Sampling(
        temperature=1.0, top_p=0.9, seed=1, logit_bias={5: 1.0}, logprobs=1
    ),
    prompt_logprobs=1,
)
_HOLDER = worker_pb2.PrefixHolder(worker_id="w", epoch="e", address="127.0.0.1:1", num_blocks=1)
SUBMIT = worker_pb2.SubmitSequence(
    request_id="r",
    attempt=1,
    input=_INPUT,
    prefill_candidates=[
        worker_pb2.PrefillCandidate(worker_id="w", epoch="e", address="127.0.0.1:1")
    ],
    prefix_holders=[_HOLDER],
)
_START = worker_pb2.StartPrefill(
    lease_id="l", request_id="r", input=_INPUT, consumer_worker_id="w", transport="grpc"
)
_HOLD = worker_pb2.HoldBlocks(lease_id="h", block_hashes=[b"x" * 32], consumer_worker_id="w")
WORKER_CALLS: dict[str, list[Any]] = {
    "Decode": [
        worker_pb2.DecodeCommand(submit=SUBMIT),
        worker_pb2.DecodeCommand(cancel=worker_pb2.CancelSequence(request_id="r")),
    ],
    "Prefill": [
        worker_pb2.PrefillCommand(start=_START),
        worker_pb2.PrefillCommand(hold=_HOLD),
        worker_pb2.PrefillCommand(release=worker_pb2.ReleaseLease()),
    ],
    "FetchBlocks": [worker_pb2.FetchBlocksRequest(lease_id="l", block_ids=[1, 2])],
    "Probe": [worker_pb2.ProbeRequest(num_bytes=10)],
    "ListChains": [worker_pb2.ListChainsRequest(blocks_max=10)],
    "ListBlocks": [worker_pb2.ListBlocksRequest(first_bucket=0, end_bucket=10)],
    "Connect": [
        worker_pb2.ConnectRequest(
            worker_id="w",
            epoch="e",
            transports=["grpc"],
            host=worker_pb2.HostIdentity(boot_id="b", uid=1),
            compatibility=worker_pb2.KvCompatibility(model_fingerprint="f", block_size=16),
        )
    ],
    "ResetPrefixCache": [worker_pb2.ResetPrefixCacheRequest()],
    "ReadLog": [worker_pb2.ReadLogRequest(after="1-2")],
    "GetState": [worker_pb2.GetStateRequest()],
    "SetRole": [worker_pb2.SetRoleRequest(role="decode")],
}

_SPEC = SequenceSpec("s", [1, 2, 3], 3, Mode.LOCAL, SamplingParams(max_tokens=4).resolved(seed=1))
COMMANDS = [
    messages.Add(_SPEC),
    messages.StartLocalPrefill("s"),
    messages.Restart(_SPEC),
    messages.Commit("s", 1),
    messages.ContinuePrefill("s", 1),
    messages.Remove("s"),
]

RECORD = WorkerRecord(
    worker_id="fuzz",
    epoch="e",
    role="decode",
    pool="decode",
    state="ready",
    address="127.0.0.1:1",
    metrics_address="",
    host="here",
    pid=1,
    model="x",
    max_model_len=2048,
    compatibility=compatibility("x"),
)
KEY = keys.create("acme", "user", now=0.0).record
ENTRY = msgspec.to_builtins(
    AuditEntry(at=1.0, router_id="r", caller=Caller("a", "k", "t"), what="w", outcome="done")
)
