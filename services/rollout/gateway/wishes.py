"""What a request asks of sampling beyond the run's own: forms of the answer, forced calls, parameters.

Answers are sampled freely, by `rollout.sampling`, as they are trained. Clients that ask for a form validate
what they get and ask again, so their wishes are counted and not obeyed; where the config says so, refused.
"""

from collections.abc import Mapping
from typing import Any

from tidemill.services.rollout.gateway.dialogue import object_in, tool_choice_of

GUIDED = (
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_decoding_backend",
    "structured_outputs",
    "output_format",
)
"""Fields by which vLLM and older clients of Anthropic ask for a form."""
READ = frozenset(
    [
        *("model", "messages", "tools", "tool_choice", "stream", "stream_options", "n", "stop", "functions"),
        *("max_tokens", "max_completion_tokens", "max_output_tokens", "stop_sequences", "response_format"),
        *("prompt", "best_of", "echo", "suffix", "continue_final_message", "add_generation_prompt"),
        *("input", "instructions", "previous_response_id", "conversation", "background", "text", "system"),
        *("output_config", "logprobs"),
        *GUIDED,
    ]
)
"""Fields that are obeyed, refused, or counted as wishes."""
MEANINGLESS = frozenset(
    [
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "include"),
        *("prompt_cache_retention", "betas", "truncation", "cache_control"),
    ]
)
"""Fields that change no answer."""


def wishes_in(body: Mapping[str, Any]) -> list[str]:
    """The fields by which the request asks for a form of the answer, or for a call."""
    forms = {
        "response_format": object_in(body, "response_format"),
        "text.format": object_in(object_in(body, "text"), "format"),
        "output_config.format": object_in(object_in(body, "output_config"), "format"),
    }
    wishes = [name for name, form in forms.items() if form.get("type", "text") != "text"]
    wishes += [name for name in GUIDED if body.get(name)]
    return wishes + (["tool_choice"] if tool_choice_of(body) not in ("auto", "none") else [])


def ignored_in(body: Mapping[str, Any]) -> list[str]:
    """The fields that would change an answer elsewhere, and do nothing here."""
    return sorted(name for name in body.keys() - READ - MEANINGLESS if body[name] is not None)
