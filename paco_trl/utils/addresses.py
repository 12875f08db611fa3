# SPDX-License-Identifier: Apache-2.0
"""Addresses of servers."""

import ipaddress
import re
from urllib.parse import urlsplit


def is_loopback(host: str) -> bool:
    """Tell whether a host is this machine, by an address that no other machine reaches."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_base_url(base_url: str, key_argument: str) -> str:
    """Check the address of an OpenAI-compatible server; return its host."""
    if not isinstance(base_url, str) or re.search(r"[\s,;]", base_url):
        raise ValueError(
            f"`base_url` is {base_url!r}, but must be a single address. To use several GPUs, serve the model on all "
            "of them behind one address (`paco-trl serve-reward ... -- --data-parallel-size 4`, an option of `vllm "
            "serve`), or put a load balancer in front of several servers. With several nodes, start a server on each and "
            "give 'http://127.0.0.1:8000/v1': each process then queries the server of its node."
        )
    address = urlsplit(base_url)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise ValueError(f"`base_url` is {base_url!r}, but must be an address like 'http://127.0.0.1:8000/v1'.")
    if address.username or address.password or address.query:
        raise ValueError(
            "`base_url` has a user name, a password or a query (`?...`) in it, which would be logged. Use "
            f"`{key_argument}`."
        )
    return address.hostname


def refuse_address(path: str | None) -> None:
    """Refuse an image that a row of a dataset names by an address: its author would choose what is requested or read."""
    if path is not None and "://" in path:
        raise ValueError(
            f"{path!r} is an address, not the path of a file on this machine. Download it first, or let the loader of the "
            "dataset do it (`allow_remote_images=True`, `--allow_remote_images`), if you trust the dataset."
        )
