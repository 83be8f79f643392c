"""A small hybrid model that is trained here. It has three layers of Gated DeltaNet and one of
attention, as Qwen3-Next, and predicts the bytes of Python's manual.

    python -m benchmarks.engine.hybrid_model [--minutes 20]

Training takes one thread, and ends after the given CPU time. Then the model's folder is written.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tandem_bench.framework import options, run_main
from tandem_bench.prose import english_prose

FOLDER = Path.home() / ".cache" / "tandem" / "peers" / "hybrid-bytes"
_BATCH, _WINDOW = 4, 256  # windows of a step, bytes of a window
_LEARNING_RATE, _WARM_UP = 2e-3, 50
_SIZES = {
    "vocab_size": 256,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mlp_only_layers": [0, 1, 2, 3],  # no experts
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


@options
class Options:
    minutes: float = 20.0
    output: Path = FOLDER


def main(options: Options = Options()) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    train(texts()[0], 60 * options.minutes, options.output)


def texts() -> tuple[list[int], list[int]]:
    """Returns the bytes of the text to train on, and of another text."""
    found = list(english_prose().encode())
    num_train = len(found) * 9 // 10
    return found[:num_train], found[num_train:]


def train(text: list[int], seconds: float, folder: Path) -> None:
    """Trains the model on a text for some time, and writes it to a folder. Prints the loss of a
    byte, in nats."""
    model: Any = Qwen3NextForCausalLM(Qwen3NextConfig(**_SIZES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.01)
    data = torch.tensor(text)
    started = time.process_time()
    mean = math.log(256)
    step = 0
    while (spent := (time.process_time() - started) / seconds) < 1:
        falling = 0.51 + 0.49 * math.cos(math.pi * spent)
        rate = falling * min(1.0, (step + 1) / _WARM_UP)
        for group in optimizer.param_groups:
            group["lr"] = _LEARNING_RATE * rate
        firsts = torch.randint(len(data) - _WINDOW, (_BATCH,))
        ids = torch.stack([data[first : first + _WINDOW] for first in firsts])
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean += 0.05 * (loss.item() - mean)
        if step % 20 == 0:
            print(f"step {step}, {100 * spent:.0f}%: loss {mean:.3f}", flush=True)
        step += 1
    print(f"{step} steps: loss {mean:.3f}")
    model.save_pretrained(folder)
    save_tokenizer(folder)


def save_tokenizer(folder: Path) -> None:
    """Writes a tokenizer whose tokens are the bytes."""
    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.save(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    run_main(main)
