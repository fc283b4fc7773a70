"""A discriminative reward model: `reward.rewards.<name>.model`."""

from common.config.section import Section


class RewardModelConfig(Section):
    """A reward model behind a server."""
