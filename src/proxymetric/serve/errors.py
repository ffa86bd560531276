"""Errors of the service: a status, a code for programs, and a sentence for people."""

from __future__ import annotations

import json
from typing import Any

CODES = {
    400: "bad_request",
    401: "unauthorized",
    403: "cross_site",
    404: "not_found",
    405: "method_not_allowed",
    408: "too_slow",
    413: "too_large",
    415: "unsupported_type",
    421: "wrong_host",
    422: "bad_value",
    429: "busy",
    500: "internal",
    503: "stopping",
    504: "timeout",
    507: "not_saved",
}
"""status -> code"""


class Refused(Exception):
    """A request that is answered with an error.

    Args:
        status: the HTTP status, a key of `CODES`.
        message: a sentence.
        code: a code for programs; None: that of the status.
        headers: further headers of the answer.
    """

    def __init__(
        self, status: int, message: str, code: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code or CODES[status]
        self.headers = headers or {}

    def content(self) -> dict[str, Any]:
        """Return the body of the answer.

        Example:
            >>> Refused(429, "searches: got more than 64 at a time, expected fewer").content()["error"]["code"]
            'busy'
        """
        return {"error": {"code": self.code, "message": self.message}}

    def body(self) -> bytes:
        """Return the body of the answer as JSON."""
        return json.dumps(self.content()).encode()
