"""The settings of the service, and how they reach its processes."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field

VARIABLE = "PROXYMETRIC_SERVE"
"""environment variable that hands the settings to the processes of the service"""
LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True)
class Settings:
    """Settings of the service.

    Args:
        index: the folder of the index.
        run: the run that made it; None: as the index says.
        device: where the model computes.
        host: the address that the service listens at.
        port: its port.
        hosts: names by which browsers may call the service, besides those of this machine; `*` allows any.
        token: the bearer token that requests must carry; empty: none.
        write_token: the bearer token with which the index may be changed; empty: it cannot be changed.
        workers: number of processes; they share the index.
        max_bytes: limit on the bytes of an uploaded image.
        max_pixels: limit on the pixels of an uploaded image.
        max_pending: searches that may wait or run in a process; further ones are answered with 429.
        max_batch: searches that are embedded in one forward pass.
        max_results: limit on `k`.
        seconds: time after which a search is answered with 504.
        write_seconds: time that a change waits for another process that is changing the index.
        receive_seconds: time that a client has to send a request.
        decode_seconds: time after which the process that decodes an image is ended; less than a stop may take.

    Raises:
        ValueError: a number is out of range, or the two tokens are equal.

    Example:
        >>> Settings("shop.index", max_pending=0)
        Traceback (most recent call last):
        ValueError: max_pending: got 0, expected at least 1
    """

    index: str
    run: str | None = None
    device: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    hosts: tuple[str, ...] = ()
    token: str = field(default="", repr=False)
    write_token: str = field(default="", repr=False)
    workers: int = 1
    max_bytes: int = 20_000_000
    max_pixels: int = 50_000_000
    max_pending: int = 64
    max_batch: int = 32
    max_results: int = 100
    seconds: float = 30.0
    write_seconds: float = 10.0
    receive_seconds: float = 20.0
    decode_seconds: float = 10.0

    def __post_init__(self) -> None:
        for name in ("workers", "max_bytes", "max_pixels", "max_pending", "max_batch", "max_results"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected at least 1")
        for name in ("seconds", "write_seconds", "receive_seconds", "decode_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: got {getattr(self, name):g}, expected more than 0")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port: got {self.port}, expected a number in 0..65535")
        if self.write_token and self.write_token == self.token:
            raise ValueError("write_token: got the token with which the index is read, expected another one")

    def allows_host(self, header: str) -> bool:
        """Return whether the `Host` header of a request names this service.

        A page of another site can make a browser call 127.0.0.1 under a name of its own (DNS rebinding); such calls
        have that name in their header.

        Example:
            >>> settings = Settings("shop.index", hosts=("search.example.org",))
            >>> [settings.allows_host(name) for name in ("localhost:8000", "search.example.org", "evil.example")]
            [True, True, False]
        """
        name = header.rsplit(":", 1)[0] if not header.endswith("]") else header
        own_names = () if self.host in ("0.0.0.0", "::") else (self.host, f"[{self.host}]")
        return "*" in self.hosts or name.lower() in {*LOCAL_HOSTS, *own_names, *map(str.lower, self.hosts)}

    def to_environment(self) -> None:
        """Hand the settings to processes that this process starts."""
        os.environ[VARIABLE] = json.dumps(asdict(self))

    @classmethod
    def from_environment(cls) -> Settings:
        """Return the settings that the process that started this one handed over."""
        content = json.loads(os.environ[VARIABLE])
        return cls(**content | {"hosts": tuple(content["hosts"])})
