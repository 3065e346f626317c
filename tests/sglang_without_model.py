"""An SGLang without a model, for tests of the sidecar: run as a process, with SGLang's package on its path.

    python sglang_without_model.py HTTP_PORT EVENTS_PORT REPLAY_PORT

SGLang's own code keeps the prefix tree, makes the events, publishes and replays them, describes itself and counts its
metrics. What is missing is the model, the GPU and the HTTP server: requests are drawn here, their keys and values are
numbers, and modules that would load a GPU's libraries are empty. Two data-parallel ranks.

    GET  /server_info, /metrics    as an SGLang answers
    POST /steps/N                  N requests to each rank
    POST /clear                    flush every tree
    GET  /truth                    what is resident, and what was counted, by rank
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import random
import sys
import time
import types
from array import array
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

NUM_RANKS = 2
PAGE_SIZE = 16
NUM_PAGES = 160
TOPIC = "kv"
MODEL = "no-model"

HALF_LOADED = ("sglang", "sglang.srt.configs", "sglang.srt.multimodal")
"""Packages of which submodules are loaded, but not what they load themselves: models, and images."""

LEFT_OUT = {
    "sglang.srt.mem_cache.memory_pool", "sglang.srt.mem_cache.allocator", "sglang.srt.disaggregation.utils",
    "sglang.srt.model_executor.forward_batch_info",
}  # fmt: skip
"""Modules that hold tensors or talk to a GPU; of theirs nothing is called here."""


class Empty(types.ModuleType):
    """A module that has a class of every name."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class LeavesOut(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules that are left out."""

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None,  # noqa: ARG002 - part of the protocol
        target: types.ModuleType | None = None,  # noqa: ARG002 - part of the protocol
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name in LEFT_OUT else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is in it."""


def prepare_imports() -> None:
    found = importlib.util.find_spec("sglang")
    assert found is not None
    assert found.submodule_search_locations is not None
    root = found.submodule_search_locations[0]
    for name in HALF_LOADED:
        module = Empty(name)
        module.__path__ = ["/".join([root, *name.split(".")[1:]])]
        sys.modules[name] = module
    sys.meta_path.insert(0, LeavesOut())


prepare_imports()
events: Any = importlib.import_module("sglang.srt.disaggregation.kv_events")
radix: Any = importlib.import_module("sglang.srt.mem_cache.radix_cache")
prefix: Any = importlib.import_module("sglang.srt.mem_cache.base_prefix_cache")
hashing: Any = importlib.import_module("sglang.srt.mem_cache.utils")
collectors: Any = importlib.import_module("sglang.srt.observability.metrics_collector")
context: Any = importlib.import_module("sglang.srt.runtime_context")
arguments: Any = importlib.import_module("sglang.srt.server_args")
prometheus: Any = importlib.import_module("prometheus_client")
torch: Any = importlib.import_module("torch")


class Slots:
    """Counts free token slots; all that the tree asks of an allocator."""

    device = "cpu"

    def __init__(self) -> None:
        self.num_free = NUM_PAGES * PAGE_SIZE

    def free_segment(self, indices: Any, start_pos: int = 0) -> None:  # noqa: ARG002 - part of the protocol
        self.num_free += len(indices)


class Rank:
    """One scheduler's cache and publisher."""

    def __init__(self, number: int, config: str) -> None:
        self.number = number
        self.slots = Slots()
        self.tree = radix.RadixCache.create_simulated(
            mock_allocator=self.slots, page_size=PAGE_SIZE, enable_kv_cache_events=True
        )
        self.publisher = events.EventPublisherFactory.create(config, number)
        self._random = random.Random(number)
        starts = [self._random.randrange(100_000) for _ in range(6)]
        self._prefixes = [[start + i for i in range(PAGE_SIZE * (1 + n))] for n, start in enumerate(starts)]
        self.hit_tokens = self.prompt_tokens = self.num_evicted_pages = 0
        self.publish()

    def request(self) -> tuple[int, int]:
        """Let one request come and go; return its tokens, and those of them that were there."""
        rng = self._random
        tail = [rng.randrange(100_000) for _ in range(rng.randrange(1, 10 * PAGE_SIZE))]
        tokens = array("q", [*(rng.choice(self._prefixes) if rng.random() < 0.6 else []), *tail])
        key = radix.RadixKey(tokens, cache_salt=rng.choice([None, None, "salt"]), extra_key=rng.choice([None, "x"]))
        match = self.tree.match_prefix(prefix.MatchPrefixParams(key=key))
        num_hits = match.device_prefix_len
        self.tree.inc_lock_ref(match.last_device_node)
        num_new = len(tokens) // PAGE_SIZE * PAGE_SIZE - num_hits
        if self.slots.num_free < num_new:
            before = self.slots.num_free
            self.tree.evict(prefix.EvictParams(num_tokens=num_new - self.slots.num_free))
            self.num_evicted_pages += (self.slots.num_free - before) // PAGE_SIZE
        self.slots.num_free -= num_new
        values = torch.arange(len(tokens) // PAGE_SIZE * PAGE_SIZE, dtype=torch.int64)
        self.tree.insert(prefix.InsertParams(key=key, value=values))
        self.tree.dec_lock_ref(match.last_device_node)
        self.publish()
        self.prompt_tokens += len(tokens)
        self.hit_tokens += num_hits
        return len(tokens), num_hits

    def clear(self) -> None:
        """Forget everything, as `/flush_cache` does."""
        self.tree.reset()
        self.slots.num_free = NUM_PAGES * PAGE_SIZE
        self.publish()

    def publish(self) -> None:
        """Publish what has happened, as a scheduler does after each step."""
        happened = self.tree.take_events()
        if happened:
            self.publisher.publish(events.KVEventBatch(ts=time.time(), events=happened))

    def truth(self) -> dict[str, Any]:
        """Return what the tree holds."""
        hashes = {
            radix_hash
            for node in self._nodes(self.tree.root_node)
            for text in hashing.compute_node_event_hash_values(node, PAGE_SIZE)
            for radix_hash in [hashing.hash_str_to_int64(text)]
        }
        return {
            "hashes": sorted(hashes), "num_pages": self.tree.total_size() // PAGE_SIZE,
            "num_free_pages": self.slots.num_free // PAGE_SIZE, "num_evicted_pages": self.num_evicted_pages,
            "hit_tokens": self.hit_tokens, "prompt_tokens": self.prompt_tokens,
        }  # fmt: skip

    def _nodes(self, node: Any) -> Iterator[Any]:
        for child in node.children.values():
            yield child
            yield from self._nodes(child)


class Engine:
    """All ranks, their metrics, and what the HTTP server answers."""

    def __init__(self, events_port: int, replay_port: int) -> None:
        config = json.dumps(
            {
                "publisher": "zmq", "topic": TOPIC, "endpoint": f"tcp://*:{events_port}",
                "replay_endpoint": f"tcp://*:{replay_port}",
            }
        )  # fmt: skip
        self.server_args = arguments.ServerArgs(model_path=MODEL, page_size=PAGE_SIZE, kv_events_config=config)
        context.get_context().set_server_args(self.server_args)
        self.ranks = [Rank(number, config) for number in range(NUM_RANKS)]
        self._scheduler_labels = {
            "model_name": MODEL, "engine_type": "unified", "tp_rank": 0, "pp_rank": 0, "moe_ep_rank": 0,
            "priority": "", "dp_rank": 0,
        }  # fmt: skip
        self._labels = {"model_name": MODEL, "engine_type": "unified"}
        self._scheduler = collectors.SchedulerMetricsCollector(self._scheduler_labels, self.server_args)
        self._tokenizer = collectors.TokenizerMetricsCollector(self.server_args, self._labels)
        for rank in self.ranks:
            self._scheduler.labels = {**self._scheduler_labels, "dp_rank": rank.number}
            self._scheduler.emit_constants(
                max_total_num_tokens=NUM_PAGES * PAGE_SIZE, max_total_num_tokens_swa=None, weight_memory_usage_gb=0,
                kv_cache_memory_usage_gb=0, graph_memory_usage_gb={}, max_running_requests_under_SLO=None,
                page_size=PAGE_SIZE, num_pages=NUM_PAGES, context_len=4096, startup_available_gpu_memory_gb=0,
            )  # fmt: skip
        self._log()

    def steps(self, number: int) -> None:
        """Let so many requests come to each rank."""
        for _ in range(number):
            for rank in self.ranks:
                num_tokens, num_hits = rank.request()
                self._tokenizer.observe_one_finished_request(
                    self._labels, num_tokens, 7, num_hits, 0.5, False, {"device": num_hits, "host": 0}
                )
            time.sleep(0.002)
        self._log()

    def clear(self) -> None:
        """Flush every tree."""
        for rank in self.ranks:
            rank.clear()
        self._log()

    def answer(self, path: str) -> bytes:
        """Return the body of a GET."""
        if path == "/metrics":
            page: bytes = prometheus.generate_latest()
            return page
        if path == "/truth":
            return json.dumps([rank.truth() for rank in self.ranks]).encode()
        return json.dumps(
            {
                "served_model_name": MODEL, "dp_size": NUM_RANKS, "page_size": PAGE_SIZE,
                "kv_events_config": self.server_args.kv_events_config,
                "kv_events": context.describe_kv_events_publisher(self.server_args),
                "kv_event_sources": [rank.publisher.describe_local_source(PAGE_SIZE) for rank in self.ranks],
            }
        ).encode()  # fmt: skip

    def _log(self) -> None:
        for rank in self.ranks:
            num_free, num_evictable = rank.slots.num_free, rank.tree.evictable_size()
            waiting = collectors.QueueCount(total=5, by_priority={0: 2, 1: 3})
            self._scheduler.labels = {**self._scheduler_labels, "dp_rank": rank.number}
            self._scheduler.log_stats(
                collectors.SchedulerStats(
                    num_queue_reqs=waiting, kv_available_tokens=num_free, kv_evictable_tokens=num_evictable,
                    kv_used_tokens=NUM_PAGES * PAGE_SIZE - num_free - num_evictable,
                )
            )  # fmt: skip


def main() -> None:
    """Answer until killed."""
    http_port, events_port, replay_port = map(int, sys.argv[1:])
    engine = Engine(events_port, replay_port)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(engine.answer(self.path))

        def do_POST(self) -> None:
            _, what, *number = self.path.split("/")
            if what == "steps":
                engine.steps(int(number[0]))
            else:
                engine.clear()
            self._reply(b"")

        def _reply(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    HTTPServer(("127.0.0.1", http_port), Handler).serve_forever()


if __name__ == "__main__":
    main()
