"""Lua scripts: the units that must be atomic. Loaded by `common.redis.broker`, called by `common.streams`."""
