"""Grammars that generated text must keep to: compiled off the step loop, followed token by token.

    grammar.py     a grammar as a request gives it, and how large one may be
    lark_size.py   how much a terminal of a Lark grammar stands for
    vocabulary.py  the model's tokens as the library sees them, and the bounds under which it works
    trial.py       the process that has each grammar compiled first
    worker.py      the processes in which that happens, which may crash or be ended; attempt.py is what they do
    turns.py       gives them turns, so that nobody beside them notices; linux_process.py: what only Linux does for that
    trials.py      asks that process, with a deadline; messages.py is what they say to each other
    refusals.py    remembers which grammars cannot be compiled
    matching.py    one sequence within a compiled grammar, in this process
    compiler.py    from a grammar to a guide: trial, compilation, cache

    request ─▶ compiler ─▶ trial process: does it compile within its bounds? ─▶ compiled here ─▶ cache
                                                                                    │
    step ─▶ SequenceGuide.prepare (threads, while the model computes) ─▶ allowed ─▶ sampler

The library is llguidance: it needs no preparation for a schema, works by an Earley parser over a lazy lexer, bounds its
own work, and gives the interpreter up while it computes. What its bounds leave open (hostile grammars that take
minutes, or the whole stack) is found out in a process that may die. Knows neither the API nor the scheduler.
"""

from kvwatch_engine.guidance.compiler import GuideCompiler
from kvwatch_engine.guidance.grammar import Grammar, GuidanceLimits

__all__ = ["Grammar", "GuidanceLimits", "GuideCompiler"]
