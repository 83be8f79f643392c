"""The entry of a block in the prefix tree is the first ten bytes of the block's hash. The first two
bytes are the number of a bucket, and the other eight bytes are a field in the bucket."""

NUM_BUCKETS = 1 << 16  # one bucket for each value of a hash's first two bytes
ENTRY_BYTES = 10  # number of bytes of a block's hash that the tree keeps


def bucket_start(bucket: int) -> bytes:
    """Returns the two bytes with which all hashes in a bucket begin. Returns b"" for the number
    `NUM_BUCKETS`, which is one more than the last bucket's number."""
    return bucket.to_bytes(2, "big") if bucket < NUM_BUCKETS else b""


def split_entries(packed: bytes) -> set[bytes]:
    """Splits concatenated entries into a set of entries."""
    return {packed[i : i + ENTRY_BYTES] for i in range(0, len(packed), ENTRY_BYTES)}
