"""Pictures of all dashboards from a run in which everything happens: no panel is empty."""

from pathlib import Path

import pytest
from observed_run import SMALL, observed_run
from PIL import Image
from prometheus_stage import needs_prometheus
from tiny_models import make_tiny_model

from kvwatch_dashboards.boards import BOARDS
from kvwatch_dashboards.preview.__main__ import draw
from kvwatch_dashboards.preview.missing import OCCASIONAL

MAX_BYTES = 400_000


@needs_prometheus
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_panel_of_every_dashboard_has_data_and_a_picture(tmp_path: Path) -> None:
    model = make_tiny_model("llama", tmp_path / "model", max_position_embeddings=2048)
    run = tmp_path / "run"
    run.mkdir()
    with observed_run(run, model, SMALL) as (api, span):
        empty = draw(api, span, tmp_path / "pictures", "A tiny model.")

    assert [name for name in empty if name.split(": ")[1] not in OCCASIONAL] == []
    page = (tmp_path / "pictures" / "index.html").read_text(encoding="utf-8")
    for board in BOARDS:
        picture = tmp_path / "pictures" / f"{board.uid}.png"
        with Image.open(picture) as image:
            assert image.width > 1000
            assert image.height > 500
            assert len(image.convert("RGB").getcolors(1 << 24) or ()) > 10, "a picture of nothing"
        assert picture.stat().st_size < MAX_BYTES
        assert f'src="{board.uid}.png"' in page
