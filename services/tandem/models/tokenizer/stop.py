"""Stop strings: they say where a stream of text ends, and what may be shown before that is known.

The end of the text so far may be the beginning of a stop string; that much is held back until the
next text decides. How the text is cut into pieces changes nothing: the stop string that is complete
first ends the text, and of several complete at the same character the longest.
"""

from collections.abc import Sequence

from tandem.errors import BadRequest


class StopStrings:
    """The stop strings of one stream of text. Without any, all text passes at once."""

    def __init__(self, stops: Sequence[str], *, is_shown: bool = False) -> None:
        """`is_shown`: the stop string that ends the text is part of it. Raises BadRequest
        for an empty stop string, which every text would begin with."""
        if not all(stops):
            raise BadRequest("stop strings must not be empty", param="stop")
        self._stops = tuple(stops)
        self._held = ""
        self._hit = False
        self._is_shown = is_shown
        self.matched = ""  # the stop string that was hit

    def push(self, text: str) -> tuple[str, bool]:
        """Returns (text that may be shown now, whether a stop string was hit).

        Once hit, only what stands before the stop string comes out (and itself, if it is shown),
        and nothing after it.
        """
        if self._hit:
            return "", True
        text = self._held + text
        found = [
            (start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0
        ]
        if found:
            self._hit, self._held = True, ""
            end, start = min(found)
            self.matched = text[start:end]
            return text[: end if self._is_shown else start], True
        num_shown = len(text) - self._num_held(text)
        self._held = text[num_shown:]
        return text[:num_shown], False

    def flush(self) -> str:
        """Returns what is still held when the stream ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Returns how many characters at the end of `text` could begin a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        for num in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-num:]) for stop in self._stops):
                return num
        return 0
