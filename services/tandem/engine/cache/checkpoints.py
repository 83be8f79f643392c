"""The positions after which a sequence's states are frozen, so that a request can resume there.

A frozen state takes the memory of a thousand tokens or more, so there are few. The positions are
multiples of 64 tokens, at which kernels compute the same bits however a prompt is divided into
chunks:

- the last positions before the end of the prompt, and before its last tokens: chat templates end a
  prompt with a few tokens that the next turn of a conversation may not have;
- in a long prompt, every `interval` tokens;
- at the ends of beginnings that other prompts have, too: the system prompt with its tools, a pinned
  part, and the KV that is cached without a state (`Sequence.next_checkpoint`);
- in the answer, every 64 tokens. Only the last of these is worth its memory, so each one makes the
  one before it the first to be evicted.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.engine.cache.layout.kv_groups import KvLayout, checkpoint_interval, state_spacing

# Largest number of tokens with which most chat templates end a prompt, such as
# "<|im_start|>assistant\n<think>\n".
_LAST_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The rule for the sequences of one engine. Both are multiples of the block size."""

    spacing: int  # all positions are multiples of this number of tokens
    interval: int  # distance of positions in long prompts

    @classmethod
    def of(cls, layout: KvLayout) -> Checkpoints | None:
        """Returns the rule for an engine's pools; None without state groups."""
        if not layout.state_groups:
            return None
        blocks = layout.without_states
        spacing = state_spacing(layout.block_size)
        interval = max(
            checkpoint_interval(layout.groups[number], blocks) for number in layout.state_groups
        )
        return cls(spacing, -(-interval // spacing) * spacing)

    def next_after(self, num_computed: int, num_prompt: int) -> int:
        """Returns the first position after `num_computed` tokens, for a sequence with a prompt of
        `num_prompt` tokens. It may be after the end of the sequence."""
        if num_computed >= num_prompt - 1:
            return self.last_until(num_computed) + self.spacing
        return min(
            position
            for position in (
                (num_computed // self.interval + 1) * self.interval,
                self.last_until(num_prompt - 1 - _LAST_TOKENS),
                self.last_until(num_prompt - 1),
                self.last_until(num_prompt - 1) + self.spacing,
            )
            if position > num_computed
        )

    def includes(self, position: int, num_prompt: int) -> bool:
        return position > 0 and self.next_after(position - 1, num_prompt) == position

    def last_before(self, num_tokens: int) -> int:
        """Returns the last position after which a prompt of `num_tokens` tokens can resume, which
        is before its last token; 0 if there is none."""
        return self.last_until(num_tokens - 1)

    def last_until(self, num_tokens: int) -> int:
        """Returns the last multiple of `spacing` that is at most `num_tokens`."""
        return max(0, num_tokens) // self.spacing * self.spacing
