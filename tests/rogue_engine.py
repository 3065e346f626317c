"""The HTTP side of engines of which tests are the publishers, and what a sidecar shows of them."""

import json
from contextlib import ExitStack

from rogue_publisher import RoguePublisher
from sidecar_stage import Series, of_engine

from kvwatch.sockets import bind


def pages(*publishers: RoguePublisher, host: str = "127.0.0.1") -> dict[str, bytes | int]:
    """Return what a vLLM with these ranks answers; each rank asks for a hundred tokens more than the one before."""
    ranks = {
        str(rank): {
            "publisher": "zmq", "topic": "kv", "endpoint": each.live.replace(host, "*"),
            "replay_endpoint": each.replay and each.replay.replace(host, "*"),
        }
        for rank, each in enumerate(publishers)
    }  # fmt: skip
    lines = [
        f'vllm:prefix_cache_queries_total{{engine="{rank}",model_name="tiny"}} {100.0 * (rank + 1)}'
        for rank in range(len(publishers))
    ]
    return {
        "/kv_event_sources": json.dumps(ranks).encode(),
        "/v1/models": b'{"data": [{"id": "tiny"}]}',
        "/metrics": ("# TYPE vllm:prefix_cache_queries counter\n" + "\n".join(lines) + "\n").encode(),
    }


def value(page: Series, name: str, *, engine: str = "a", rank: int = 0, **labels: str) -> float | None:
    return of_engine(page, engine).get((f"kvwatch_{name}", tuple(sorted((*labels.items(), ("dp_rank", str(rank)))))))


def indexed(page: Series, *, engine: str = "a", rank: int = 0) -> float | None:
    return value(page, "kv_indexed_blocks", engine=engine, rank=rank, tier="device", group="0")


def free_ports_in_a_row(number: int) -> int:
    """Return the first of so many free ports."""
    while True:
        with ExitStack() as stack:
            first = stack.enter_context(bind("127.0.0.1:0", "test")).getsockname()[1]
            try:
                for port in range(first + 1, first + number):
                    stack.enter_context(bind(f"127.0.0.1:{port}", "test"))
            except Exception:
                continue
            return int(first)
