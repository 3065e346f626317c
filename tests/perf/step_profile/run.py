"""Where the time of a step goes: serves loads in this process, prints tables, draws a flame graph; docs/performance.md.

make profile ARGS="--loads serving,single-stream"
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

# The first of these sets how threads wait, which must be before torch comes.
from embedded_engine import load_embedded  # isort: skip
import torch
from peers.loads import LOADS, Load
from peers.roofline import BYTES, Meter, model_size
from step_profile.flame import flame_graph
from step_profile.served import ProfiledStep, Serving
from step_profile.table import Roof, heading, lines, markdown

from kvwatch_engine.model.loader import LoadedModel, load_model


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a profile of each load."""
    options = _options(arguments)
    model = load_embedded() if options.model is None else load_model(str(options.model))
    print(f"model {model.info.folder.name} in {model.info.dtype}, {torch.get_num_threads()} threads")
    roof = None if options.no_roof else _roof(model)
    if roof is not None:
        print(f"machine: {roof.machine.bandwidth / 1e9:.1f} GB/s, {roof.machine.peak / 1e9:.0f} GFLOP/s in bfloat16")
    for name in options.loads:
        _profile(model, LOADS[name], options, roof)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--loads", type=_names, default=("serving", "single-stream"), help=f"of {', '.join(LOADS)}; separated by commas"
    )
    parser.add_argument("--requests", type=int, help="of each load, instead of its own number")
    parser.add_argument("--model", type=Path, help="Hugging Face folder, instead of the embedded model")
    parser.add_argument("--output", type=Path, default=Path(".profile"), help="where flame graphs go")
    parser.add_argument("--no-flame", action="store_true", help="draw none, which takes a second run of each load")
    parser.add_argument("--no-roof", action="store_true", help="do not measure the machine")
    return parser.parse_args(arguments)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in LOADS]
    if unknown:
        raise argparse.ArgumentTypeError(f"there is no load {unknown[0]!r}; choose from {', '.join(LOADS)}")
    return names


def _roof(model: LoadedModel) -> Roof:
    """Measure the machine; the model's bytes are those of the dtype that it is computed in."""
    size, wider = model_size(model.info.folder), getattr(torch, model.info.dtype).itemsize // BYTES
    size = replace(
        size, weight_bytes=size.weight_bytes * wider, kv_bytes_per_token=size.kv_bytes_per_token * wider
    )  # fmt: skip
    return Roof(Meter().measure(), size)


def _profile(model: LoadedModel, load: Load, options: argparse.Namespace, roof: Roof | None) -> None:
    load = replace(load, num_requests=options.requests or load.num_requests)
    num_tokens = load.concurrency * (load.num_prompt_tokens + load.num_output_tokens)
    serving = Serving(model, max_num_seqs=load.concurrency, num_tokens=num_tokens)
    serving.serve(
        replace(load, num_output_tokens=4, num_requests=load.concurrency)
    )  # what is only done once is done then
    print(f"\n## {load.name}: {load}")
    steps = serving.serve(load)
    prefill = [step for step in steps if step.has_prefill]
    decode = [step for step in steps if not step.has_prefill]
    for title, chosen in (("Steps with prefill", prefill), ("Steps of decoding alone", decode)):
        if chosen:
            _print_table(title, chosen, serving, roof)
    if options.no_flame:
        return
    with flame_graph(options.output / f"{load.name}.svg") as graph:
        if not graph.reason:
            serving.serve(load)
    print(f"\nflame graph: {graph.path}" if not graph.reason else f"\nno flame graph: {graph.reason}")


def _print_table(title: str, steps: Sequence[ProfiledStep], serving: Serving, roof: Roof | None) -> None:
    print(f"\n{title}: {heading(steps)}\n")
    print(markdown(lines(steps, serving.num_calls(), roof)))


if __name__ == "__main__":
    main()
