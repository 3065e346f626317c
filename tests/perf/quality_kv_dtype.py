"""What quantised KV caches cost in quality, as JSON; exits 1 when a bound is missed. Takes minutes.

python tests/perf/quality_kv_dtype.py

The embedded model reads some 8,000 tokens of prose, code and several languages in float32. For each kind of cache: by
which part its perplexity rises over that with unquantised keys and values, at which part of the positions the best next
token is the same, and how many tokens a GiB holds.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from kv_quality import MAX_PERPLEXITY_RISE, MIN_AGREEMENT, long_texts, predict
from tiny_models import embedded_model_folder

from kvwatch_engine.contracts.cache import QUANTISED_DTYPES
from kvwatch_engine.model.loader import load_model


def main() -> None:
    """Measure and print."""
    folder = embedded_model_folder()
    model, texts = load_model(str(folder), dtype="float32"), long_texts(folder)
    plain = predict(model, texts, "auto")
    document: dict[str, object] = {"positions": len(plain.best), "perplexity": round(plain.perplexity, 3)}
    is_met = True
    for kv_dtype in QUANTISED_DTYPES:
        quantised = predict(model, texts, kv_dtype)
        rise, agreement = quantised.rise_over(plain), quantised.agreement_with(plain)
        document[kv_dtype] = {
            "perplexity_rise": round(rise, 5),
            "max_perplexity_rise": MAX_PERPLEXITY_RISE[kv_dtype],
            "agreement": round(agreement, 4),
            "min_agreement": MIN_AGREEMENT[kv_dtype],
        }
        is_met &= rise <= MAX_PERPLEXITY_RISE[kv_dtype] and agreement >= MIN_AGREEMENT[kv_dtype]
    document["tokens_per_gib"] = {
        kv_dtype: 2**30 // model.cache_spec(16, kv_dtype).block_bytes * 16 for kv_dtype in ("auto", *QUANTISED_DTYPES)
    }
    print(json.dumps(document))
    sys.exit(not is_met)


if __name__ == "__main__":
    main()
