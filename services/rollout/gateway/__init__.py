"""An address for each session of an agent program, with the APIs of OpenAI and Anthropic."""
