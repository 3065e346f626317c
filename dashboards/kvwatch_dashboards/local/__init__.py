"""Prometheus and Alertmanager as processes on this machine, with the generated rules and without containers.

- configuration.py   what the two are told, as text
- process.py         a process that is waited for and ended
- servers.py         Prometheus and Alertmanager as such processes
- observatory.py     an engine and both, for a person: `make observatory`

They come from the packages `prometheus` and `prometheus-alertmanager` (Debian), or from PATH.
"""
