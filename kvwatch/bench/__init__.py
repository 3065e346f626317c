"""`kvwatch bench`: a load generator for any OpenAI-compatible server, and its report.

    command, options        the command line
    target, discovery       what is measured: its kind, its models, its limits
    words, scenarios, plan  what is asked, decided by the seed before anything is sent
    trace, arrivals         when it is asked
    dialect, sse, answer, client   one request: its body, its stream, its times
    connections, connection, http_body   how it gets there and back: HTTP/1.1, as cheaply as can be
    runner, preparation     all requests; what is asked before them, unmeasured
    exposition, signals, sampler   what the target's /metrics says meanwhile
    outcome, statistics, report, assertions, saved   what came out
    text_report, html_report, plots, progress        how it is shown

It knows no engine: what it needs from a server it reads from `/v1/models` and `/metrics`.
"""
