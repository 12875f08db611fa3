# SPDX-License-Identifier: Apache-2.0
"""Addresses of servers."""

import ipaddress


def is_loopback(host: str) -> bool:
    """
    Whether a host is this machine, by an address that no other machine reaches.

    Args:
        host (`str`):
            Name or address.

    Returns:
        `bool`.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
