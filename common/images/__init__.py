"""Pictures of prompts: taken at the door, stored once, made into tokens and tensors by one processor."""
