"""Checks that the servers which rewards name exist, and suit all rewards that ask them."""

from typing import TYPE_CHECKING

from tidemill.common.config.section import Rules, listed

if TYPE_CHECKING:
    from tidemill.common.config.run import RunConfig


def find_problems(run: "RunConfig") -> Rules:
    for name, reward in run.reward.named.items():
        wanted = reward.servers or reward.router
        field = f"{reward.kind}.servers" if reward.servers else "router"
        if wanted and wanted not in run.servers:
            yield (
                f"reward.rewards.{name}.{field} names {wanted!r}; the section servers has "
                f"{listed(run.servers)}"
            )
        if reward.judge and not run.servers[wanted].model:
            yield f"servers.{wanted} needs the name of its model: the judge {name} asks it"
    for name, server in run.servers.items():
        local = server.local
        asking = run.reward.asking(name)
        if local is None or local.command:
            continue
        # Servers that no reward names are asked by functions, through a router.
        kinds = {reward.kind for reward in asking.values()} or {"function"}
        heads = {reward.model.head for reward in asking.values() if reward.model}
        kind = next(iter(kinds))
        if len(kinds) > 1 or len(heads) > 1:
            yield (
                f"servers.{name}.local would have to be different servers for "
                f"{' and '.join(sorted(asking))}: give each a section of its own"
            )
        if kind in ("judge", "function") and local.engine == "transformers":
            yield f"servers.{name}.local.engine: what a {kind} asks is served by vllm"
        if kind != "model" and local.engine == "auto" and local.shares_rollout_gpus:
            yield f"servers.{name}.local: shares_rollout_gpus needs engine: transformers"
