"""Removal of passwords, keys and tokens from every text that leaves this process: errors, logs, tracebacks.

This module imports nothing of the project but the names of variables, since every error passes through it.
"""

from __future__ import annotations

import html
import json
import os
import re
from urllib.parse import quote, unquote

from sglang_indexcache.io.refusal import ADMIN_KEY_VARIABLE

KEY_VARIABLE = "SGLANG_API_KEY"
HIDDEN = "***"
_VARIABLES = (KEY_VARIABLE, ADMIN_KEY_VARIABLE, "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_SHORTEST = 4  # characters; a shorter secret would be found in everything
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*:/+)(\S*)")
_QUERY = re.compile(r"(?<=\S)\?[^\s?=&]+=\S*")
_HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{16,}")
_known: set[str] = set()


def keep_secret(*secrets: str) -> None:
    """Remove `secrets` from all texts from now on, however they are encoded there."""
    _known.update(form for secret in secrets for form in _forms(secret))


def redacted(text: str) -> str:
    """Return `text` without secrets: those of `keep_secret` and of the environment, user info and queries of URLs."""
    secrets = _known.union(*(_forms(os.environ.get(name, "")) for name in _VARIABLES))
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    text = _URL.sub(lambda found: found.group(1) + _plain(found.group(2)), text)
    return _HUB_TOKEN.sub(HIDDEN, _QUERY.sub("", text))


def _plain(rest: str) -> str:
    """Return `rest` of `scheme://` without user info, query and fragment; a password may hold any of `@/?#`."""
    return re.split(r"[?#]", rest.rpartition("@")[2], maxsplit=1)[0]


def _forms(secret: str) -> set[str]:
    """Return the ways in which a server, a log or an exception may write `secret`."""
    forms = {secret, unquote(secret), quote(secret, safe=""), json.dumps(secret)[1:-1], html.escape(secret)}
    return {form for form in forms if len(form) >= _SHORTEST}
