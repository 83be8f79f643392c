from __future__ import annotations

from tandem.router.request.choices.children import child_seed


def test_seeds_of_children_are_numbers_of_splitmix64() -> None:
    """The first numbers of the reference implementation from the seed 1234567."""
    assert [child_seed(1234567, i) for i in range(4)] == [
        1234567,
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]
