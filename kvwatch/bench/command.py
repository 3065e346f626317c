"""`kvwatch bench`: what is heavy is imported when the command runs, not before."""

import argparse
import asyncio
import os
import sys
from typing import TYPE_CHECKING

from kvwatch.bench.errors import TargetUnreachable
from kvwatch.bench.options import Options, add_options, read_options

if TYPE_CHECKING:
    from kvwatch.bench.measurement import Measurement

EXIT_NOT_MET = 1
"""An assertion does not hold."""
EXIT_UNREACHABLE = 3
"""Nothing there speaks OpenAI's API. (2, wrong usage, is the command line's own.)"""
EXIT_INTERRUPTED = 130
"""The run was interrupted; the report of what there was is written all the same."""


class BenchCommand:
    """The command `bench`.

    It has options and no settings: `KVWATCH_*` variables and files that are meant for a server do not concern it.
    """

    name = "bench"
    help = "put an OpenAI-compatible server under load and report latencies, throughput and KV cache pressure"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the options."""
        add_options(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Measure, write the report, return the exit status."""
        options = read_options(args)
        try:
            measurement = _measure(options)
        except TargetUnreachable as error:
            sys.stderr.write(f"kvwatch: {' '.join(str(error).split())}\n")
            return EXIT_UNREACHABLE
        _write(options, measurement)
        if measurement.report.is_interrupted:
            return EXIT_INTERRUPTED
        return 0 if all(each.is_met for each in measurement.report.assertions) else EXIT_NOT_MET


COMMAND = BenchCommand()


def _measure(options: Options) -> "Measurement":
    from kvwatch.bench.measurement import measure
    from kvwatch.bench.progress import ProgressBar

    bar = ProgressBar()
    try:
        return asyncio.run(measure(options, bar))
    finally:
        bar.close()


def _write(options: Options, measurement: "Measurement") -> None:
    from kvwatch.bench.html_report import write_html
    from kvwatch.bench.json_report import json_report
    from kvwatch.bench.measurement import saved_run
    from kvwatch.bench.saved import write_run
    from kvwatch.bench.text_report import text_report

    # Printed first: a disk that is full must not cost the numbers.
    text = json_report(measurement.report) if options.is_json else text_report(measurement.report)
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if options.save is not None:
        write_run(options.save, saved_run(options, measurement))
    if options.html is not None:
        write_html(options.html, measurement)
