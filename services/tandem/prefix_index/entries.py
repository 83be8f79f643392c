"""The layout of an entry in the prefix tree: a bucket of the block hash, and a field in the bucket.

The first ten bytes of a block hash make the entry. All functions depend on their arguments only.
"""

NUM_BUCKETS = 1 << 16  # the first two bytes of a hash are its bucket
ENTRY_BYTES = 10  # bytes of a hash that the tree keeps: two for the bucket and eight for the field


def bucket_start(bucket: int) -> bytes:
    """Returns the lower bound of a bucket's hashes; b"" for the bucket after the last one."""
    return bucket.to_bytes(2, "big") if bucket < NUM_BUCKETS else b""


def split_entries(packed: bytes) -> set[bytes]:
    """Splits a string of concatenated entries into a set of entries."""
    return {packed[i : i + ENTRY_BYTES] for i in range(0, len(packed), ENTRY_BYTES)}
