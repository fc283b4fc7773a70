"""The whole stack on a real Docker engine with real Compose: `make compose-test`."""
