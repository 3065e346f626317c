"""Dashboards as pictures, drawn from a running Prometheus, for whoever has no Grafana: `make dashboards-preview`.

- reading.py    what panels show, asked as Grafana asks
- units.py      values as Grafana writes them
- drawing.py    one panel
- sheet.py      one dashboard as a picture
- page.py       all pictures on one HTML page
- missing.py    panels that no data can fill, and why

    python -m kvwatch_dashboards.preview --prometheus http://127.0.0.1:9090 --minutes 10 --out pictures

It honours type, unit, legend, thresholds, width and order of panels; colours, fonts and sizes are its own.
"""
