"""What all sections of the experiment file share: strict models, their numbers, URLs, and no secrets."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

# What each pattern of a field asks for, in words: a message that shows the pattern helps few.
PATTERN_WORDS = {
    r"^[a-z0-9][a-z0-9_-]{0,63}$": "use only a-z, 0-9, _ and -, at most 64 of them, e.g. my-run",
    r"^[a-z0-9][a-z0-9_-]{0,31}$": "use only a-z, 0-9, _ and -, at most 32 of them, e.g. policy-1",
    r"^[a-z0-9]{2,16}$": "use a file system's name, e.g. ext4",
    r"^[A-Za-z0-9.-]+:[0-9]{1,5}$": "write HOST:PORT, without a user or a password, e.g. 10.0.0.7:6379",
    r"^[A-Za-z_][A-Za-z0-9_]*$": "name an environment variable that holds it, not the secret itself",
    r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$": "use a bucket's name: 3 to 63 of a-z, 0-9, - and .",
    r"^[a-z0-9-]{1,32}$": "use a region's name, e.g. us-east-1",
    r"^https?://": "start it with http:// or https://",
}


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


# YAML has lists where the models, which are frozen, have tuples.
FROM_LIST = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
Positive = Annotated[int, Field(ge=1, le=2**40)]
Share = Annotated[float, Field(ge=0.0, le=1.0, strict=False)]
PositiveFloat = Annotated[float, Field(gt=0.0, le=1e9, strict=False)]
# Processes that send a load over HTTP.
LoadClients = Annotated[int, Field(ge=1, le=64)]


SECRET = re.compile(r"api[-_]?key|token$|secret|passw|access[-_]?key|credential", re.IGNORECASE)


SHELL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def without_secrets(text: str, what: str) -> str:
    """The text, unless it seems to hold a secret: configurations are kept in manifests and shown in reports."""
    if SECRET.search(text):
        raise ValueError(f"{what} seems to hold a secret; export it instead: engines inherit our environment")
    return text


def plain_url(url: str) -> str:
    if "@" in url:
        raise ValueError("a URL with a user or password in it; leave them out: URLs are kept in manifests")
    return url


Url = Annotated[str, Field(pattern=r"^https?://"), AfterValidator(plain_url)]


# Cores of one process, or a list of them for each of several instances.
_ForEach = BeforeValidator(
    lambda value: (
        tuple(tuple(one) if isinstance(one, list) else one for one in value) if isinstance(value, list) else value
    )
)


class Cores(Strict):
    """CPU cores for the engine, and for the cache server and the load loop. None: not pinned.

    engine: cores of the engine's processes; of several instances, one list for all, or a list of lists, one for each.
    client: cores of the cache server and of the load loop, with all of its processes.
    """

    engine: Annotated[tuple[int, ...] | tuple[tuple[int, ...], ...] | None, _ForEach] = None
    client: Annotated[tuple[int, ...] | None, FROM_LIST] = None

    def of_instance(self, number: int) -> tuple[int, ...] | None:
        """The engine's cores of one instance. Lists that are too few begin again."""
        each = self._lists
        return each[number % len(each)] if each else self.of_engines

    @property
    def of_engines(self) -> tuple[int, ...] | None:
        """The engine's cores of all instances."""
        if self.engine is None:
            return None
        each = (one if isinstance(one, tuple) else (one,) for one in self.engine)
        return tuple(sorted({core for cores in each for core in cores}))

    @property
    def firsts(self) -> tuple[int, ...]:
        """The first core of each instance, and that of the client: a look at every core of many takes too long."""
        lists = self._lists or [self.of_engines or ()]
        return tuple(dict.fromkeys(cores[0] for cores in (*lists, self.client or ()) if cores))

    @property
    def _lists(self) -> list[tuple[int, ...]]:
        """The engine's cores of each instance; none where one list is for all."""
        return [one for one in self.engine or () if isinstance(one, tuple)]
