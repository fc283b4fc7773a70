"""Payloads that do not belong into a stream: files of the run, and claims to them in the entries."""

from tidemill.common.store.claims import ClaimStore, resolved

__all__ = ["ClaimStore", "resolved"]
