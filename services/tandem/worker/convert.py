"""Converts a `SequenceInput` message into the engine's `SequenceSpec`."""

import time

from tandem.common.prompt_image import PromptImage, with_flags
from tandem.engine.types import Mode, SequenceSpec
from tandem.net.rpc.convert import to_struct
from tandem.net.rpc.tandem.v1 import worker_pb2 as pb


def sequence_spec(
    message: pb.SequenceInput,
    *,
    sequence_id: str,
    mode: Mode,
    remote_prefill_min_tokens: int = 0,
    first_wanted_block: int = 0,
    consumer_rate: tuple[float, float] | None = None,
    fork_of: str = "",
    first_token_s: float = 0.0,
    late_s: float = 0.0,
) -> SequenceSpec:
    """Returns the engine's spec of a sequence that has just arrived.

    `first_token_s` is the deadline of the first token, in seconds after the message was sent; 0
    means no deadline. `late_s` is the time in seconds that the message spent in transit. This
    time is subtracted from `first_token_s`.
    """
    images = tuple(to_struct(PromptImage, image) for image in message.images)
    return to_struct(
        SequenceSpec,
        message,
        token_ids=with_flags(list(message.token_ids), images),
        images=images,
        sequence_id=sequence_id,
        mode=mode,
        remote_prefill_min_tokens=remote_prefill_min_tokens,
        first_wanted_block=first_wanted_block,
        consumer_rate=consumer_rate,
        fork_of=fork_of,
        first_token_by=time.monotonic() + first_token_s - late_s if first_token_s else 0.0,
    )
