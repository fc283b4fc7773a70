"""An address for each session of an agent program, like those of OpenAI and Anthropic."""
