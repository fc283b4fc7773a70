"""Turns boards into Grafana's own types, with grafana-foundation-sdk, and those into JSON.

Every board gets the same variables, links to the others, a row of panels below each heading, and panels of
one look, so that boards.yml says nothing twice.
"""

import json
from collections.abc import Callable, Sequence

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, table, text, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_model
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.prometheus import PromQueryFormat
from grafana_foundation_sdk.models.text import TextMode

from infra.docs.pages import anchor_of
from infra.grafana.panels import Board, Panel
from infra.grafana.runbook import RUNBOOK_TITLE, RUNBOOK_UID, Paragraph, paragraph_url

TAG = "tidemill"
PANEL_ROWS = 8
"""Height of a panel, in units of Grafana's grid."""
STAT_ROWS = 5
DATASOURCE = common_model.DataSourceRef(type_val="prometheus", uid="$datasource")
COLORS = ("green", "yellow", "red")
PanelBuilder = timeseries.Panel | stat.Panel | table.Panel


def build_board(board: Board, others: Sequence[Board], paragraphs: Sequence[Paragraph]) -> model.Dashboard:
    """One dashboard, with links to `others` and from each panel to its paragraph of the runbook."""
    panel_ids = {paragraph.anchor: paragraph.panel_id for paragraph in paragraphs}
    built = _empty(board.title, board.uid, board.question)
    for other_board in others:
        if other_board is not board:
            built.link(_link(other_board.title, f"/d/{other_board.uid}", other_board.question))
    built.link(_link(RUNBOOK_TITLE, f"/d/{RUNBOOK_UID}", "What alerts and panels mean, and what to do."))
    built.with_variable(
        dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
    ).with_variable(
        dashboard.QueryVariable("run_id")
        .label("Run")
        .datasource(DATASOURCE)
        .query("label_values(tidemill_run_info, run_id)")
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.ALPHABETICAL_DESC)
    )
    for title, panels in board.rows.items():
        built.with_row(dashboard.Row(title))
        height = STAT_ROWS if all(panel.kind == "stat" for panel in panels) else PANEL_ROWS
        for panel in panels:
            built.with_panel(_panel(panel, panel_ids[anchor_of(panel.runbook)]).height(height))
    return _numbered(built.build())


def build_runbook(paragraphs: Sequence[Paragraph], boards: Sequence[Board]) -> model.Dashboard:
    """The paragraphs of docs/troubleshooting.md that panels and alerts refer to, one panel each."""
    built = _empty(RUNBOOK_TITLE, RUNBOOK_UID, "What alerts and panels mean, and what to do.")
    for board in boards:
        built.link(_link(board.title, f"/d/{board.uid}", board.question))
    for paragraph in paragraphs:
        # Numbered in the order of the paragraphs, as links to them expect.
        panel = text.Panel().title(paragraph.heading).mode(TextMode.MARKDOWN)
        panel.content(paragraph.linked(paragraphs))
        built.with_panel(panel.height(PANEL_ROWS).span(12))
    return _numbered(built.build())


def as_json(built: model.Dashboard) -> str:
    """The file that Grafana reads: a panel a line, so that a diff shows which ones changed."""
    tree = json.loads(json.dumps(built, cls=JSONEncoder, sort_keys=True))
    panels = ",\n".join(map(json.dumps, tree.pop("panels")))
    return f'{{"panels": [\n{panels}\n],\n{json.dumps(tree)[1:]}\n'


def _empty(title: str, uid: str, question: str) -> dashboard.Dashboard:
    return (
        dashboard.Dashboard(f"Tidemill: {title}")
        .uid(uid)
        .description(question)
        .tags([TAG])
        .time("now-1h", "now")
        .refresh("10s")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
    )


def _numbered(built: model.Dashboard) -> model.Dashboard:
    """Panels get ids by their place: links into a dashboard need them."""
    for number, panel in enumerate(built.panels or [], start=1):
        panel.id_val = number
    return built


def _link(title: str, url: str, tooltip: str) -> dashboard.DashboardLink:
    link = dashboard.DashboardLink(title).type(model.DashboardLinkType.LINK).url(url).tooltip(tooltip)
    return link.keep_time(True).include_vars(True)


def _panel(panel: Panel, paragraph_id: int) -> PanelBuilder:
    built = _STYLES[panel.kind](panel)
    built.title(panel.title).description(panel.description).unit(panel.unit).datasource(DATASOURCE)
    runbook = _link(f"Runbook: {panel.runbook}", paragraph_url(paragraph_id), "What to do")
    built.span(panel.span).links([runbook.target_blank(True)])
    for number, query in enumerate(panel.queries):
        built.with_target(_target(query.expr, query.legend, chr(ord("A") + number), panel.kind))
    if panel.thresholds:
        built.thresholds(_thresholds(panel.thresholds))
    if panel.max is not None:
        built.max(panel.max)
    return built


def _target(expr: str, legend: str, ref_id: str, kind: str) -> prometheus.Dataquery:
    target = prometheus.Dataquery().expr(expr).legend_format(legend).ref_id(ref_id).datasource(DATASOURCE)
    if kind == "table":
        return target.format(PromQueryFormat.TABLE).instant()
    return target.instant() if kind == "stat" else target.range()


def _thresholds(values: Sequence[float]) -> dashboard.ThresholdsConfig:
    steps = [model.Threshold(value=None, color=COLORS[0])]
    steps += [
        model.Threshold(value=value, color=color) for value, color in zip(values, COLORS[1:], strict=False)
    ]
    return dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps)


def _lines(panel: Panel) -> timeseries.Panel:
    legend = common.VizLegendOptions().display_mode(common_model.LegendDisplayMode.TABLE).show_legend(True)
    legend = legend.placement(common_model.LegendPlacement.BOTTOM).calcs(["lastNotNull", "max"])
    tooltip = common.VizTooltipOptions().mode(common_model.TooltipDisplayMode.MULTI)
    built = timeseries.Panel().legend(legend).tooltip(tooltip.sort(common_model.SortOrder.DESCENDING))
    built.line_width(2).fill_opacity(8).show_points(common_model.VisibilityMode.NEVER)
    # A worker that restarts leaves a gap of a scrape or two; a longer one is shown as one.
    built.span_nulls(60_000.0)
    if panel.thresholds:
        built.thresholds_style(
            common.GraphThresholdsStyleConfig().mode(common_model.GraphThresholdsStyleMode.DASHED)
        )
    return built


def _stacked(panel: Panel) -> timeseries.Panel:
    stacking = common.StackingConfig().mode(common_model.StackingMode.NORMAL).group("A")
    return _lines(panel).stacking(stacking).fill_opacity(60).line_width(0).min(0.0)


def _stat(panel: Panel) -> stat.Panel:
    built = stat.Panel().color_mode(common_model.BigValueColorMode.VALUE)
    built.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    return built.graph_mode(common_model.BigValueGraphMode.NONE)


_STYLES: dict[str, Callable[[Panel], PanelBuilder]] = {
    "lines": _lines,
    "stacked": _stacked,
    "stat": _stat,
    "table": lambda _: table.Panel(),
}
