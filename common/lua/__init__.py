"""Lua scripts: the units that must be atomic. Loaded by `common.broker`, called by `common.streams`."""
