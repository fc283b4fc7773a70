"""Teachers have the policy's tokenizer: they are sent token ids, and other ids would be other words."""

from pathlib import Path

from tidemill.common.config import RunConfig
from tidemill.common.errors import ConfigError
from tidemill.services.console.check.model_folder import read_json

TOKENIZER = "tokenizer.json"


def check_teachers(config: RunConfig) -> None:
    """Compare vocabularies, where the folders of both models are on this machine.

    Raises:
        ConfigError: a teacher's has other ids. The message names the first token that differs.
    """
    own = _vocabulary(config.model.path)
    for name, reward in config.reward.named.items():
        served = config.servers[reward.servers] if reward.teacher else None
        if served is None or served.local is None or not own or not (theirs := _vocabulary(served.model)):
            continue
        # A teacher may know more tokens: the policy never samples those.
        wrong = [(number, token) for token, number in own.items() if theirs.get(token) != number]
        if wrong:
            number, token = min(wrong)
            there = f"is {theirs[token]}" if token in theirs else "does not exist"
            raise ConfigError(
                f"reward.rewards.{name}: the teacher {served.model} has another tokenizer than model.path, "
                f"{config.model.path}: token {token!r} is {number} in the policy's and {there} in the "
                f"teacher's; {len(wrong):,} of {len(own):,} differ. A teacher scores token ids: take one of "
                "the policy's family"
            )


def _vocabulary(model: str) -> dict[str, int]:
    """Ids by token, special ones included; empty where the folder does not say."""
    file = Path(model) / TOKENIZER
    if not file.is_file():
        return {}
    tree = read_json(file)
    vocabulary = (tree.get("model") or {}).get("vocab")
    known = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    return known | {token["content"]: token["id"] for token in tree.get("added_tokens") or ()}
