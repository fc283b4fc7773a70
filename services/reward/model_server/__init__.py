"""A server for discriminative reward models on transformers, interchangeable with vLLM's pooling API."""
