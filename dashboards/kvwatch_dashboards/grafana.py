"""Boards as Grafana's JSON, by the builders of its own SDK. House defaults are here and nowhere else."""

import json
from collections.abc import Iterable
from typing import TypeVar

from grafana_foundation_sdk.builders import common as cb
from grafana_foundation_sdk.builders import dashboard as db
from grafana_foundation_sdk.builders import prometheus, stat, table, text, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as cm
from grafana_foundation_sdk.models import dashboard as dm
from grafana_foundation_sdk.models import text as text_model
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from kvwatch.telemetry import metrics as m
from kvwatch_dashboards import promql
from kvwatch_dashboards.annotations import ANNOTATIONS
from kvwatch_dashboards.panel import Board, Level, Panel, Query, Text

SOURCE = dm.DataSourceRef(type_val="prometheus", uid="${datasource}")
TAG = "kvwatch"
HEIGHT = 8

P = TypeVar("P", timeseries.Panel, stat.Panel, table.Panel)
PanelBuilder = timeseries.Panel | stat.Panel | table.Panel | text.Panel


def dashboard_json(board: Board) -> str:
    """Return a dashboard: indented and sorted, so that a change is a readable difference."""
    built = json.loads(json.dumps(_dashboard(board).build(), cls=JSONEncoder))
    for number, panel in enumerate(built["panels"], start=1):  # links to single panels need them
        panel["id"] = number
    return json.dumps(built, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _dashboard(board: Board) -> db.Dashboard:
    made = (
        db.Dashboard(board.title)
        .uid(board.uid)
        .description(board.about)
        .tags([TAG])
        .timezone("browser")
        .readonly()
        .tooltip(dm.DashboardCursorSync.CROSSHAIR)
        .time(f"now-{board.hours}h", "now")
        .refresh("30s")
        .links(list(_links()))
        .variables(list(_variables()))
        .annotations(list(_annotations()))
    )
    for row in board.rows:
        made.with_row(db.Row(row.title))
        words = board.words.get(row.title)
        if words is not None:
            made.with_panel(_text(words))
        for panel in row.panels:
            made.with_panel(_panel(panel))
    return made


# ---------------------------------------------------------------- around the panels


def _links() -> Iterable[db.DashboardLink]:
    yield (
        db.DashboardLink("kvwatch")
        .type(dm.DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .as_dropdown(True)
        .include_vars(True)
        .keep_time(True)
    )
    for title, path in (("Diagnosis", "/admin/v1/diagnosis"), ("Admin API", "/openapi.json")):
        yield db.DashboardLink(title).type(dm.DashboardLinkType.LINK).url("${admin}" + path).target_blank(True)


def _variables() -> Iterable[db.QueryVariable | db.DatasourceVariable | db.TextBoxVariable]:
    yield db.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
    build_info, events = promql.series(m.BUILD_INFO), promql.series(m.TELEMETRY_EVENTS, job="~$job")
    chosen = promql.series(m.TELEMETRY_EVENTS, job="~$job", model_name="~$model")
    ranked = promql.series(m.TELEMETRY_EVENTS, job="~$job", model_name="~$model", engine="~$engine")
    for name, label, source, of in (
        ("job", "Job", build_info, "job"),
        ("model", "Model", events, "model_name"),
        ("engine", "Engine", chosen, "engine"),
        ("dp_rank", "Rank", ranked, "dp_rank"),
        ("tier", "Tier", promql.series(m.KV_BLOCK_CAPACITY, engine="~$engine"), "tier"),
        ("group", "Group", promql.series(m.KV_TOKEN_CAPACITY, engine="~$engine"), "group"),
    ):
        yield (
            db.QueryVariable(name)
            .label(label)
            .datasource(SOURCE)
            .query(f"label_values({source}, {of})")
            .refresh(dm.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(dm.VariableSort.ALPHABETICAL_ASC)
            .multi(True)
            .include_all(True)
            .all_value(".*")
            .current(dm.VariableOption(text="All", value="$__all"))
        )
    yield db.TextBoxVariable("admin").label("Admin API").default_value("http://127.0.0.1:9401")


def _annotations() -> Iterable[db.AnnotationQuery]:
    for each in ANNOTATIONS:
        made = db.AnnotationQuery().name(each.name).datasource(SOURCE).enable(True)
        yield made.icon_color(each.colour).expr(each.expr)


# ---------------------------------------------------------------- panels


def _panel(panel: Panel) -> PanelBuilder:
    if panel.kind == "table":
        return _table(panel)
    if panel.kind == "number":
        return _number(panel)
    return _lines(panel)


def _lines(panel: Panel) -> timeseries.Panel:
    made = _dressed(timeseries.Panel(), panel)
    made.legend(
        cb.VizLegendOptions()
        .show_legend(True)
        .display_mode(cm.LegendDisplayMode.LIST)
        .placement(cm.LegendPlacement.BOTTOM)
    )
    made.tooltip(cb.VizTooltipOptions().mode(cm.TooltipDisplayMode.MULTI).sort(cm.SortOrder.DESCENDING))
    made.fill_opacity(25 if panel.kind == "stack" else 8).show_points(cm.VisibilityMode.NEVER).span_nulls(False)
    if panel.kind == "stack":
        made.stacking(cb.StackingConfig().mode(cm.StackingMode.NORMAL))
    if panel.levels:
        made.thresholds_style(cb.GraphThresholdsStyleConfig().mode(cm.GraphTresholdsStyleMode.DASHED))
    if panel.unit == "percentunit":
        made.axis_soft_max(1)
    made.axis_soft_min(0)
    return made


def _number(panel: Panel) -> stat.Panel:
    made = _dressed(stat.Panel(), panel)
    made.reduce_options(cb.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
    return made.color_mode(cm.BigValueColorMode.VALUE).graph_mode(cm.BigValueGraphMode.AREA)


def _table(panel: Panel) -> table.Panel:
    made = _dressed(table.Panel(), panel)
    names = {f"Value #{_ref(number)}": query.column for number, query in enumerate(panel.queries)}
    hidden = {"Time": True, "__name__": True}
    made.with_transformation(dm.DataTransformerConfig(id_val="merge", options={}))
    made.with_transformation(
        dm.DataTransformerConfig(id_val="organize", options={"renameByName": names, "excludeByName": hidden})
    )
    for query in panel.queries:
        made.override_by_name(query.column, list(_column(query, panel)))
    first = panel.queries[0].column
    return made.sort_by([cb.TableSortByFieldState().display_name(first).desc(True)])


def _column(query: Query, panel: Panel) -> Iterable[dm.DynamicConfigValue]:
    if query.unit:
        yield dm.DynamicConfigValue(id_val="unit", value=query.unit)
    if panel.levels and query.has_levels:
        yield dm.DynamicConfigValue(id_val="custom.cellOptions", value={"type": "color-background", "mode": "basic"})


def _text(words: Text) -> text.Panel:
    made = text.Panel().title(words.title).description("How to read the panels below.").span(words.span)
    return made.height(words.height).mode(text_model.TextMode.MARKDOWN).content(words.markdown)


def _dressed(made: P, panel: Panel) -> P:
    made.title(panel.title).description(panel.description).unit(panel.unit).datasource(SOURCE)
    made.span(panel.span).height(HEIGHT).no_value(panel.when_empty)
    made.thresholds(_levels(panel.levels))
    for number, query in enumerate(panel.queries):
        made.with_target(_target(query, _ref(number), panel))
    return made


def _target(query: Query, ref: str, panel: Panel) -> prometheus.Dataquery:
    made = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(ref).datasource(SOURCE)
    if panel.kind == "table":
        return made.instant().format(PromQueryFormat.TABLE)
    return made.range().exemplar(panel.has_exemplars)


def _levels(levels: tuple[Level, ...]) -> db.ThresholdsConfig:
    steps = [dm.Threshold(value=None, color="green"), *(dm.Threshold(each.value, each.colour) for each in levels)]
    return db.ThresholdsConfig().mode(dm.ThresholdsMode.ABSOLUTE).steps(steps)


def _ref(number: int) -> str:
    return chr(ord("A") + number)
