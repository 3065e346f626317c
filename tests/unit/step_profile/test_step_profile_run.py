"""The whole script, in this process, on a tiny model."""

import sys
from pathlib import Path

import pytest
from step_profile.flame import flame_graph
from step_profile.run import main
from tiny_models import make_tiny_model


def test_it_prints_tables_and_draws_or_says_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_tiny_model("llama", tmp_path / "model")

    main(["--model", str(model), "--loads", "burst", "--requests", "6", "--no-roof", "--output", str(tmp_path / "out")])

    printed = capsys.readouterr().out
    assert "## burst: 6 x 32 tokens in, 32 out, 64 at a time" in printed
    assert "Steps with prefill: " in printed
    assert "Steps of decoding alone: 31 steps, on average 6.0 sequences, 6.0 tokens," in printed
    for name in ("schedule", "build", "forward", "linear", "attention", "logits", "sample", "apply", "emit", "detok"):
        assert f"{name}" in printed
    picture = tmp_path / "out" / "burst.svg"
    if "no flame graph: " in printed:
        assert not picture.exists()
    else:
        assert "<svg" in picture.read_text()


def test_without_the_sampler_the_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))

    with flame_graph(tmp_path / "pictures" / "x.svg") as graph:
        pass

    assert "py-spy cannot be started" in graph.reason
    assert not graph.path.exists()


def test_an_unknown_load_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--loads", "serving,nothing"])

    assert "there is no load 'nothing'; choose from serving, long," in capsys.readouterr().err
