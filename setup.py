# SPDX-License-Identifier: Apache-2.0
"""The description for package indexes, which do not follow the README's relative links. All else is in setup.cfg."""

import configparser
import re
from pathlib import Path

from setuptools import setup


ROOT = Path(__file__).parent
IMAGE = re.compile(r"!\[([^\]]*)\]\((?!https?:|#)([^)\s]+)\)")
LINK = re.compile(r"(?<!!)\[((?:!\[[^\]]*\]\([^)]*\)|[^\]])*)\]\((?!https?:|#)([^)\s]+)\)")


def description(readme: str, repository: str | None) -> str:
    """Make relative links absolute or, where the repository has no address, leave links and images out."""
    if repository is None:
        return LINK.sub(r"\1", IMAGE.sub("", readme))
    readme = readme.replace("](../../", f"]({repository}/")  # GitHub's own pages, such as badges
    readme = IMAGE.sub(rf"![\1]({repository}/raw/main/\2)", readme)
    return LINK.sub(rf"[\1]({repository}/blob/main/\2)", readme)


if __name__ == "__main__":
    config = configparser.RawConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    setup(long_description=description(readme, config["metadata"].get("url")))
