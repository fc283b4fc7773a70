"""Payloads that are too large for a stream: files of the run, with claims to them in the entries."""

from tidemill.common.store.claims import NAMES_A_CLAIM as NAMES_A_CLAIM
from tidemill.common.store.claims import ClaimStore as ClaimStore
from tidemill.common.store.claims import resolved as resolved
