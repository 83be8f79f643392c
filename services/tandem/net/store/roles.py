"""Redis users by kind of process: the keys and commands that each kind uses, as ACL rules. Pure.

router      all keys of its cluster: it reads records and writes API keys, sizes and usage
worker      the registry and the prefix tree, but no API keys or sizes
controller  the sizes of the pools, the lease of Ray's head, and the workers' measured bandwidths
"""

from tandem.common.config.tls import Kind

_CONNECT = ("auth", "hello", "ping", "select", "client|setinfo", "client|setname", "client|id")
_CLUSTER = ("cluster|slots", "cluster|shards", "cluster|nodes", "cluster|myid", "command", "asking")
_SCRIPTS = ("eval", "evalsha", "script|load")
_HASHES = ("hget", "hgetall", "hmget", "hset", "hsetnx", "hdel", "hincrby")
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
    # Not a list, because a router uses more and more commands. It may not administrate the server.
    "router": (
        "+@all",
        "-@admin",
        "-@dangerous",
        "-function",
        "+info",
        *(f"+{c}" for c in _CLUSTER),
    ),
    "worker": tuple(f"+{c}" for c in (*_CONNECT, *_CLUSTER, *_SCRIPTS, *_HASHES, *_RECORDS)),
    "controller": tuple(
        f"+{c}"
        for c in (
            *(*_CONNECT, *_CLUSTER, "brpop", "rpop", "lpush", "rpush", "get", "set", "incr"),
            *("eval", "sadd", "srem", "smembers", "mget"),
        )
    ),
}


def rules(kind: Kind, cluster_id: str) -> str:
    """Returns the rules of a user, which follow its name and password in an ACL."""
    keys = (f"~{pattern % f'tandem:{cluster_id}'}" for pattern in _KEYS[kind])
    return " ".join(("resetkeys", "resetchannels", *keys, "-@all", *_COMMANDS[kind]))
