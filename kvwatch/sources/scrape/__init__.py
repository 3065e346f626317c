"""An engine's own `/metrics`, in the names of kvwatch.

- rules.py     what one of our series is made of, and how a page's rows become it
- vllm.py      the rules of a vLLM
- sglang.py    the rules of an SGLang
- page.py      text to rows, by rank
- totals.py    counters that go on when the engine begins anew
- scraper.py   asks, again and again
"""

from kvwatch.sources.engines import EngineSpec
from kvwatch.sources.scrape.scraper import MetricsScraper
from kvwatch.sources.scrape.sglang import SGLANG
from kvwatch.sources.scrape.vllm import VLLM

__all__ = ["make_scraper"]

_DIALECTS = {"vllm": VLLM, "sglang": SGLANG}


def make_scraper(spec: EngineSpec) -> MetricsScraper:
    """Return what reads the metrics of a vLLM or an SGLang."""
    return MetricsScraper(spec, _DIALECTS[spec.kind])
