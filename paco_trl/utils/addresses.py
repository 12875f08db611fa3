# SPDX-License-Identifier: Apache-2.0
"""Addresses of servers."""

import ipaddress
import re
from urllib.parse import urlsplit


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine, by an address that no other machine reaches."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_base_url(base_url: str) -> str:
    """Check the address of an OpenAI-compatible server; return its host."""
    address = urlsplit(base_url) if isinstance(base_url, str) and not re.search(r"[\s,;]", base_url) else None
    if address is None or address.scheme not in ("http", "https") or not address.hostname:
        raise ValueError(
            f"The address of the server is {base_url!r}, but must be one like 'http://127.0.0.1:8000/v1', also of "
            "several GPUs (`--data-parallel-size` of vLLM)."
        )
    if address.username or address.password or address.query:
        raise ValueError(
            "The address of the server has a user name, a password or a query (`?...`), which would be logged. Pass "
            "the key in its own argument."
        )
    return address.hostname
