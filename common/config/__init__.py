"""The run's configuration: one YAML file, one model, one section for each service."""

from common.config.algorithm import AlgorithmConfig
from common.config.archive import ArchiveConfig
from common.config.changes import Change, changed_fields
from common.config.data import DataConfig, ModelConfig, is_path
from common.config.judge import JudgeConfig
from common.config.loading import load_config, override_config, parse_config
from common.config.named_reward import NamedRewardConfig, RewardCacheConfig, RewardLimits
from common.config.recorded import load_recorded, parse_recorded
from common.config.reward import RewardConfig
from common.config.reward_model import RewardModelConfig
from common.config.rollout import RolloutConfig, SamplingConfig
from common.config.run import ExpectConfig, RunConfig, StreamsConfig
from common.config.sandbox import SandboxConfig
from common.config.trainer import EvaluationConfig, OptimizerConfig, TrainerConfig

__all__ = [
    "AlgorithmConfig",
    "ArchiveConfig",
    "Change",
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
    "StreamsConfig",
    "TrainerConfig",
    "changed_fields",
    "is_path",
    "load_config",
    "load_recorded",
    "override_config",
    "parse_config",
    "parse_recorded",
]
