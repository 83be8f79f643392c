"""Images in block hashes: equal images share blocks, and different ones never do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tandem.common.block_hash import block_hash, hash_blocks
from tandem.common.prompt_image import PromptImage, image_marks

ROOT = b"r" * 16
RUN_LENGTH = 3
TOKEN = 7  # stands for each row of an image


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], list[PromptImage]]:
    """Token ids with images of few digests, whose runs touch each other or have text between."""
    token_ids: list[int] = []
    images = []
    for _ in range(draw(st.integers(0, 3))):
        token_ids += draw(st.lists(st.sampled_from([TOKEN, 8]), max_size=6))
        starts = []
        for _ in range(draw(st.integers(1, 3))):
            starts.append(len(token_ids))
            token_ids += [TOKEN] * RUN_LENGTH
            token_ids += draw(st.lists(st.just(9), max_size=2))
        digest = draw(st.sampled_from([b"a" * 16, b"b" * 16]))
        images.append(PromptImage(digest, b"", starts, RUN_LENGTH))
    return token_ids + draw(st.lists(st.sampled_from([TOKEN, 8]), max_size=12)), images


def content(token_ids: list[int], images: list[PromptImage]) -> list[object]:
    """What the model computes each token from: its id, or a row of an image."""
    found: list[object] = list(token_ids)
    for image in images:
        for at, rows in image.rows_in(0, len(token_ids)):
            found[at : at + len(rows)] = [(image.digest, row) for row in rows]
    return found


@given(prompts(), prompts(), st.integers(1, 6))
def test_hashes_are_equal_exactly_where_all_before_is_equal(
    one: tuple[list[int], list[PromptImage]],
    other: tuple[list[int], list[PromptImage]],
    block_size: int,
) -> None:
    hashes = [
        hash_blocks(ROOT, token_ids, block_size, image_marks(images, block_size))
        for token_ids, images in (one, other)
    ]
    contents = [content(*one), content(*other)]
    for index in range(min(map(len, hashes))):
        end = (index + 1) * block_size
        are_equal = contents[0][:end] == contents[1][:end]
        assert (hashes[0][index] == hashes[1][index]) == are_equal


@given(prompts(), st.integers(1, 6))
def test_blocks_are_hashed_one_by_one_as_all_at_once(
    prompt: tuple[list[int], list[PromptImage]], block_size: int
) -> None:
    token_ids, images = prompt
    marks = image_marks(images, block_size)
    parent = ROOT
    for index, found in enumerate(hash_blocks(ROOT, token_ids, block_size, marks)):
        start = index * block_size
        tokens = token_ids[start : start + block_size]
        parent = block_hash(parent, tokens, marks.get(index, b""))
        assert found == parent
        has_rows = any(any(image.rows_in(start, start + block_size)) for image in images)
        assert (index in marks) == has_rows


def test_without_images_hashes_are_those_of_the_tokens_alone() -> None:
    assert hash_blocks(ROOT, [1, 2, 3, 4], 2) == hash_blocks(ROOT, [1, 2, 3, 4], 2, {})
    assert hash_blocks(ROOT, [1, 2, 3, 4], 2)[0] == block_hash(ROOT, [1, 2])
