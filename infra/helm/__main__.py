"""Makes the templates of the Helm chart from the kustomize base: `python -m infra.helm`.

One source for both: fields that differ between runs or clusters become expressions here, everything else is
as in infra/kubernetes. With the chart's own values both give the same objects, which a test compares.
"""

import argparse
import io
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

REPO = Path(__file__).resolve().parents[2]
BASE = REPO / "infra" / "kubernetes"
CHART = REPO / "infra" / "helm" / "tidemill"
HEAD = "# Made by `python -m infra.helm` from infra/kubernetes: change it there.\n"
PARTS = {"base": "", "keda": ".Values.keda.enabled", "monitoring": ".Values.monitoring.enabled"}
PARTS["reward-model"] = ".Values.rewardModel.enabled"
"""Folder of the base, and when the chart has it."""
SECTIONS = {
    "trainer": "trainer",
    "rollout": "rollout",
    "reward": "reward",
    "exporter": "exporter",
    "redis": "redis",
}
SECTIONS["reward-model"] = "rewardModel"
"""Section of the values of each pod."""
RUN_TAG = 'print "{" .Values.run.id "}"'
"""The run's id in braces, as its keys in Redis have it."""
CONFIG_MAP = {
    "TIDEMILL_RUN_ID": ".Values.run.id | quote",
    "RUN_HASH_TAG": f"{RUN_TAG} | quote",
    "TIDEMILL_CONFIG": ".Values.run.config | quote",
    "TIDEMILL_REDIS_URL": ".Values.run.redisUrl | quote",
    "SERVERS_NAME": ".Values.rewardModel.name | quote",
}
Tree = dict[str, Any]


def templates() -> Iterator[tuple[str, str]]:
    """File and text of each template, one for each file of the base and one for each part's variables."""
    for part, condition in PARTS.items():
        settings = yaml.safe_load((BASE / part / "kustomization.yaml").read_text(encoding="utf-8"))
        labels = {k: v for entry in settings.get("labels", []) for k, v in entry["pairs"].items()}
        files: dict[str, list[Tree]] = {}
        for name in settings["resources"]:
            text = (BASE / part / name).read_text(encoding="utf-8")
            files[name] = [tree for tree in yaml.safe_load_all(text) if tree]
        for generator in settings.get("configMapGenerator", []):
            files[f"{generator['name']}-variables.yaml"] = [config_map(generator, BASE / part)]
        for name, trees in files.items():
            body = "---\n".join(template_of(tree, labels) for tree in trees)
            whole = f"{{{{- if {condition} }}}}\n{body}{{{{- end }}}}\n" if condition else body
            yield name, HEAD + whole


def config_map(generator: Tree, folder: Path) -> Tree:
    """What kustomize makes of a configMapGenerator."""
    lines = list(generator.get("literals", []))
    for name in generator.get("envs", []):
        lines += (folder / name).read_text(encoding="utf-8").splitlines()
    data = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": generator["name"]}, "data": data}


def template_of(tree: Tree, labels: dict[str, str]) -> str:
    """One object as a template: while YAML is written, marks stand for the expressions."""
    marks: dict[str, str] = {}

    def mark(expression: str) -> str:
        marks[name := f"MARK{len(marks)}MARK"] = f"{{{{ {expression} }}}}"
        return name

    metadata = tree["metadata"]
    metadata["namespace"] = mark(".Release.Namespace | quote")
    if labels:
        metadata["labels"] = {**metadata.get("labels", {}), **labels}
    if tree["kind"] == "ConfigMap":
        tree["data"] |= {key: mark(CONFIG_MAP[key]) for key in tree["data"] if key in CONFIG_MAP}
    elif tree["kind"] == "PersistentVolumeClaim":
        section = f".Values.storage.{metadata['name']}"
        tree["spec"]["resources"]["requests"]["storage"] = mark(f"{section}.size | quote")
        tree["spec"]["storageClassName"] = mark(f"{section}.className | toJson")
    elif tree["kind"] == "ScaledObject":
        vary_scaling(tree["spec"], mark)
    elif tree["kind"] == "ScrapeConfig":
        metadata["labels"]["release"] = mark(".Values.monitoring.release | quote")
        for place in tree["spec"]["httpSDConfigs"]:
            place["url"] = place["url"].replace("exporter.tidemill", f"exporter.{mark('.Release.Namespace')}")
    elif "template" in tree.get("spec", {}):
        vary_pods(tree, mark)
    text = yaml.safe_dump(tree, sort_keys=False, width=1000, allow_unicode=True)
    for name, expression in marks.items():
        text = text.replace(name, expression)
    return text


def vary_scaling(spec: Tree, mark: Any) -> None:
    """Bounds of the number of reward workers, and the stream of the run."""
    spec["minReplicaCount"] = mark(".Values.keda.min")
    spec["maxReplicaCount"] = mark(".Values.keda.max")
    for trigger in spec["triggers"]:
        parts = trigger["metadata"]["stream"].split(":")
        trigger["metadata"]["stream"] = ":".join([parts[0], mark(RUN_TAG), *parts[2:]])


def vary_pods(tree: Tree, mark: Any) -> None:
    """Image, resources, number and place of a pod."""
    section = f".Values.{SECTIONS[tree['metadata']['name']]}"
    pod = tree["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    if container["image"].startswith("tidemill/"):
        name = container["image"].removeprefix("tidemill/")
        container["image"] = f"{mark('.Values.images.prefix')}/{name}:{mark('.Values.images.tag')}"
    else:
        container["image"] = mark(f"{section}.image | quote")
    container["resources"] = mark(f"{section}.resources | toJson")
    pod["nodeSelector"] = mark(f"{section}.nodeSelector | toJson")
    pod["tolerations"] = mark(f"{section}.tolerations | toJson")
    if tree["kind"] == "Deployment" and "replicas" in tree["spec"]:
        tree["spec"]["replicas"] = mark(f"{section}.replicas")


def pack(folder: Path) -> Path:
    """The chart as an archive that helm installs; the same bytes from the same files."""
    version = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))["version"]
    path = folder / f"tidemill-{version}.tgz"
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for file in sorted(file for file in CHART.rglob("*") if file.is_file()):
            entry = tarfile.TarInfo(f"tidemill/{file.relative_to(CHART).as_posix()}")
            content = file.read_bytes()
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return path


def main() -> int:
    """Write the templates, or say with exit code 1 which are not current."""
    parser = argparse.ArgumentParser(description="The Helm chart, from the kustomize base.")
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--pack", type=Path, metavar="FOLDER", help="also write the chart as an archive")
    options = parser.parse_args()
    wanted = {CHART / "templates" / name: text for name, text in templates()}
    there = {path: path.read_text(encoding="utf-8") for path in (CHART / "templates").glob("*")}
    if options.check and wanted != there:
        print("infra/helm/tidemill/templates is not current: run `python -m infra.helm`", file=sys.stderr)
        return 1
    if not options.check:
        for path in set(there) - set(wanted):
            path.unlink()
        for path, text in wanted.items():
            path.write_text(text, encoding="utf-8")
    if options.pack:
        print(pack(options.pack))
    return 0


if __name__ == "__main__":
    sys.exit(main())
