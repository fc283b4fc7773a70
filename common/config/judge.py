"""A language model as a judge: `reward.rewards.<name>.judge`."""

from common.config.section import Section


class JudgeConfig(Section):
    """A judge behind an OpenAI-compatible server."""
