from pathlib import Path

import pytest
from peers.report import document, tables
from peers.results import Results, Trial, read_results, write_results
from peers.roofline import Machine, ModelSize
from peers.trial import Figures
from peers.verdicts import verdicts

from kvwatch.bench.statistics import quantiles

SIZE = ModelSize(
    weight_bytes=1000, layer_weights=400, logit_weights=100, kv_bytes_per_token=10, attention_operations=8
)  # fmt: skip
MACHINE = Machine(bandwidth=100_000.0, peak=1e12)


def trial(load: str, side: str, number: int, speed: float, *, latency: float = 0.1, busy: float = 0.0) -> Trial:
    times = quantiles([latency])
    assert times is not None
    figures = Figures(
        seconds=3072 / speed, output_tokens=3072, output_tokens_per_second=speed, cached_tokens=None, ttft=times,
        itl=times, client_cpu_ratio=0.1, busy_percent=busy,
    )  # fmt: skip
    return Trial(load=load, side=side, round=number, figures=figures, machine=MACHINE)


def missed(*trials: Trial) -> list[str]:
    return [verdict.what for verdict in verdicts(Results(trials=list(trials)), SIZE) if not verdict.is_met]


def test_the_first_load_needs_one_and_a_half_times_the_tokens() -> None:
    theirs = trial("serving", "vllm", 0, 100)

    assert "serving: output_tokens_per_second of kvwatch / vllm" in missed(trial("serving", "kvwatch", 0, 149), theirs)
    assert missed(trial("serving", "kvwatch", 0, 1e6), theirs) == []


def test_the_other_loads_need_as_many_tokens() -> None:
    theirs = trial("burst", "vllm", 0, 100)

    assert missed(trial("burst", "kvwatch", 0, 100), theirs) == []
    assert missed(trial("burst", "kvwatch", 0, 99), theirs) == ["burst: output_tokens_per_second of kvwatch / vllm"]


def test_longer_tails_are_missed_targets() -> None:
    ours = trial("burst", "kvwatch", 0, 200, latency=0.11)

    assert missed(ours, trial("burst", "vllm", 0, 100, latency=0.1)) == [
        "burst: ttft.p99 of kvwatch / vllm", "burst: itl.p99 of kvwatch / vllm",
    ]  # fmt: skip


def test_the_faster_of_two_vllms_is_the_one_to_beat() -> None:
    found = missed(
        trial("burst", "kvwatch", 0, 150), trial("burst", "vllm", 0, 100), trial("burst", "vllm-all-cores", 0, 200)
    )

    assert found == ["burst: output_tokens_per_second of kvwatch / vllm-all-cores"]


def test_ratios_pair_what_was_measured_in_the_same_round() -> None:
    speeds = ((100, 50), (200, 100), (400, 200))  # the machine became faster: each pair says 2
    trials = [
        trial("burst", side, number, speed)
        for number, pair in enumerate(speeds)
        for side, speed in zip(("kvwatch", "vllm"), pair, strict=True)
    ]
    trials.append(trial("burst", "kvwatch", 3, 1))  # alone in its round: says nothing

    value = verdicts(Results(trials=trials), SIZE)[0].value

    assert (value.median, value.low, value.high) == (2, 2, 2)


def test_one_stream_is_measured_against_reading_the_weights() -> None:
    bound = MACHINE.bandwidth / SIZE.weight_bytes  # 100 tokens/s

    assert missed(trial("single-stream", "kvwatch", 0, 0.61 * bound)) == []
    assert missed(trial("single-stream", "kvwatch", 0, 0.59 * bound)) == [
        "single-stream: share of weights / bandwidth"
    ]  # fmt: skip


def test_the_report_says_what_was_missed_and_disturbed() -> None:
    results = Results(trials=[trial("burst", "kvwatch", 0, 99, busy=40), trial("burst", "vllm", 0, 100)])

    said, text = document(results, SIZE), tables(results, SIZE)

    assert said["missed"] == ["burst: output_tokens_per_second of kvwatch / vllm"]
    assert said["busy_trials"] == 1
    assert "MISSED burst: output_tokens_per_second of kvwatch / vllm: 0.99 (wanted >= 1)" in text
    assert "1 of 2 trials ran beside other work" in text


@pytest.mark.parametrize("load", ["burst", "serving"])
def test_later_runs_add_rounds_of_their_own(tmp_path: Path, load: str) -> None:
    file = tmp_path / "trials.json"
    assert read_results(file).next_round(load) == 0

    write_results(file, Results(about={"model": "m"}, trials=[trial("burst", "kvwatch", 4, 10)]))
    again = read_results(file)

    assert again.next_round(load) == (5 if load == "burst" else 0)
    assert again.trials == [trial("burst", "kvwatch", 4, 10)]
