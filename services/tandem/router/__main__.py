"""`tandem router`: one replica. Secrets come from the environment, see config."""

from __future__ import annotations

import argparse
import sys


def main(argv: list[str] | None = None) -> int:
    """Exit code 1, and one line that says why, when the settings are wrong or a port is taken."""
    # Tokenizer processes import this module again: all that is heavy is imported inside.
    from tandem.config import AutoscaleConfig, ClusterConfig, RouterConfig, parse_scale_objects
    from tandem.errors import TandemError
    from tandem.observability.logs import configure_logging

    args = _parser().parse_args(argv)
    try:
        configure_logging(args.router_id)
        config = RouterConfig(
            cluster=ClusterConfig.from_environment(),
            model=args.model,
            served_model_name=args.served_model_name,
            host=args.host,
            http_port=args.http_port,
            grpc_port=args.grpc_port,
            router_id=args.router_id,
            tokenizer_processes=args.tokenizer_processes,
            ttft_limit_s=args.ttft_limit,
            ttft_limit_token_s=args.ttft_limit_token,
            lookup_deadline_s=args.lookup_deadline,
            hold_deadline_s=args.hold_deadline,
            drain_deadline_s=args.drain_deadline,
            trust_tenant_header=args.trust_tenant_header,
            allowed_hosts=tuple(filter(None, args.allowed_hosts.lower().split(","))),
            header_bytes_max=args.header_bytes_max,
            headers_max=args.headers_max,
            header_deadline_s=args.header_deadline,
            body_deadline_s=args.body_deadline,
            keep_alive_s=args.keep_alive,
            connections_max=args.connections_max,
            autoscale=AutoscaleConfig(
                mode=args.autoscale,
                prefill_min=args.autoscale_prefill_min,
                prefill_max=args.autoscale_prefill_max,
                decode_min=args.autoscale_decode_min,
                decode_max=args.autoscale_decode_max,
                ttft_s=args.autoscale_ttft,
                ttft_token_s=args.autoscale_ttft_token,
                itl_s=args.autoscale_itl,
                cold_start_s=args.autoscale_cold_start,
                interval_s=args.autoscale_interval,
            ),
            scale_objects=parse_scale_objects(args.scale_objects),
        )
        from tandem.router.server import serve

        serve(config)
    except TandemError as error:
        print(f"{args.router_id}: {error.message}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tandem router", description=__doc__)
    parser.add_argument("--model", required=True, help="a folder, a GGUF file or a hub name")
    parser.add_argument("--served-model-name", default="", help="default: the model's own name")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--http-port", type=int, default=8000)
    parser.add_argument("--grpc-port", type=int, default=8001)
    parser.add_argument("--router-id", default="router-0")
    parser.add_argument("--tokenizer-processes", type=int, default=1)
    parser.add_argument(
        "--ttft-limit",
        type=float,
        default=120.0,
        help="seconds; a request is refused early (429) when its first token is predicted to come "
        "later; 0: none is",
    )
    parser.add_argument(
        "--ttft-limit-token", type=float, default=0.0, help="seconds more for each prompt token"
    )
    parser.add_argument(
        "--lookup-deadline",
        type=float,
        default=0.02,
        help="seconds that placement waits for the prefix tree in Redis, before it goes without",
    )
    parser.add_argument(
        "--hold-deadline",
        type=float,
        default=30.0,
        help="seconds that a request waits for a worker while a pool that it needs has none",
    )
    parser.add_argument(
        "--drain-deadline",
        type=float,
        default=30.0,
        help="seconds for live requests to end once it is told to stop",
    )
    parser.add_argument(
        "--trust-tenant-header",
        action="store_true",
        help="heed x-tandem-tenant; only behind a gateway that sets it and drops a client's own",
    )
    parser.add_argument(
        "--scale-objects",
        default="",
        metavar="POOL=RESOURCE/NAME,...",
        help="in a pod of Kubernetes: the objects whose scale `tandem scale` patches, such as "
        "prefill=statefulsets/NAME; without it the pool controller is asked",
    )
    _add_http(parser)
    _add_autoscaler(parser)
    return parser


def _add_http(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("HTTP", "bounds of one request, and of all connections")
    for name, default, what in (
        ("header-bytes-max", 64 << 10, "bytes of a request's header"),
        ("headers-max", 100, "fields of a request's header"),
        ("header-deadline", 10.0, "seconds from a header's first byte to its end"),
        ("body-deadline", 60.0, "seconds from a header's end to the body's end"),
        ("keep-alive", 75.0, "seconds that a connection may be idle after an answer"),
        ("connections-max", 4096, "connections that are open at once"),
    ):
        group.add_argument(f"--{name}", type=type(default), default=default, help=what)
    group.add_argument(
        "--allowed-hosts",
        default="",
        metavar="NAME,...",
        help="further names in `Host` that a router on a loopback address takes, such as those of "
        "a proxy on this machine",
    )


def _add_autoscaler(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("autoscaler", "sizes of the pools, from a service level")
    group.add_argument(
        "--autoscale",
        default="off",
        help="off, dry-run (explain and export what it would do) or on (ask the pool controller)",
    )
    for pool in ("prefill", "decode"):
        group.add_argument(f"--autoscale-{pool}-min", type=int, default=1)
        group.add_argument(f"--autoscale-{pool}-max", type=int, default=8)
    for name, seconds, what in (
        ("ttft", 2.0, "to a first token"),
        ("ttft-token", 0.0, "more for each prompt token"),
        ("itl", 0.1, "to each next token"),
        ("cold-start", 90.0, "from asking for a worker to its first request"),
        ("interval", 10.0, "between two decisions"),
    ):
        group.add_argument(
            f"--autoscale-{name}", type=float, default=seconds, help=f"seconds {what}"
        )


if __name__ == "__main__":
    sys.exit(main())
