"""The run's configuration: one YAML file, one model, one section for each service."""

from tidemill.common.config.algorithm import AlgorithmConfig
from tidemill.common.config.changes import FieldChange, changed_fields
from tidemill.common.config.data import CurriculumConfig, DataConfig, SourceConfig
from tidemill.common.config.loading import load_config, load_recorded, override_config, parse_config
from tidemill.common.config.reward import NamedRewardConfig, RewardConfig, RewardLimits
from tidemill.common.config.reward_kinds import JudgeConfig, RewardModelConfig, SandboxConfig, TeacherConfig
from tidemill.common.config.rollout import RolloutConfig, SamplingConfig
from tidemill.common.config.run import (
    ArchiveConfig,
    ExpectConfig,
    ModelConfig,
    RunConfig,
    StreamsConfig,
    is_path,
)
from tidemill.common.config.servers import LocalServersConfig, ServersConfig
from tidemill.common.config.trainer import EvaluationConfig, OptimizerConfig, TrainerConfig

__all__ = [
    "AlgorithmConfig",
    "ArchiveConfig",
    "CurriculumConfig",
    "DataConfig",
    "EvaluationConfig",
    "ExpectConfig",
    "FieldChange",
    "JudgeConfig",
    "LocalServersConfig",
    "ModelConfig",
    "NamedRewardConfig",
    "OptimizerConfig",
    "RewardConfig",
    "RewardLimits",
    "RewardModelConfig",
    "RolloutConfig",
    "RunConfig",
    "SamplingConfig",
    "SandboxConfig",
    "ServersConfig",
    "SourceConfig",
    "StreamsConfig",
    "TeacherConfig",
    "TrainerConfig",
    "changed_fields",
    "is_path",
    "load_config",
    "load_recorded",
    "override_config",
    "parse_config",
]
