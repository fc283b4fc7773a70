"""Weights without a tensor library: the digest of a version, delta files, and safetensors as plain bits."""
