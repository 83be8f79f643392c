"""The compiled decoder against torch: shapes that hurt, every instruction set, int8, sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.common.config.engine import EngineConfig
from tandem.engine.executor.native.decoder import NativeDecoder
from tandem.engine.executor.runner import ModelRunner
from tandem.engine.executor.weights.decoder_weights import Linear
from tandem.engine.scheduler.batch import SequenceSlice, StepBatch
from tandem.errors import ConfigError
from tandem.models.source import resolve
from tandem_kernels.native import library
from tandem_kernels.sampling import Draw
from tests.model_engines import make_runner
from tests.step_batches import place
from tests.tiny_models import make_tiny_model
from tests.unit.engine.executor.native import native_shapes
from tests.unit.engine.executor.native.native_shapes import BASE, SHAPES, Shape

ROOT = Path(__file__).parents[5]
NATIVE = ROOT / "kernels" / "tandem_kernels" / "native"
LIBRARY = library.load()
assert LIBRARY is not None, "the native kernels were not built"
NAMES = ("amx", "avx512_bf16", "avx512", "avx2", "plain")  # the best first
INSTRUCTIONS = [name for name in NAMES if LIBRARY.instructions(name)]


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=repr)
def test_it_computes_what_torch_does(shape: Shape, instructions: str) -> None:
    native_shapes.compare(shape, instructions)


@pytest.mark.parametrize("shape", [BASE, SHAPES[-5], replace(BASE, experts=5)], ids=repr)
def test_threads_do_not_change_a_bit(shape: Shape) -> None:
    alone = native_shapes.outputs(replace(shape, num_threads=1), None)
    for num_threads in (2, 5):
        many = native_shapes.outputs(replace(shape, num_threads=num_threads), None)
        assert all(map(torch.equal, alone, many))


ROUNDED = replace(BASE, weights=torch.bfloat16, kv="bfloat16", hidden=100, inner=200, vocab=300)


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize(
    "shape",
    [
        *(replace(ROUNDED, block_size=block_size) for block_size in (8, 16, 64)),
        replace(ROUNDED, experts=7),
        replace(native_shapes.QUANTIZED, kv="bfloat16", blocks=("Q4_1", "Q5_0", "Q8_0")),
        replace(native_shapes.QUANTIZED_BY_256, kv="bfloat16", blocks=("Q5_K", "Q6_K")),
        replace(native_shapes.QUANTIZED_BY_256, kv="bfloat16", blocks=("Q4_Z32", "Q4_Z64")),
        replace(
            native_shapes.QUANTIZED, kv="bfloat16", blocks=("MXFP4", "Q8_0", "Q4_1"), experts=7
        ),
    ],
)
def test_a_token_does_not_depend_on_its_company_or_its_chunk(
    instructions: str, shape: Shape
) -> None:
    """Sequence 1's 9 tokens in bf16, and with quantized weights, are the same beside others and
    alone, within one instruction set."""
    seen = []
    for num_threads, steps in (
        (1, native_shapes.batches(shape)),
        (3, native_shapes.batches(shape)),
        (1, native_shapes.cut_otherwise(shape, (9,))),
        (2, native_shapes.cut_otherwise(shape, (1,) * 9)),
        (1, native_shapes.cut_otherwise(shape, (4, 5))),
    ):
        decoder = NativeDecoder(
            native_shapes.config_of(shape),
            native_shapes.random_weights(shape),
            num_threads=num_threads,
            instructions=instructions,
        )
        kv = native_shapes.pool(shape)
        table = native_shapes.batches(shape)[-1].slices[1].block_table
        for step in steps:
            decoder.forward(step, [kv])
        last = StepBatch([SequenceSlice([7], 10, table, True)])
        seen.append((decoder.forward(last, [kv]).clone(), native_shapes.contents(kv)[:, :, table]))
    for logits, blocks in seen[1:]:
        assert torch.equal(logits, seen[0][0])
        assert torch.equal(blocks, seen[0][1])


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("blocks", [(), ("Q8_0", "Q4_1")])
def test_rows_of_any_number_are_computed_alike(instructions: str, blocks: tuple[str, ...]) -> None:
    """One prompt whole, and in chunks that fill AMX's tiles in all ways: none, one, pairs of them,
    the last of a pair not full, more than the second-level cache has room for at once."""
    shape = replace(ROUNDED, vocab=61, hidden=1100, inner=2050)
    if blocks:
        shape = replace(shape, hidden=1120, inner=2048, blocks=blocks)
    # Of 2,048 inputs AMX has 384 rows at once, and others have 128 at most.
    length, chunks = (400, (7, 16, 17, 32, 50, 64, 353))
    if instructions != "amx":
        length, chunks = 200, (7, 17, 64, 153)
    token_ids = [(7 * i) % shape.vocab for i in range(length)]
    table = list(range(length // shape.block_size + 1))
    decoder = NativeDecoder(
        native_shapes.config_of(shape),
        native_shapes.random_weights(shape),
        num_threads=2,
        instructions=instructions,
    )
    pools = []
    for num in (length, *chunks):
        kv = native_shapes.pool(shape, len(table))
        for first in range(0, length, num):
            part = token_ids[first : first + num]
            decoder.forward(StepBatch([SequenceSlice(part, first + len(part), table, True)]), [kv])
        pools.append(kv.memory)
    assert all(torch.equal(kv, pools[0]) for kv in pools)


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_most_likely_token_is_the_first_of_equals(num_threads: int, instructions: str) -> None:
    """Every output twice, far apart: in another thread's share, too."""
    shape = replace(ROUNDED, vocab=2 * 907)
    weights = native_shapes.random_weights(shape)
    weights = replace(weights, output=weights.output[:907].repeat(2, 1))
    decoder = NativeDecoder(
        native_shapes.config_of(shape), weights, num_threads=num_threads, instructions=instructions
    )
    kv = native_shapes.pool(shape)
    for batch in native_shapes.batches(shape):
        logits = decoder.forward(batch, [kv])
        greedy = Draw(temperature=0, top_k=0, top_p=1, min_p=0, seed=0, position=0)
        chosen = decoder.sample(logits, [greedy] * len(logits))
        assert chosen == logits.numpy().argmax(-1).tolist()
        assert torch.equal(logits[:, :907], logits[:, 907:])
        assert not chosen or max(chosen) < 907


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_gates_and_ups_may_come_in_one_matrix(instructions: str) -> None:
    """Checkpoints are loaded this way."""
    shape = replace(ROUNDED, bias=True)
    apart = native_shapes.random_weights(shape)
    layers = []
    for layer in apart.layers:
        weights, biases = zip(
            *((part.weight, part.bias) for part in layer.mlp.gate_up), strict=True
        )
        joined = Linear(torch.cat(weights), torch.cat(biases))
        layers.append(replace(layer, mlp=replace(layer.mlp, gate_up=(joined,))))
    seen = []
    for weights in (apart, replace(apart, layers=tuple(layers))):
        decoder = NativeDecoder(
            native_shapes.config_of(shape), weights, num_threads=1, instructions=instructions
        )
        kv = native_shapes.pool(shape)
        seen.append(
            [decoder.forward(batch, [kv]).clone() for batch in native_shapes.batches(shape)]
        )
    for one, other in zip(*seen, strict=True):
        assert torch.equal(one, other)


