"""The run's configuration: one YAML file, one model, one section for each service."""

from tidemill.common.config.algorithm import AlgorithmConfig as AlgorithmConfig
from tidemill.common.config.data import DataConfig as DataConfig
from tidemill.common.config.loading import load_config as load_config
from tidemill.common.config.loading import load_recorded as load_recorded
from tidemill.common.config.loading import override_config as override_config
from tidemill.common.config.loading import parse_config as parse_config
from tidemill.common.config.loading import parse_recorded as parse_recorded
from tidemill.common.config.reward import NamedRewardConfig as NamedRewardConfig
from tidemill.common.config.reward import RewardConfig as RewardConfig
from tidemill.common.config.reward import RewardLimits as RewardLimits
from tidemill.common.config.run import ArchiveConfig as ArchiveConfig
from tidemill.common.config.run import ModelConfig as ModelConfig
from tidemill.common.config.run import RunConfig as RunConfig
from tidemill.common.config.run import StreamsConfig as StreamsConfig
from tidemill.common.config.run import is_path as is_path
from tidemill.common.config.trainer import OptimizerConfig as OptimizerConfig
from tidemill.common.config.trainer import TrainerConfig as TrainerConfig
