"""Redis users by kind of process: the keys and commands that each kind may use, as ACL rules. This
module does no I/O.

kind        keys that it may use
router      all keys of its cluster
worker      the registry and the prefix tree, but neither API keys nor the sizes of the pools
controller  the sizes of the pools, the lease of Ray's head, and the workers' measured bandwidths
"""

from tandem.common.config.tls import Kind

_CONNECT = ("auth", "hello", "ping", "select", "client|setinfo", "client|setname", "client|id")
_CLUSTER = ("cluster|slots", "cluster|shards", "cluster|nodes", "cluster|myid", "command", "asking")
_SCRIPTS = ("eval", "evalsha", "script|load")
_HASHES = ("hget", "hgetall", "hmget", "hset", "hsetnx", "hdel", "hincrby")
_LOG = ("xadd", "xtrim")  # the log of the prefix tree
_RECORDS = (
    "get",
    "mget",
    "set",
    "del",
    "exists",
    "pexpire",
    "smembers",
    "sadd",
    "srem",
    "time",
    "info",
)

_KEYS: dict[Kind, tuple[str, ...]] = {
    "router": ("{%s}:*", "{%s:*"),
    "worker": (
        *("{%s}:workers", "{%s}:worker:*", "{%s}:loading"),
        *("{%s}:contract*", "{%s}:mark", "{%s:*}:prefix*"),
    ),
    "controller": (
        "{%s}:scale",
        "{%s}:pools",
        "{%s}:controller",
        "{%s}:owned",
        "{%s}:head",
        "{%s}:head-number",
        "{%s}:leaving",
        "{%s}:worker:*:pairs",
    ),
}
_COMMANDS: dict[Kind, tuple[str, ...]] = {
    # A router may use all commands except those that administrate the server. A list of the
    # commands that it uses would have to change with each new feature of the router.
    "router": (
        "+@all",
        "-@admin",
        "-@dangerous",
        "-function",
        "+info",
        *(f"+{c}" for c in _CLUSTER),
    ),
    "worker": tuple(f"+{c}" for c in (*_CONNECT, *_CLUSTER, *_SCRIPTS, *_HASHES, *_LOG, *_RECORDS)),
    "controller": tuple(
        f"+{c}"
        for c in (
            *(*_CONNECT, *_CLUSTER, "brpop", "rpop", "lpush", "rpush", "get", "set", "incr"),
            *("eval", "sadd", "srem", "smembers", "mget"),
        )
    ),
}


def rules(kind: Kind, cluster_id: str) -> str:
    """Returns the ACL rules of the Redis user for a kind of process. In Redis's ACL syntax, the
    rules come after the user's name and password."""
    keys = (f"~{pattern % f'tandem:{cluster_id}'}" for pattern in _KEYS[kind])
    return " ".join(("resetkeys", "resetchannels", *keys, "-@all", *_COMMANDS[kind]))
