"""What runs in the next step, and what becomes of its results. No torch.

request.py         requests and sequences: the mutable state of work in progress
queue.py           requests that wait, in order
limits.py          what a request must be to be let in
policy.py          small decisions, each readable alone: who comes first, how many tokens, how many blocks
lifecycle.py       start, fork, preemption, end: every change of a request's state
beam_search.py     which beams go on, and when a search is over; pure
beam_groups.py     carries that out on a request's sequences
request_events.py  the events that tell of them
admission.py       who may start or resume, and why the others wait
pause.py           holds all of them back, for a time
victims.py         who yields when blocks are short
step_bound.py      how long a step may take
prefill_pace.py    how long it takes, as measured
cost_model.py      what recomputation costs, as measured
preemption.py      makes room: waits for what is coming, recomputes or swaps
deadlines.py       whose time is over
prompt_lookup.py   finds what a sequence may go on with in its own text; pure
drafting.py        who gets a draft, and how long
step_builder.py    packs scheduled tokens into one StepInput
results.py         what the results of a step change
verification.py    what stands of the drafts, and what is taken back
scheduler.py       schedule() and apply()
"""
