"""Prometheus and OpenMetrics.

- families.py   a view as metric families of the reference client
- page.py       the rendered page, at most one rendering a second whoever asks
- process.py    metrics of the observatory itself
- asgi.py       the read-only listener: /metrics, /health, /ready
"""
