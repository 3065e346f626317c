"""Every number that a rule compares with, and why it is that number."""

MIN_PREEMPTIONS = 3
"""Fewer in one observation may be one unlucky moment."""

PREEMPTIONS_PER_ADMISSION = 0.1
"""One in ten requests thrown out: below that the study of watermarks saw no loss of throughput or smoothness."""

MAX_WATERMARK_RATIO = 0.1
"""From there on the study of watermarks lost throughput: who would need a larger one needs a larger pool."""

STALL_RATIO = 0.5
"""Requests waited for blocks for half of the time: more memory would have been used, not now and then but mostly."""

FULL_RATIO = 0.95
"""Of a pool of which only the usage is told: what is left does not take another request."""

MODEL_TIME_RATIO = 0.5
"""The model takes most of a step. Below, larger steps cost little: the step's limit is in the way."""

FREE_RATIO = 0.1
"""Part of the pool that is free beyond the watermark when requests are said to wait though blocks are free."""

MIN_PROMPTS = 8
"""Fewer prompts in one observation say nothing about prompts in general."""

GRANULARITY_LOST_RATIO = 0.5
"""Half of the prompt tokens lie in no block that could ever hit: prompts are shorter than about two blocks."""

WASTE_RATIO = 0.4
"""Waste is half a block a sequence on average: at 0.4 a sequence is shorter than about one and a half blocks."""

SHORT_BLOCKS = 2
"""Blocks of a mean request, prompt and answer. Longer ones waste less than a quarter; what they hold empty will soon be
filled."""

WASTE_USAGE_RATIO = 0.1
"""Waste in a nearly empty pool costs nobody anything."""

REGRETTED_QUERIED_RATIO = 0.05
"""Part of all prompt tokens that had been evicted: less would hardly be felt in the time to the first token."""

REGRETTED_HIT_RATIO = 0.25
"""Regretted tokens beside hits and regretted ones: one in four hits was lost."""

PREMATURE_RATIO = 0.25
"""Of a foreign engine: one in four removed blocks came back."""

LAG_RATIO = 0.5
"""Of the events that the log keeps. A subscriber that far behind loses events as soon as the load doubles; one that
keeps up is a batch behind."""
