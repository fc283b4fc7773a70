"""The run's configuration: one YAML file, one model, one section for each service."""

from common.config.algorithm import AlgorithmConfig
from common.config.data import CurriculumConfig, DataConfig, SourceConfig
from common.config.loading import load_config, override_config, parse_config
from common.config.recorded import Change, changed_fields, load_recorded, parse_recorded
from common.config.reward import NamedRewardConfig, RewardCacheConfig, RewardConfig, RewardLimits
from common.config.reward_kinds import JudgeConfig, RewardModelConfig, SandboxConfig
from common.config.reward_teacher import TeacherConfig
from common.config.rollout import RolloutConfig, SamplingConfig
from common.config.run import (
    ArchiveConfig,
    ExpectConfig,
    ModelConfig,
    RunConfig,
    StreamsConfig,
    is_path,
)
from common.config.trainer import EvaluationConfig, OptimizerConfig, TrainerConfig

__all__ = [
    "AlgorithmConfig",
    "ArchiveConfig",
    "Change",
    "CurriculumConfig",
    "DataConfig",
    "EvaluationConfig",
    "ExpectConfig",
    "JudgeConfig",
    "ModelConfig",
    "NamedRewardConfig",
    "OptimizerConfig",
    "RewardCacheConfig",
    "RewardConfig",
    "RewardLimits",
    "RewardModelConfig",
    "RolloutConfig",
    "RunConfig",
    "SamplingConfig",
    "SandboxConfig",
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
    "parse_recorded",
]
