"""`make bench-peers`: kvwatch beside vLLM's CPU build and transformers' continuous batching, on this machine.

All servers are up, and all but the one under load are frozen. In each round the sides take turns on each load; ratios
are taken round by round. Before each load's turn the machine's bandwidth and products are measured. Trials are kept in
a folder, so that short runs add up:

    make bench-peers                                           everything: more than an hour on two cores
    make bench-peers ARGS="--loads serving --sides kvwatch,vllm --rounds 3"
    make bench-peers ARGS="--add --loads burst --rounds 2"     adds to the trials of earlier runs
    make bench-peers ARGS="--report"                           says again what the trials say

Exits 1 when a target is missed, 2 when the machine is busy, 3 when a server failed, 130 when it was interrupted; make
tells that as `Error N`, and exits 2 itself.
"""

import argparse
import os
import platform
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import psutil
from peers.loads import LOADS, Load, Words
from peers.report import BUSY_PERCENT, document, tables
from peers.results import Results, Trial, read_results, write_results
from peers.roofline import Meter, ModelSize, model_size
from peers.servers import ServerFailed
from peers.sides import KVWATCH, TRANSFORMERS, VLLM, VLLMS, Side, kvwatch_side, transformers_side, vllm_side
from peers.stage import RunningSide, running
from peers.trial import run_trial, warm_up

from kvwatch_engine.model.sources import resolve_source

SIDES = (KVWATCH, *VLLMS, TRANSFORMERS)
EXIT_MISSED, EXIT_BUSY, EXIT_FAILED, EXIT_INTERRUPTED = 1, 2, 3, 130


def main() -> None:
    """Run."""
    options = _options()
    # So that the servers end with this process: whatever runs knows what to do when it is interrupted.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    folder: Path = options.out
    folder.mkdir(parents=True, exist_ok=True)
    model = resolve_source(options.model).folder
    file = folder / "trials.json"
    results = read_results(file) if options.add or options.report else Results()
    if not options.report:
        _refuse_if_busy(is_forced=options.even_if_busy)
        try:
            _measure(options, model, results, file)
        except ServerFailed as error:
            sys.stderr.write(f"{error}\n")
            sys.exit(EXIT_FAILED)
        except KeyboardInterrupt:
            sys.stderr.write("interrupted; the trials until then are kept\n")
            sys.exit(EXIT_INTERRUPTED)
    if not results.trials:
        sys.stderr.write(f"{folder} holds no trials; measure some first\n")
        sys.exit(EXIT_FAILED)
    sys.exit(_report(folder, results, model_size(model)))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--loads", type=_names(LOADS), default=list(LOADS), metavar="A,B", help=f"any of {','.join(LOADS)}")
    add("--sides", type=_names(SIDES), default=list(SIDES), metavar="A,B", help=f"any of {','.join(SIDES)}")
    add("--rounds", type=int, default=5, help="turns of each load (default: %(default)s)")
    add("--transformers-rounds", type=int, default=1,
        help="rounds in which transformers, which is slow here, takes part (default: %(default)s)")  # fmt: skip
    add("--model", default="embedded", help="`embedded` or a Hugging Face folder (default: %(default)s)")
    add("--out", type=Path, default=Path(".bench-peers"), help="folder of trials, report and logs")
    add("--add", action="store_true", help="add to the trials of earlier runs instead of forgetting them")
    add("--report", action="store_true", help="measure nothing; report the trials of earlier runs")
    add("--even-if-busy", action="store_true", help="run beside other work; the figures are then worth nothing")
    add("--vllm-python", type=Path, help="interpreter of an environment with vLLM's CPU build")
    add("--vllm-env", type=_variable, action="append", default=[], metavar="NAME=VALUE",
        help="environment variable for vllm, to try it; repeatable")  # fmt: skip
    add("--vllm-eager", action="store_true", help="do not let vLLM compile")
    add("--transformers-python", type=Path, help="interpreter of an environment with transformers[serving]")
    for side in (KVWATCH, VLLM, TRANSFORMERS):
        add(f"--{side}-args", type=shlex.split, default=[], metavar="FLAGS", help=f"more flags for {side}, to try them")
    options = parser.parse_args()
    needed = {**dict.fromkeys(VLLMS, options.vllm_python), TRANSFORMERS: options.transformers_python}
    for side in options.sides:
        if side in needed and needed[side] is None and not options.report:
            parser.error(f"{side} needs an interpreter: see --help, or leave it out with --sides")
    return options


