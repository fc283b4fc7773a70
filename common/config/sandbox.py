"""Code that is run to be scored: `reward.rewards.<name>.sandbox`."""

from common.config.section import Section


class SandboxConfig(Section):
    """How code of a completion is run."""
