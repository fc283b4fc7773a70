"""Code that all Tidemill services share: wire format, streams, configuration, lifecycle.

Imports neither torch nor vllm at import time, so that command lines answer at once and reward
consumers stay small.
"""
