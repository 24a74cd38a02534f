"""The section `engines.openai`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from harness.experiment.fields import SHELL_NAME, LoadClients, Strict, Url


class OpenAISettings(Strict):
    """Any OpenAI-compatible server. The key is read from the environment variable that api_key_env names.

    url: the server's address.
    model: the model's name there.
    api_key_env: the environment variable that holds the key.
    vocab_size: token ids stay below it; null takes the model's.
    token_ids: the server takes `return_token_ids`, as vLLM does, so that prompts can quote its answers.
    clients: processes that send the load, where one is too slow for it; a session is all one's.
    """

    url: Url
    model: Annotated[str, Field(min_length=1)]
    api_key_env: str | None = None
    vocab_size: Annotated[int, Field(ge=512, le=10_000_000)] | None = None
    token_ids: bool = False
    clients: LoadClients = 1

    @field_validator("api_key_env")
    @classmethod
    def _a_name_not_a_key(cls, value: str | None) -> str | None:
        if value is not None and not SHELL_NAME.fullmatch(value):
            raise ValueError("api_key_env must name an environment variable, not hold the key itself")
        return value
