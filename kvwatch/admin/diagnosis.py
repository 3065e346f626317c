"""`GET diagnosis`: what whoever mounted it says of the engines. Knows no rule."""

from typing import Any

import msgspec
from msgspec import UNSET

from kvwatch.admin import problems
from kvwatch.admin.engines import EngineQuery
from kvwatch.admin.operation import PREFIX, Answer, Call, Operation
from kvwatch.admin.problems import Problem
from kvwatch.admin.threads import off_loop


class DiagnosisAnswer(msgspec.Struct, frozen=True):
    """What is the matter with each engine, gravest first; docs/diagnosis.md tells the fields."""

    engines: list[dict[str, Any]]


async def get_diagnosis(call: Call[EngineQuery, None]) -> Answer:
    """Show what is the matter with all engines, or with those of a name or rank."""
    query = call.query
    told = await off_loop(lambda: [msgspec.to_builtins(each) for each in call.site.engines.diagnoses()])
    found = [
        each for each in told if query.engine in {"", each["engine"]} and query.dp_rank in {UNSET, each["dp_rank"]}
    ]
    if told and not found:
        names = ", ".join(sorted({each["engine"] for each in told}))
        raise Problem(problems.NOT_FOUND, f"no such engine is judged here; judged: {names}")
    return Answer(DiagnosisAnswer(found))


OPERATIONS = (
    Operation(
        method="GET", path=f"{PREFIX}/diagnosis", name="getDiagnosis", tag="read",
        brief="The present bottleneck of each engine in one sentence, with its evidence and the next step.",
        query=EngineQuery, answer=DiagnosisAnswer, handler=get_diagnosis, is_answered_here=True,
    ),
)  # fmt: skip
