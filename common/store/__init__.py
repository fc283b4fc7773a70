"""Payloads that do not belong into a stream: files of the run, and claims to them in the entries."""

from tidemill.common.store.claims import NAMES_A_CLAIM, ClaimStore, resolved

__all__ = ["NAMES_A_CLAIM", "ClaimStore", "resolved"]
