"""Requests made up from the served OpenAPI document: no server error, no answer that the document does not tell of."""

from pathlib import Path

import pytest
from admin_stage import TOKENS, AdminStage, admin_stage
from schemathesis_runs import run_schemathesis


def run(stage: AdminStage, num_examples: int, folder: Path) -> None:
    run_schemathesis("admin", stage.url, num_examples, folder, (f"Authorization: Bearer {TOKENS['operate']}",))


def test_made_up_requests_have_documented_answers(tmp_path: Path) -> None:
    with admin_stage(tmp_path) as stage:
        stage.submit("a")
        stage.submit("b")
        run(stage, 5, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_many_made_up_requests_have_documented_answers(tmp_path: Path) -> None:
    with admin_stage(tmp_path) as stage:
        stage.submit("a")
        stage.submit("b")
        run(stage, 200, tmp_path)
