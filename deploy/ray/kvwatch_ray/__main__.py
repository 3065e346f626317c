"""`python -m kvwatch_ray [OPTIONS] -- FLAGS OF kvwatch serve`: serve until SIGTERM or SIGINT, in a cluster or alone."""

import argparse
import shlex
import signal
import sys
import threading
from collections.abc import Sequence

import ray
from ray import serve

from kvwatch_ray.app import AppSettings, make_app


def main(argv: Sequence[str] | None = None) -> int:
    """Deploy, say where, wait for a signal."""
    parser = argparse.ArgumentParser(prog="python -m kvwatch_ray", description="kvwatch on Ray Serve")
    parser.add_argument("--host", default="127.0.0.1", help="address of the API (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="its port (default: %(default)s)")
    parser.add_argument("--replicas", type=int, default=1, help="engines, or the fewest of them (default: 1)")
    parser.add_argument("--max-replicas", type=int, help="scale up to so many by queue and KV pressure")
    parser.add_argument("--cpus", type=float, default=1, help="cores of the cluster for each engine (default: 1)")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs for each engine (default: 0)")
    parser.add_argument(
        "--command", default="kvwatch", help="what starts kvwatch with its engine (default: %(default)s)"
    )
    parser.add_argument("--address", help="of a Ray cluster; default: one of its own on this machine")
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="flags of `kvwatch serve` for every engine")
    args = parser.parse_args(argv)
    settings = AppSettings(
        args.replicas, args.max_replicas, args.gpus, args.cpus, shlex.split(args.command), args.flags
    )
    alone = {} if args.address else {"include_dashboard": False, "object_store_memory": 100 * 2**20}
    ray.init(address=args.address, namespace="serve", **alone)
    serve.start(proxy_location="HeadOnly", http_options={"host": args.host, "port": args.port})
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    serve.run(make_app(settings), name="kvwatch", route_prefix="/")
    sys.stderr.write(f"kvwatch_ray: ready at http://{args.host}:{args.port}/v1\n")
    ended.wait()
    serve.shutdown()
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