def test_the_best_instructions_are_chosen_and_unknown_ones_refused() -> None:
    assert LIBRARY is not None
    assert LIBRARY.instructions() == INSTRUCTIONS[0]
    assert LIBRARY.instructions("sse9") is None
    with pytest.raises(MemoryError):
        NativeDecoder(
            native_shapes.config_of(BASE),
            native_shapes.random_weights(BASE),
            num_threads=1,
            instructions="sse9",
        )


def test_int8_weights_are_close_and_told_in_the_dtype() -> None:
    """Each weight is off by at most half a step of 1/127 of its row's largest."""
    folder = resolve("smollm2")
    config = EngineConfig(model="", device="cpu", dtype="float32")
    exact = ModelRunner(folder, config)
    rounded = ModelRunner(folder, replace(config, weights="int8"))
    assert (exact.dtype_name, rounded.dtype_name) == ("float32", "float32+int8")
    prompt = list(range(1000, 1040))
    logits = []
    for runner in (exact, rounded):
        (sequence,) = place(runner, [prompt])
        logits.append(runner.forward(StepBatch([sequence.take(len(prompt))]))[0])
    cosine = torch.nn.functional.cosine_similarity(logits[0], logits[1], dim=0)
    assert 0.99 < cosine < 1
    assert not torch.equal(*logits)


