"""What follows from the declarations in `kvwatch.telemetry`: nothing here is written twice.

- metrics.py    full names and descriptions of metrics
- lock.py       what may never change: numbers, names, types, units
- proto.py      the protobuf schema of the event stream
- docs.py       the tables of docs/events.md and docs/metrics.md
- settings.py   the tables of docs/configuration.md
- scenario.py   a short life of an engine in which every event happens once or more
- __main__.py   `python -m kvwatch.derive` writes what is generated; `--check` only compares
"""
