# SPDX-License-Identifier: Apache-2.0
"""A local web page on which people rank the candidates of ranking instances."""

from .server import make_app, serve_annotation


__all__ = ["make_app", "serve_annotation"]
