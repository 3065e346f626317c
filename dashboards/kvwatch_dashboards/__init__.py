"""Dashboards and rules for Prometheus and Grafana, written in Python over the metrics' declarations.

- settings.py     every threshold and its reason
- promql.py       the only place that turns a metric into a query
- recording.py    recording rules, `level:metric:operation`
- alerts/         alerts by whom they wake: page.py, ticket.py
- panel.py        panels, rows and dashboards as data; what the registry says of them
- scoped.py       queries under the variables of a dashboard
- boards/         the dashboards
- grafana.py      boards as Grafana's JSON
- unused.py       metrics that no panel shows, and why
- rules_file.py   rules as YAML
- generated.py    what is written to dashboards/generated
- prometheus_api.py  what is asked of a running Prometheus
- annotations.py  moments that dashboards mark
- preview/        dashboards as pictures, without Grafana
- local/          Prometheus and Alertmanager on this machine: `make observatory`

    python -m kvwatch_dashboards            # writes dashboards/generated
    python -m kvwatch_dashboards --check    # exit 1 if something there is not what would be written
"""