@pytest.mark.parametrize("blocks", [("Q4_0", "Q5_1", "Q8_0"), ("MXFP4",)])
def test_quantized_products_are_the_same_on_all_processors_that_fuse_sums(
    blocks: tuple[str, ...],
) -> None:
    """Sums of groups are whole numbers, and groups are added in one order."""
    shape = replace(native_shapes.QUANTIZED, blocks=blocks)
    first, *others = (
        native_shapes.outputs(shape, name) for name in INSTRUCTIONS if name != "plain"
    )
    for other in others:
        assert all(map(torch.equal, first, other))


def test_what_cannot_be_native_falls_back_or_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = make_tiny_model("llama-small-heads", tmp_path)
    runner = make_runner(folder, numerics="invariant")
    assert runner.numerics_name == "invariant"
    assert "head size 8 is not a multiple of 16" in caplog.text
    with pytest.raises(ConfigError, match="head size 8"):
        make_runner(folder, kernels="native")
    with pytest.raises(ConfigError, match="weights=int8 needs native kernels"):
        make_runner(folder, weights="int8")
    whole, _ = make_tiny_model("llama", tmp_path / "whole")
    native = make_runner(whole, numerics="invariant")
    same = INSTRUCTIONS[0].replace("amx", "avx512").replace("avx512_bf16", "avx512")
    assert native.numerics_name == f"invariant-3-{same}"
    assert make_runner(whole, numerics="fast").numerics_name == "fast-3"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("sanitizer", ["address", "undefined"])
def test_all_shapes_are_clean_under(sanitizer: str, tmp_path: Path) -> None:
    """The decoder is built again in a copy of the package, for this machine's instructions only."""
    package = tmp_path / "tandem_kernels"
    shutil.copytree(NATIVE.parent, package, ignore=shutil.ignore_patterns("*.so"))
    native = package / "native"
    # api.cpp names these, too, but asks the processor before it uses them.
    for name in set(NAMES) - set(INSTRUCTIONS):
        stub = f"const Entry {name}{{}};"
        stub += " bool amx_permitted() { return false; }" if name == "amx" else ""
        text = f'#include "decoder.h"\nnamespace tandem {{ {stub} }}\n'
        (native / f"{name}.cpp").write_text(text)
    built = native / next(NATIVE.glob("_decoder*.so")).name
    objects = [source.with_suffix(".o").name for source in native.glob("*.cpp")]
    flags = ["-std=c++17", "-O1", "-g1", "-fopenmp", "-fPIC", "-Wno-psabi"]
    flags += [f"-fsanitize={sanitizer}", f"-fno-sanitize-recover={sanitizer}"]
    make = ["make", "-j2", "CXX=g++", f"CXXFLAGS={' '.join(flags)}"]
    subprocess.run([*make, *objects], cwd=native, check=True)
    link = ["g++", *flags, "-shared", "-o", built.name]
    subprocess.run([*link, *objects], cwd=native, check=True)
    name = {"address": "libasan.so", "undefined": "libubsan.so"}[sanitizer]
    preload = subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip()
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tmp_path}:{ROOT}:{ROOT}/services",
        "LD_PRELOAD": preload,
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
    }
    for instructions in INSTRUCTIONS:
        done = subprocess.run(
            [sys.executable, "-m", "tests.unit.engine.executor.native.native_shapes", instructions],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert "shapes agree" in done.stdout
        assert f"with {built}" in done.stdout
