"""Applies stop strings to a stream of text.

If the text so far ends with the beginning of a stop string, this end of the text is held back until
more text arrives. For example, with the stop string "END", the text "the EN" gives "the ", and "EN"
is held back. The stop string that is complete first ends the text. If several stop strings are
complete at the same character, the longest one counts. The result does not depend on how the text
is split into pieces.
"""

from bisect import bisect_left
from collections.abc import Sequence

from tandem.errors import BadRequest


class StopStrings:
    """The stop strings of one stream of text. Without stop strings, text passes without delay."""

    def __init__(self, stops: Sequence[str], *, is_shown: bool = False) -> None:
        """`is_shown`: True if the output includes the stop string. Raises BadRequest for an empty
        stop string."""
        if not all(stops):
            raise BadRequest("stop strings must not be empty", param="stop")
        self._stops = sorted(stops)
        self._held = ""
        self._hit = False
        self._is_shown = is_shown
        self.matched = ""  # the stop string that ended the text; "" before that

    def push(self, text: str) -> tuple[str, bool]:
        """Adds text; returns the text to output now, and whether a stop string was found.

        The output ends before the stop string, or after it if `is_shown`. Later calls return ("",
        True).
        """
        if self._hit:
            return "", True
        text = self._held + text
        found = [
            (start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0
        ]
        if found:
            self._hit = True
            self._held = ""
            end, start = min(found)
            self.matched = text[start:end]
            return text[: end if self._is_shown else start], True
        num_shown = len(text) - self._num_held(text)
        self._held = text[num_shown:]
        return text[:num_shown], False

    def flush(self) -> str:
        """Returns the text that is held back, when the stream ends without a stop string."""
        held = self._held
        self._held = ""
        return held

    def _num_held(self, text: str) -> int:
        """Returns the length of the longest suffix of `text` that is a prefix of a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        for num in range(min(longest, len(text)), 0, -1):
            # Of the sorted stop strings, one that begins with `end` would follow it at once.
            end = text[-num:]
            place = bisect_left(self._stops, end)
            if place < len(self._stops) and self._stops[place].startswith(end):
                return num
        return 0
