"""Beam search as defined by vLLM 0.11's OpenAI server, with full forward passes of transformers."""

from __future__ import annotations

from collections.abc import Collection

import torch
from transformers import PreTrainedModel


@torch.inference_mode()
def beams_of(
    model: PreTrainedModel,
    prompt: list[int],
    *,
    width: int,
    max_tokens: int,
    length_penalty: float = 1.0,
    end_token_ids: Collection[int] = (),
    ignore_eos: bool = False,
) -> list[list[int]]:
    """Computes the completions of the best beams, best first, each with its end token."""
    running: list[tuple[list[int], float]] = [([], 0.0)]
    completed: list[tuple[list[int], float]] = []
    for _ in range(max_tokens):
        inputs = torch.tensor([prompt + tokens for tokens, _ in running])
        logprobs = model(inputs, logits_to_keep=1).logits[:, -1].double().log_softmax(-1)
        top = logprobs.topk(2 * width)
        candidates = [
            ([*tokens, token_id], total + logprob)
            for (tokens, total), ids, values in zip(
                running, top.indices.tolist(), top.values.tolist(), strict=True
            )
            for token_id, logprob in zip(ids, values, strict=True)
        ]
        going_on = candidates
        if not ignore_eos:
            completed += [beam for beam in candidates if beam[0][-1] in end_token_ids]
            going_on = [beam for beam in candidates if beam[0][-1] not in end_token_ids]
        running = sorted(going_on, key=lambda beam: -beam[1])[:width]

    def score(beam: tuple[list[int], float]) -> float:
        length = len(prompt) + len(beam[0]) - (beam[0][-1] in end_token_ids)
        return float(beam[1] / length**length_penalty)

    best = sorted([*completed, *running], key=score, reverse=True)[:width]
    return [tokens for tokens, _ in best]
