"""OpenTelemetry: traces of requests, every metric and logs over OTLP, by gRPC or HTTP.

    settings    where to send, what to sample; imports nothing of OpenTelemetry
    part        what the observatory runs: puts the following together
    assembler   events -> traces, one for each request ─┐
    metrics     views -> OTLP metrics ──────────────────┼─► sender (a bounded queue and a thread each) ─► transport
    log_lines   log lines -> OTLP log records ──────────┘

Nothing here runs in the step loop, and nothing that a collector does or fails to do reaches it.
"""
