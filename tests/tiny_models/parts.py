# SPDX-License-Identifier: Apache-2.0
"""Configs and chat templates of tiny models."""

from pathlib import Path
from typing import Any

import yaml


CONFIGS: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("configs.yaml").read_text(encoding="utf-8")
)


def read_chat_template(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8").strip()
