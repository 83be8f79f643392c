"""Maps a block hash to an entry of the tree: a bucket and a field in it. Pure functions."""

NUM_BUCKETS = 1 << 16  # the first two bytes of a hash are its bucket
ENTRY_BYTES = 10  # bytes of a hash that the tree keeps: two for the bucket and eight for the field


def bucket_start(bucket: int) -> bytes:
    """Returns the smallest hash of a bucket; b"" for the end of the last one."""
    return bucket.to_bytes(2, "big") if bucket < NUM_BUCKETS else b""


def split_entries(packed: bytes) -> set[bytes]:
    """Splits concatenated entries."""
    return {packed[i : i + ENTRY_BYTES] for i in range(0, len(packed), ENTRY_BYTES)}
