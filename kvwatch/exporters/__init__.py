"""What leaves the process. Exporters read views, never the engine, and know nothing of each other.

- identity.py   the labels that every series of an engine carries
- prometheus/   text and OpenMetrics on a read-only listener
"""
