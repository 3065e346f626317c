"""Events in files: the recorder, the flight recorder, and `kvwatch replay`, which reads both.

- schema.py     which events and fields a recording holds; events to bytes and back
- frames.py     the unit of every file: a header with numbers and a checksum, and a compressed body
- header.py     what a recording says of itself
- writer.py     one recording file; the folder with its limits
- sink.py       the recorder: rotating files, written by a thread of its own
- ring.py       the flight recorder's file: a ring in the page cache, which outlives its process
- triggers.py   what is worth writing the flight recorder out for
- flight.py     the flight recorder: ring, triggers, dumps
- part.py       both as a part of the observatory
- reader.py     opens recordings and rings, whole or damaged
- replay.py     rebuilds the ledger at any event
- show.py       state and events as text and JSON
- tables.py     recordings as tables; csv_export.py, parquet_export.py write them
- trace.py      recordings as a trace for Perfetto or Chrome
- command.py    `kvwatch replay`

The format is described in docs/recording.md. Knows no engine, no exporter and no server.
"""
