"""Requests in OpenAI's API, through its own client: one for all replicas, so that they share connections.

The client's own retries are off: limits, other replicas, pauses and attempts are decided around it.
"""

import importlib.util
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common.config.reward_kinds import JudgeConfig
from common.errors import ConfigError
from common.run.replicas import key_for
from common.wire.codec import sendable
from services.reward.remote.faults import FaultKind, RemoteFault, status_fault
from services.reward.remote.judge import Message
from services.reward.remote.replica import Replica

if TYPE_CHECKING:
    from openai import AsyncOpenAI

NO_KEY = "none"


@dataclass(frozen=True, slots=True)
class Judgement:
    """The words of a judge, and what they cost."""

    words: str
    prompt_tokens: int
    completion_tokens: int

    @property
    def tokens(self) -> int:
        """All that count towards a limit."""
        return self.prompt_tokens + self.completion_tokens


def check_openai(name: str, config: JudgeConfig) -> None:
    """See that the client is installed and the key is there.

    Raises:
        ConfigError: one of them is not.
    """
    if importlib.util.find_spec("openai") is None:
        raise ConfigError(
            f"reward {name} is a judge, which needs the openai client: pip install 'tidemill[reward]'"
        )
    if config.api_key_env and not os.environ.get(config.api_key_env):
        raise ConfigError(
            f"reward {name}: the environment variable {config.api_key_env} (judge.api_key_env) is not set; "
            "every machine with reward workers needs it"
        )


class OpenAIRequests:
    """Sends a judge's requests. Opens its connections with the first one."""

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self._clients: dict[str, AsyncOpenAI] = {}
        self._first: AsyncOpenAI | None = None

    async def send(self, replica: Replica, messages: list[Message]) -> Judgement:
        """One request, without limits of its own.

        Raises:
            RemoteFault: there was no answer, or none of this API.
        """
        import openai

        try:
            answer = await self._create(self._client(replica), messages)
        except openai.APIStatusError as error:
            raise status_fault(
                replica.origin, error.status_code, error.response.headers, error.message
            ) from error
        except openai.APIResponseValidationError as error:
            raise _garbage(replica, str(error)) from error
        except openai.APIError as error:
            cause = error.__cause__ or error
            reason = str(cause) or type(cause).__name__
            raise RemoteFault(FaultKind.CONNECTION, f"no answer from {replica.origin}: {reason}") from error
        except (ValueError, TypeError, AttributeError) as error:  # the client could not read it
            raise _garbage(replica, str(error)) from error
        return self._read(replica, answer)

    async def close(self) -> None:
        """Close all connections."""
        if self._first is not None:
            await self._first.close()

    async def _create(self, client: "AsyncOpenAI", messages: list[Message]) -> Any:
        config = self._config
        options: dict[str, Any] = {
            "model": config.model_name,
            "temperature": config.temperature,
            "max_tokens": config.max_tokens,
            "extra_body": config.extra_body or None,
        }
        if config.api == "completions":
            return await client.completions.create(prompt=messages[-1]["content"], **options)
        return await client.chat.completions.create(messages=messages, **options)  # type: ignore[arg-type]

    def _client(self, replica: Replica) -> "AsyncOpenAI":
        url = replica.url
        if url not in self._clients:
            import openai

            if self._first is None:
                # Unbounded, because the limits are elsewhere: a pool of its own would be another queue.
                http = openai.DefaultAsyncHttpxClient(timeout=None, limits=_no_limits())
                self._first = openai.AsyncOpenAI(
                    base_url=url, api_key=NO_KEY, max_retries=0, timeout=None, http_client=http
                )
            key = key_for(replica.is_registered, self._config.api_key_env) or NO_KEY
            self._clients[url] = self._first.with_options(base_url=url, api_key=key)
        return self._clients[url]

    def _read(self, replica: Replica, answer: Any) -> Judgement:
        """Take nothing for granted: the client checks no types."""
        try:
            choice = answer.choices[0]
            words = choice.text if self._config.api == "completions" else choice.message.content
            if words is None:
                words = ""  # a model that said nothing, or refused: no verdict, but an answer
            usage = answer.usage
            counts = [int(usage.prompt_tokens), int(usage.completion_tokens)] if usage else [0, 0]
        except (AttributeError, LookupError, TypeError, ValueError):
            raise _garbage(replica, str(answer)) from None
        if not isinstance(words, str):
            raise _garbage(replica, f"choices[0] holds {type(words).__name__} in place of text")
        return Judgement(sendable(words), *counts)


def _garbage(replica: Replica, said: str) -> RemoteFault:
    shown = " ".join(said.split())[:200]
    return RemoteFault(FaultKind.GARBAGE, f"{replica.origin} answered what is no completion: {shown}")


def _no_limits() -> Any:
    import httpx2  # what the openai client is built on

    return httpx2.Limits(max_connections=None, max_keepalive_connections=256)
