"""Options of gRPC channels and servers. Frequent pings detect lost connections early. With gRPC's
defaults, a ping is sent only after hours, and servers close connections with frequent pings."""

MESSAGE_BYTES_MAX = 64 << 20

_PINGS: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # This timeout also detects a process that is stopped (SIGSTOP). Such a process answers no ping,
    # although the kernel still acknowledges the bytes that it receives.
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
_SIZES: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
]

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    *_PINGS,
    *_SIZES,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # By default, channels to the same address share a connection. If a connection attempt fails,
    # all of them wait before the next attempt. With this option, a new channel to a restarted
    # worker connects at once, even if an old channel is still waiting.
    ("grpc.use_local_subchannel_pool", 1),
]
SERVER_OPTIONS: list[tuple[str, int]] = [
    *_PINGS,
    *_SIZES,
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.so_reuseport", 0),
]
