"""Kinds of Kubernetes objects, strictly: any other field is an error.

The kinds of Kubernetes itself are dataclasses of lightkube-models, made from Kubernetes' own definitions. Of
KEDA and the Prometheus operator there are the fields that the chart uses, written down from their
definitions: not whole schemas, and of no one release.
"""

import dataclasses
import sys
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, TypeAdapter

Count = Annotated[int, Field(ge=0)]
Digits = Annotated[str, Field(pattern="^[0-9]+$")]
Duration = Annotated[str, Field(pattern="^[0-9]+(s|m)$")]


class Strict(BaseModel, extra="forbid", strict=True):
    """No other field, and no other type."""


class Named(Strict):
    name: str


class ScalingPolicy(Strict):
    type: Literal["Pods", "Percent"]
    value: Annotated[int, Field(ge=1)]
    periodSeconds: Annotated[int, Field(ge=1, le=1800)]


class ScalingRules(Strict):
    stabilizationWindowSeconds: Annotated[int, Field(ge=0, le=3600)] = 0
    policies: Annotated[list[ScalingPolicy], Field(min_length=1)]


class Behavior(Strict):
    scaleUp: ScalingRules
    scaleDown: ScalingRules


class AutoscalerConfig(Strict):
    behavior: Behavior


class Advanced(Strict):
    horizontalPodAutoscalerConfig: AutoscalerConfig


class RedisStream(Strict):
    address: Annotated[str, Field(pattern="^[^:]+:[0-9]+$")]
    stream: str
    consumerGroup: str
    databaseIndex: Digits


class Lag(RedisStream):
    lagCount: Digits
    activationLagCount: Digits  # KEDA refuses a lag without it


class Pending(RedisStream):
    pendingEntriesCount: Digits


class Trigger(Strict):
    type: Literal["redis-streams"]
    name: str
    metadata: Lag | Pending
    authenticationRef: Named


class Fallback(Strict):
    failureThreshold: Annotated[int, Field(ge=1)]
    replicas: Count


class ScaledObject(Strict):
    scaleTargetRef: Named
    minReplicaCount: Count
    maxReplicaCount: Annotated[int, Field(ge=1)]
    pollingInterval: Annotated[int, Field(ge=1)]
    fallback: Fallback
    advanced: Advanced
    triggers: Annotated[list[Trigger], Field(min_length=1)]


class KeyReference(Strict):
    parameter: Literal["username", "password"]
    name: str
    key: str


class TriggerAuthentication(Strict):
    secretTargetRef: list[KeyReference]
    configMapTargetRef: list[KeyReference]


class Discovery(Strict):
    url: Annotated[str, Field(pattern="^https?://")]
    refreshInterval: Duration


class ScrapeConfig(Strict):
    honorLabels: bool
    scrapeInterval: Duration
    scrapeTimeout: Duration
    httpSDConfigs: Annotated[list[Discovery], Field(min_length=1)]


CUSTOM: dict[tuple[str, str], Any] = {
    ("keda.sh/v1alpha1", "ScaledObject"): ScaledObject,
    ("keda.sh/v1alpha1", "TriggerAuthentication"): TriggerAuthentication,
    ("monitoring.coreos.com/v1alpha1", "ScrapeConfig"): ScrapeConfig,
}


def field_in_json(metadata: dict[str, str], default: None = None) -> Any:
    """A field such as `from`, which Python cannot name so."""
    return dataclasses.field(default=default, metadata={"alias": metadata["json"]})


# lightkube-models belongs to the client lightkube, and takes these three from there.
TAKEN = {"dataclass": dataclasses.dataclass, "field": field_in_json, "DictMixin": object}


@cache
def kind_of(api_version: str, kind: str) -> TypeAdapter[Any]:
    """What an object of a kind must be; of a custom one, what its `spec` must be."""
    if custom := CUSTOM.get((api_version, kind)):
        return TypeAdapter(custom)
    sys.modules.setdefault("lightkube.core.schema", SimpleNamespace(**TAKEN))  # type: ignore[arg-type]
    group, _, version = api_version.rpartition("/")
    models = import_module(f"lightkube.models.{group.partition('.')[0] or 'core'}_{version}")
    model = getattr(models, kind)
    model.__pydantic_config__ = {"extra": "forbid", "strict": True}
    return TypeAdapter(model)
