"""What docs/studies says was measured, drawn, and became the default is so."""

import re
from pathlib import Path

import pytest

from kvwatch.config import declared_settings
from kvwatch_engine.contracts.settings import EngineSettings
from kvwatch_engine.serve import ServeSettings

FOLDER = Path(__file__).parents[2] / "docs" / "studies"
INDEX = (FOLDER / "README.md").read_text()
STUDIES = re.findall(r"^\| \[[^]]+\]\((\S+)\.md\)", INDEX, flags=re.M)
DEFAULTS = dict(re.findall(r"`--([a-z-]+) (\S+)`", INDEX))
"""Setting -> value, as the index says that it follows from the studies."""
IN_ENGINE = {"block-size", "preemption-mode", "victim-policy"}
"""Those with the same default in an engine without a server, whose watermark is none unless it is set."""


def test_the_index_knows_each_page_and_each_study_leads_to_a_default() -> None:
    assert sorted(STUDIES) == sorted(path.stem for path in FOLDER.glob("*.md") if path.stem != "README")
    assert len(DEFAULTS) == len(STUDIES) == 4


@pytest.mark.parametrize("study", STUDIES)
def test_each_place_for_a_table_has_one_and_says_how_it_was_made(study: str) -> None:
    page = (FOLDER / f"{study}.md").read_text()
    tables = re.findall(r"<!-- (?!end)([^>]+) -->\n(.*?)<!-- end -->", page, flags=re.S)

    assert tables
    assert f"make study ARGS={study}" in page
    for name, content in tables:
        assert len(re.findall(r"^\|", content, flags=re.M)) >= 5, name
        if "One round, so no spread" in content:
            assert not re.search(r"\([\d.,]+ to [\d.,]+\)", content), f"{name} has ranges of one round"
        else:
            assert re.search(r"[Mm]edian \(lowest to highest\)", content), name


def test_each_plot_is_shown_once_and_each_one_that_is_shown_exists() -> None:
    pages = [(FOLDER / f"{study}.md").read_text() for study in STUDIES]
    shown = [re.findall(r"!\[[^]]+\]\((\S+)\)", page) for page in pages]

    assert all(shown), "a study without a plot"
    assert sorted(name for names in shown for name in names) == sorted(path.name for path in FOLDER.glob("*.svg"))


@pytest.mark.parametrize(("flag", "value"), DEFAULTS.items())
def test_the_default_is_what_the_study_found(flag: str, value: str) -> None:
    [setting] = [each for each in declared_settings(ServeSettings) if each.name == flag.replace("-", "_")]

    assert str(setting.default) == value
    if flag in IN_ENGINE:
        assert str(getattr(EngineSettings(num_blocks=2), setting.name)) == value
