"""Payloads that are too large for a stream: files of the run, with claims to them in the entries."""

from tidemill.common.store.claims import ClaimStore as ClaimStore
from tidemill.common.store.claims import resolved as resolved
