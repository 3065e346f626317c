"""What runs in the next step, and what becomes of its results. No torch.

request.py      requests and sequences: the mutable state of work in progress
queue.py        requests that wait, in order of arrival
policy.py       small decisions, each readable alone: who may start, who must yield, how many tokens
lifecycle.py    admission, forking, preemption, end: every change of a request's state, and its events
step_builder.py packs scheduled tokens into one StepInput
scheduler.py    schedule() and apply()
"""
