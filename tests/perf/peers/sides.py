"""The sides that are compared: how each is started so that it is at its best on this machine, and how it is asked."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kvwatch.bench.dialect import Dialect
from kvwatch.bench.scenarios import RequestSpec

KVWATCH, VLLM, VLLM_ALL_CORES, TRANSFORMERS = "kvwatch", "vllm", "vllm-all-cores", "transformers"
VLLMS = (VLLM, VLLM_ALL_CORES)
"""vLLM as it binds its threads itself, with a core left to its scheduler, and with all cores for the model."""
KV_GIBIBYTES = 2
"""Room of every side's cache: more than any load needs, so that nobody evicts or preempts."""
SERVED_NAME = "model"

_OFFLINE = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}


@dataclass(frozen=True)
class Side:
    """One server to be."""

    name: str
    command: Sequence[str]
    """Without host and port."""
    dialect: Dialect
    ready_path: str
    notes: Sequence[str]
    """What its configuration means, for the reader of the result."""
    environment: Mapping[str, str] = field(default_factory=dict)
    version: str = ""
    has_metrics: bool = True
    """Whether it has a page of metrics, which is then scraped as in production."""
    is_ours: bool = False
    """Whether it runs in this process's Python environment."""

    def at(self, port: int) -> list[str]:
        """Return the command line of a server on a loopback port."""
        return [*self.command, "--host", "127.0.0.1", "--port", str(port)]

    def described(self) -> dict[str, object]:
        """Return what the result says of it."""
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        return {"version": self.version, "command": shlex.join([*variables, *self.command]), "notes": list(self.notes)}


class TransformersDialect(Dialect):
    """`transformers serve` knows neither `ignore_eos` nor OpenAI's stream options: it always counts, at the end."""

    def __init__(self, model: str) -> None:
        super().__init__("unknown", model, "completions")
        self.has_fixed_length = True
        self._served = model

    def body(self, spec: RequestSpec) -> bytes:
        generation = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0, "max_new_tokens": spec.max_tokens}
        return msgspec.json.encode(
            {
                "model": self._served,
                "prompt": spec.prompt,
                "max_tokens": spec.max_tokens,
                "stream": True,
                "generation_config": json.dumps(generation),
            }
        )


def kvwatch_side(model: Path, flight_dir: Path, more: Sequence[str] = ()) -> Side:
    """Return `kvwatch serve` with its telemetry on, as it is by default: metrics, admin, event stream, flight recorder.

    Args:
        model: Hugging Face folder.
        flight_dir: folder of the flight recorder.
        more: flags to try.
    """
    listeners = [flag for name in ("metrics", "grpc", "admin") for flag in (f"--{name}-listen", "127.0.0.1:0")]
    command = [
        sys.executable, "-m", "kvwatch", "serve", "--model", str(model), "--served-model-name", SERVED_NAME,
        "--dtype", "bfloat16", "--kv-memory", f"{KV_GIBIBYTES}GiB", *listeners,
        "--flight-dir", str(flight_dir), *more,
    ]  # fmt: skip
    notes = (
        "telemetry on: metrics page, admin API, event stream and flight recorder, as `kvwatch serve` has them",
        "prefix cache on (default), block size 16 (default), threads as it chooses",
    )
    return Side(
        KVWATCH,
        command,
        Dialect("kvwatch", SERVED_NAME, "completions"),
        "/ready",
        notes,
        version=_version(),
        is_ours=True,
    )


def vllm_side(
    name: str,
    model: Path,
    python: Path,
    *,
    is_eager: bool = False,
    more: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> Side:
    """Return vLLM's API server with its own defaults for the CPU.

    Args:
        name: one of `VLLMS`.
        model: Hugging Face folder.
        python: interpreter of an environment with vLLM's CPU build.
        is_eager: leave compilation out.
        more: flags to try.
        variables: environment variables to try.
    """
    command = [
        str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
        "--served-model-name", SERVED_NAME, "--dtype", "bfloat16", *(["--enforce-eager"] if is_eager else []), *more,
    ]  # fmt: skip
    notes = (
        "eager" if is_eager else "compiled (its default: torch.compile with Inductor's C++ backend)",
        "prefix cache on (default), block size 128 (its default on a CPU)",
        "the model computes on every core"
        if name == VLLM_ALL_CORES
        else "the model's threads where it binds them itself",
        "it preloads torch's libgomp by itself; its wheel brings no tcmalloc",
    )
    environment = {**_OFFLINE, "VLLM_CPU_KVCACHE_SPACE": str(KV_GIBIBYTES), "VLLM_NO_USAGE_STATS": "1"}
    if name == VLLM_ALL_CORES:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    environment |= variables or {}
    dialect = Dialect("vllm", SERVED_NAME, "completions")
    return Side(name, command, dialect, "/health", notes, environment, _version_in(python, "vllm-cpu"))


def transformers_side(model: Path, python: Path, more: Sequence[str] = ()) -> Side:
    """Return `transformers serve` with continuous batching.

    Args:
        model: Hugging Face folder.
        python: interpreter of an environment with transformers and what its server needs.
        more: flags to try.
    """
    command = [
        str(python.parent / "transformers"), "serve", str(model), "--continuous-batching", "--dtype", "bfloat16",
        "--device", "cpu", "--cb-num-blocks", "512", *more,
    ]  # fmt: skip
    notes = (
        "continuous batching with paged attention by SDPA (no flash attention on a CPU), block sharing on (default)",
        "512 blocks of 256 tokens: left to itself it takes nine tenths of the free memory",
    )
    dialect = TransformersDialect(str(model))
    return Side(
        TRANSFORMERS,
        command,
        dialect,
        "/health",
        notes,
        _OFFLINE,
        _version_in(python, "transformers"),
        has_metrics=False,
    )


def _version() -> str:
    from kvwatch import __version__

    return __version__


def _version_in(python: Path, distribution: str) -> str:
    asked = f"from importlib.metadata import version; print(version({distribution!r}))"
    done = subprocess.run([str(python), "-c", asked], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()
