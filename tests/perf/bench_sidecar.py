"""What a sidecar costs while its engines do nothing: time to import, resident memory, processor time.

    python tests/perf/bench_sidecar.py

`import kvwatch` is timed in fresh interpreters, the fastest counts. A sidecar is started as its users start it, with
its default listeners and its flight recorder, beside engines that are not there; its memory is read after it has been
scraped. Prints JSON; exits 1 when a budget is missed.
"""

import json
import subprocess
import sys
import tempfile
import time
import urllib.request

import psutil

IMPORTS = 7
BUDGET_IMPORT_SECONDS = 0.1
BUDGET_RESIDENT_BYTES = 100 * 2**20
ENGINES = {
    "kvwatch": "a=grpc://127.0.0.1:1",
    "vllm": "b=vllm+http://127.0.0.1:1",
}
IDLE_SECONDS = 10.0
READY_SECONDS = 60.0

_IMPORT = "import time; t = time.perf_counter(); import kvwatch; print(time.perf_counter() - t)"
_HEAVY = "import sys, kvwatch; print([n for n in {names} if n in sys.modules])".format(
    names=("torch", "transformers", "numpy", "grpc", "zmq")
)


def import_seconds() -> float:
    """Return the shortest time that importing the package took."""
    return min(float(_python(_IMPORT)) for _ in range(IMPORTS))


def _python(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def idle_cost(engines: list[str], folder: str) -> dict[str, float]:
    """Return memory and processor time of a sidecar whose engines are not there."""
    command = [
        sys.executable, "-m", "kvwatch", "sidecar", "--metrics-listen", "127.0.0.1:0", "--grpc-listen", "127.0.0.1:0",
        "--admin-listen", "127.0.0.1:0",
        "--cache-dir", folder, "--log-format", "json", *(word for each in engines for word in ("--engine", each)),
    ]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            url = _metrics_url(process)
            for _ in range(3):
                with urllib.request.urlopen(url, timeout=10) as answer:
                    answer.read()
                time.sleep(1.1)
            watched = psutil.Process(process.pid)
            before = sum(watched.cpu_times()[:2])
            time.sleep(IDLE_SECONDS)
            used = sum(watched.cpu_times()[:2]) - before
            return {"resident_bytes": watched.memory_info().rss, "cpu_percent": round(100 * used / IDLE_SECONDS, 2)}
        finally:
            process.terminate()
            process.wait(20)


def _metrics_url(process: "subprocess.Popen[str]") -> str:
    assert process.stderr is not None
    deadline = time.monotonic() + READY_SECONDS
    for line in process.stderr:
        if line.startswith("{") and (found := json.loads(line)).get("event") == "ready":
            return str(found["metrics"])
        if time.monotonic() > deadline:
            break
    raise RuntimeError("the sidecar did not become ready")


def main() -> None:
    """Measure, print, judge."""
    seconds = import_seconds()
    with tempfile.TemporaryDirectory() as folder:
        idle = {name: idle_cost([engine], folder) for name, engine in ENGINES.items()}
        idle["both"] = idle_cost(list(ENGINES.values()), folder)
    resident = max(each["resident_bytes"] for each in idle.values())
    missed = [
        name
        for name, is_missed in {
            "import_seconds": seconds > BUDGET_IMPORT_SECONDS,
            "resident_bytes": resident > BUDGET_RESIDENT_BYTES,
        }.items()
        if is_missed
    ]
    report = {
        "import_seconds": round(seconds, 4),
        "imported_with_it": _python(_HEAVY),
        "idle": idle,
        "budgets": {"import_seconds": BUDGET_IMPORT_SECONDS, "resident_bytes": BUDGET_RESIDENT_BYTES},
        "missed": missed,
    }
    print(json.dumps(report))
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
