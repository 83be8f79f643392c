"""The entry of a block in the prefix tree: the first ten bytes of the block's hash. Two bytes
select a bucket, and the other eight are a field in the bucket."""

# number of buckets; the first two bytes of a hash are the number of its bucket
NUM_BUCKETS = 1 << 16
ENTRY_BYTES = 10  # number of bytes of a hash that the tree keeps


def bucket_start(bucket: int) -> bytes:
    """Returns the first two bytes of all hashes in a bucket, which are the lower bound of these
    hashes. Returns b"" for `NUM_BUCKETS`, the number after the last bucket."""
    return bucket.to_bytes(2, "big") if bucket < NUM_BUCKETS else b""


def split_entries(packed: bytes) -> set[bytes]:
    """Splits concatenated entries into a set of entries."""
    return {packed[i : i + ENTRY_BYTES] for i in range(0, len(packed), ENTRY_BYTES)}
