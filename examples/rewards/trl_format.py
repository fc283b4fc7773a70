"""A format reward in TRL's signature: lists in, a list out. Prompts that are chats give chats."""

import re

PATTERN = re.compile(r"<think>.*?</think>\s*<answer>.*?</answer>\s*", re.DOTALL)


def format_reward(completions, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    return [1.0 if PATTERN.fullmatch(text) else 0.0 for text in texts]
