"""The run's configuration: one YAML file, one model, one section for each service."""

from common.config.data import DataConfig, ModelConfig
from common.config.loading import load_config, override_config, parse_config
from common.config.reward import RewardConfig
from common.config.rollout import RolloutConfig, SamplingConfig
from common.config.run import ExpectConfig, RunConfig, StreamsConfig
from common.config.trainer import AlgorithmConfig, EvaluationConfig, OptimizerConfig, TrainerConfig

__all__ = [
    "AlgorithmConfig",
    "DataConfig",
    "EvaluationConfig",
    "ExpectConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "SamplingConfig",
    "StreamsConfig",
    "TrainerConfig",
    "load_config",
    "override_config",
    "parse_config",
]
