"""Prompts with images give the tokens of transformers however their sequence runs: in chunks of any
size, prefilled by another engine, moved to another engine, or computed after a peer has failed."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import msgspec
import pytest
import torch
from PIL import Image
from transformers import PreTrainedModel

from tandem.common.prompt_image import PromptImage
from tandem.engine import image_rows
from tandem.engine.executor.vision_tower import VisionTower
from tandem.engine.image_rows import ImageRows, KeptRows
from tandem.engine.types import Mode, SequenceSpec
from tandem.errors import BadRequest, WorkerLost
from tandem.models.folder import ModelFolder
from tandem.models.images import read_rules
from tests.engine_driver import drive, make_spec
from tests.model_engines import make_model_engine
from tests.unit.engine.tiny_runs import load, prefill_elsewhere
from tests.vision_models import (
    chat_part,
    make_image,
    make_vision_model,
    own_prompt,
    reference_prompt,
    reference_tokens,
)

NUM_TOKENS = 12
Made = tuple[ModelFolder, PreTrainedModel]
WIDE, LIKE_WIDE = make_image(1, 90, 60), make_image(2, 90, 60)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make_vision_model(tmp_path_factory.mktemp("smolvlm"))


def chat(*images: Image.Image) -> list[dict[str, Any]]:
    parts = [part for image in images for part in (chat_part(image), {"type": "text", "text": "a"})]
    return [{"role": "user", "content": parts}]


@pytest.fixture(scope="module")
def expected(made: Made) -> dict[str, list[int]]:
    """The tokens of transformers after each of `specs`."""
    return {
        str(number): reference_tokens(
            made[1], *reference_prompt(made[0], chat(*images), images), NUM_TOKENS
        )
        for number, images in enumerate(([WIDE], [LIKE_WIDE, WIDE]))
    }


def specs(made: Made, mode: Mode = Mode.LOCAL, **more: Any) -> list[SequenceSpec]:
    found = []
    for number, images in enumerate(([WIDE], [LIKE_WIDE, WIDE])):
        token_ids, placed = own_prompt(made[0], chat(*images))
        found.append(
            make_spec(
                str(number), token_ids, mode=mode, max_tokens=NUM_TOKENS, images=placed, **more
            )
        )
    return found


@pytest.mark.parametrize("step_tokens", [7, 64])
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_in_chunks(
    made: Made, expected: dict[str, list[int]], step_tokens: int, kernels: str
) -> None:
    engine, _ = load(made, kernels=kernels, step_tokens=step_tokens)
    for spec in specs(made):
        engine.add(spec)
    assert drive(engine).token_ids == expected
    engine.close()


def test_prefilled_by_another_engine(made: Made, expected: dict[str, list[int]]) -> None:
    def asked(mode: Mode) -> list[SequenceSpec]:
        return specs(made, mode)

    source, here = load(made, step_tokens=37), load(made)
    outcome, _ = prefill_elsewhere(source, here, asked)
    assert outcome.token_ids == expected
    for engine, _ in (source, here):
        engine.close()


def test_computed_here_after_a_peer_has_failed_and_moved(
    made: Made, expected: dict[str, list[int]]
) -> None:
    engine, _ = load(made)
    for spec in specs(made, Mode.WAITING_FOR_REMOTE_KV):
        engine.add(spec)
    engine.step()
    for name in expected:
        engine.start_local_prefill(name)
    assert drive(engine).token_ids == expected
    engine.close()
    # another engine gets the requests after their first tokens
    other, _ = load(made)
    for spec in specs(made):
        token_ids = [*spec.token_ids, *expected[spec.sequence_id][:5]]
        other.add(msgspec.structs.replace(spec, token_ids=token_ids))
    rest = {name: tokens[5:] for name, tokens in expected.items()}
    assert drive(other).token_ids == rest
    other.close()


def test_an_image_that_cannot_be_computed_fails_its_sequence_alone(made: Made) -> None:
    engine, _ = load(made)
    first, second = specs(made)
    broken = [msgspec.structs.replace(image, data=b"x") for image in first.images]
    engine.add(msgspec.structs.replace(first, images=tuple(broken)))
    text = make_spec("text", [5, 6, 7], max_tokens=3)
    engine.add(text)
    outcome = drive(engine)
    assert [failed.sequence_id for report in outcome.reports for failed in report.failed] == ["0"]
    assert len(outcome.token_ids["text"]) == 3
    # the broken one has left nothing that the same image gets
    engine.add(second)
    assert len(drive(engine).token_ids["1"]) == NUM_TOKENS
    assert engine.load().blocks_used == 0
    engine.close()


@pytest.mark.parametrize("comes", [True, False])
def test_embeddings_come_from_an_encode_worker_or_are_computed_here(
    made: Made, expected: dict[str, list[int]], comes: bool
) -> None:
    """The answers to the requests come late. If they are errors, the engine computes the images."""
    rules = read_rules(made[0])
    assert not isinstance(rules, str)
    tower = VisionTower(made[0], rules, torch.device("cpu"))
    requested: list[tuple[PromptImage, Future[torch.Tensor]]] = []
    computed: list[bytes] = []

    def fetch(image: PromptImage, cache_salt: bytes) -> Future[torch.Tensor]:
        assert cache_salt == b""
        requested.append((image, Future()))
        return requested[-1][1]

    def encode(image: PromptImage) -> torch.Tensor:
        computed.append(image.digest)
        return tower.encode(image)

    rows = ImageRows(encode, fetch=fetch)
    engine, _ = make_model_engine(made[0], num_blocks=64, numerics="invariant", images=rows)
    for spec in specs(made):
        engine.add(spec)
    for _ in range(3):
        engine.step()
    assert len(requested) == 2, "one request for each of two images"
    for image, future in requested:
        if comes:
            future.set_result(tower.encode(image))
        else:
            future.set_exception(WorkerLost("no encode worker answers"))
    assert drive(engine).token_ids == expected
    assert len(computed) == (0 if comes else 2)
    engine.close()


def test_embeddings_are_kept_for_the_same_salt_only() -> None:
    image = PromptImage(b"d" * 16, b"", [0], 2)
    computed = []

    def encode(image: PromptImage) -> torch.Tensor:
        computed.append(image)
        return torch.zeros(2, 4)

    rows = ImageRows(encode)
    for num_computed, salt in ((1, b"a"), (2, b"b"), (2, b"a"), (2, b"b")):
        rows.find(image, salt)
        rows.wait(10)
        assert not rows.settle()
        assert rows.find(image, salt) is not None
        assert len(computed) == num_computed
    rows.close()


def test_kept_embeddings_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_rows, "KEPT_BYTES_MAX", 100)
    kept = KeptRows()
    rows = torch.zeros(10)  # 40 bytes
    for name in (b"a", b"b"):
        kept.keep((b"", name), rows)
    assert kept.find((b"", b"a")) is rows
    kept.keep((b"", b"c"), rows)
    assert kept.find((b"", b"b")) is None, "the one that was used least lately"
    assert kept.find((b"", b"a")) is rows
    large = torch.zeros(1000)
    kept.keep((b"", b"d"), large)
    assert kept.find((b"", b"d")) is large
    assert kept.find((b"", b"a")) is None


def test_tokens_of_images_outside_the_prompt_are_refused(made: Made) -> None:
    engine, _ = make_model_engine(made[0], num_blocks=64)
    spec = specs(made)[1]
    for images in (
        spec.images[::-1],
        (msgspec.structs.replace(spec.images[0], starts=[]),),
        (msgspec.structs.replace(spec.images[0], starts=[len(spec.token_ids)]),),
        (msgspec.structs.replace(spec.images[0], digest=b"short"),),
    ):
        with pytest.raises(BadRequest, match="an image has"):
            engine.add(msgspec.structs.replace(spec, images=images))
    engine.close()
