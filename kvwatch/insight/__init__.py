"""What the numbers mean: judgements over views of one engine.

Pure: fed with samples as the ledger's views and the metrics page have them. Knows no engine, no exporter and no HTTP.

- diagnosis/   rules that name the present bottleneck, with evidence and the next step
"""
