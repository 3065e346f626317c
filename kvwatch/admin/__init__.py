"""The admin API over HTTP: looks into running engines and changes them, for those who may.

    settings.py, part.py      where it listens; its place on the observatory's thread
    access.py, tokens.py      who may ask
    routing.py, app.py        from a request to a handler and back
    operation.py, openapi.py  what an operation is; the document that is derived from all of them
    problems.py               errors
    engines.py, reach.py, site.py   what handlers work with
    operations.py             all operations
    pool.py, inspect.py, event_stream.py, config.py, act.py, adapters.py ...  handlers, each with its operations
    change_desk.py, live_config.py, declared_file.py, audit.py   changes, their expiry and their record
    grpc_service.py, forwarding.py   the same over gRPC, and what a sidecar has its engine answer
    command.py, verbs.py      `kvwatch admin`, with a verb for each operation
    credentials.py            the token that a command sends

Sees engines only through `kvwatch.control`, their logs and their views. Imports no exporter, recorder or stream.
"""
