"""The answer of a completion that marks it by `<answer>`, as prompts after DeepSeek-R1 ask for."""

START = "<answer>"
END = "</answer>"


def answer_tag(text: str) -> str:
    """What stands in the last `<answer>`; the text itself where there is none."""
    _, start, answer = text.rpartition(START)
    return answer.partition(END)[0] if start else text
