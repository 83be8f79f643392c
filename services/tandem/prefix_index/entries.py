"""Maps a block hash to an entry of the tree: a bucket and a field of it. Pure."""

NUM_BUCKETS = 1 << 16  # by the first two bytes of a hash
ENTRY_BYTES = 10  # of a hash that the tree keeps: those two and the eight of the field


def bucket_start(bucket: int) -> bytes:
    """Returns the least hash of a bucket; empty for the end of the last one."""
    return bucket.to_bytes(2, "big") if bucket < NUM_BUCKETS else b""


def split_entries(packed: bytes) -> set[bytes]:
    """Splits entries that were written one after the other."""
    return {packed[i : i + ENTRY_BYTES] for i in range(0, len(packed), ENTRY_BYTES)}
