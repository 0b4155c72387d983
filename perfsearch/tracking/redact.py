"""Keeps secrets of the environment out of whatever is logged."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

MASK = "***"

_SECRET_NAME = re.compile(
    r"(SECRET|TOKEN|PASSW|PASSPHRASE|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|AUTH)", re.I
)
_SHORTEST = 6
"""Shorter values (``1``, ``true``) stand all over any text and are no secrets."""

_URL_PASSWORD = re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)")


class Redactor:
    """Masks the values of environment variables whose names tell of secrets.

    Args:
        environment: where secrets are looked up; the process's own by default.

    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        variables = os.environ if environment is None else environment
        values = {v for k, v in variables.items() if _SECRET_NAME.search(k) and len(v) >= _SHORTEST}
        # Paths and on/off words are settings, not secrets: masking them would blank out text.
        self._secrets = sorted(
            (v for v in values if not v.startswith("/") and not _is_common_word(v)),
            key=len,
            reverse=True,
        )

    def text(self, value: str) -> str:
        """The text with secrets, and passwords inside of URLs, masked."""
        for secret in self._secrets:
            value = value.replace(secret, MASK)
        return _URL_PASSWORD.sub(MASK, value)

    def data(self, value: bytes) -> bytes:
        """The same for a file's content, whatever its encoding."""
        for secret in self._secrets:
            value = value.replace(secret.encode(), MASK.encode())
        return value


def _is_common_word(value: str) -> bool:
    return value.isalpha() and value.islower() and len(value) < 10