def _variable(text: str) -> tuple[str, str]:
    name, has_value, value = text.partition("=")
    if not (name and has_value):
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME=VALUE")
    return name, value


def _names(known: Sequence[str] | dict[str, Load]) -> Callable[[str], list[str]]:
    def read(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return names

    return read


def _refuse_if_busy(*, is_forced: bool) -> None:
    busy = psutil.cpu_percent(interval=2.0)
    if busy > BUSY_PERCENT:
        sys.stderr.write(f"the machine is busy: {busy:.0f} % of the processor is in use\n")
        if not is_forced:
            sys.stderr.write("figures would be worth nothing; wait until it is idle, or use --even-if-busy\n")
            sys.exit(EXIT_BUSY)


def _measure(options: argparse.Namespace, model: Path, results: Results, file: Path) -> None:
    """Start the sides and let them take turns; every trial is written as soon as it is made."""
    words, meter = Words(model), Meter()
    sides = _sides(options, model)
    loads = [LOADS[name] for name in options.loads]
    with running(sides, options.out) as up:
        results.about = _about(options, model, meter, up)
        for side in up:
            for load in loads:
                warm_up(side, load, words)
            _say(f"{side.name} is warm, after a start of {side.start_seconds:.0f} s")
        first = {load.name: results.next_round(load.name) for load in loads}
        for turn in range(options.rounds):
            taking_part = [side for side in up if side.name != TRANSFORMERS or turn < options.transformers_rounds]
            for load in loads:
                number = first[load.name] + turn
                for trial in _turn(taking_part, load, words, meter, number):
                    results.trials.append(trial)
                    write_results(file, results)


def _turn(sides: Sequence[RunningSide], load: Load, words: Words, meter: Meter, number: int) -> "list[Trial]":
    """Put each side under a load, another one first in each round."""
    machine = meter.measure()
    start = number % len(sides)
    trials = []
    for side in [*sides[start:], *sides[:start]]:
        figures = run_trial(side, load, words, number)
        trials.append(Trial(load=load.name, side=side.name, round=number, figures=figures, machine=machine))
        _say(
            f"{load.name}, round {number}: {side.name} {figures.output_tokens_per_second:.1f} tokens/s in "
            f"{figures.seconds:.1f} s, others took {figures.busy_percent:.0f} % of the processor"
        )
    return trials


def _sides(options: argparse.Namespace, model: Path) -> list[Side]:
    made = []
    for name in options.sides:
        if name == KVWATCH:
            made.append(kvwatch_side(model, options.out / "flight", options.kvwatch_args))
        elif name == TRANSFORMERS:
            made.append(transformers_side(model, options.transformers_python, options.transformers_args))
        else:
            made.append(
                vllm_side(
                    name, model, options.vllm_python, is_eager=options.vllm_eager, more=options.vllm_args,
                    variables=dict(options.vllm_env),
                )
            )  # fmt: skip
    return made


def _about(options: argparse.Namespace, model: Path, meter: Meter, up: Sequence[RunningSide]) -> dict[str, object]:
    return {
        "started_unix_seconds": round(time.time()),
        "machine": {
            "cpus": os.cpu_count(),
            "processor": _processor(),
            "memory_bytes": psutil.virtual_memory().total,
            "meter_threads": meter.num_threads,
        },
        "model": options.model if options.model == "embedded" else model.name,
        "sides": {side.name: side.side.described() | {"start_seconds": round(side.start_seconds, 1)} for side in up},
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _report(folder: Path, results: Results, model: ModelSize) -> int:
    """Print and write the report; return the exit status."""
    text, said = tables(results, model), document(results, model)
    (folder / "report.txt").write_text(text + "\n")
    (folder / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(said)) + b"\n")
    print(text)
    return EXIT_MISSED if said["missed"] else 0


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
