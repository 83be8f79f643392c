"""The sequences of one engine by their ids."""

from tandem.engine.sequence import Sequence, Status
from tandem.engine.types import Mode
from tandem.errors import InternalError


class LiveSequences(dict[str, Sequence]):
    def find(self, sequence_id: str) -> Sequence:
        """Raises InternalError for an unknown one."""
        if sequence_id not in self:
            raise InternalError(f"no sequence {sequence_id} is on this engine")
        return self[sequence_id]

    def awaiting(self, sequence_id: str) -> Sequence:
        """Returns a sequence that awaits KV from outside. Raises InternalError if it does not."""
        sequence = self.find(sequence_id)
        if sequence.status is not Status.WAITING_FOR_KV:
            raise InternalError(f"sequence {sequence_id} is {sequence.status.value}, not awaiting")
        return sequence

    def awaiting_all(self, sequence_id: str) -> Sequence:
        """Returns one that awaits all its KV, not a prefix only. Raises InternalError."""
        sequence = self.awaiting(sequence_id)
        if sequence.mode is not Mode.WAITING_FOR_REMOTE_KV:
            raise InternalError(f"sequence {sequence_id} awaits its prefix, not all its KV")
        return sequence
