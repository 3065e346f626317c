"""`GET diagnosis`: what whoever mounted it says of the engines. Knows no rule."""

from typing import Any

import msgspec

from kvwatch.admin.operation import PREFIX, Answer, Call, NoQuery, Operation
from kvwatch.admin.threads import off_loop


class DiagnosisAnswer(msgspec.Struct, frozen=True):
    """What is the matter with each engine, gravest first; docs/diagnosis.md tells the fields."""

    engines: list[dict[str, Any]]


async def get_diagnosis(call: Call[NoQuery, None]) -> Answer:
    """Show what is the matter."""
    known = [each.diagnose for each in call.site.engines.all() if each.diagnose is not None]
    return Answer(DiagnosisAnswer(await off_loop(lambda: [msgspec.to_builtins(ask()) for ask in known])))


OPERATIONS = (
    Operation(
        method="GET", path=f"{PREFIX}/diagnosis", name="getDiagnosis", tag="read",
        brief="The present bottleneck of each engine in one sentence, with its evidence and the next step.",
        answer=DiagnosisAnswer, handler=get_diagnosis,
    ),
)  # fmt: skip
