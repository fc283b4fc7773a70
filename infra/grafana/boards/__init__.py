"""The dashboards, in the order in which they are linked: what each shows is a table of panels."""

from infra.grafana.boards.faults import FAULTS
from infra.grafana.boards.pipeline import PIPELINE
from infra.grafana.boards.run import RUN

BOARDS = (RUN, PIPELINE, FAULTS)
