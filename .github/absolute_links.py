# SPDX-License-Identifier: Apache-2.0
"""Make the README's relative links absolute, in place: package indexes do not follow them."""

import configparser
import re
import sys
from pathlib import Path


IMAGE = re.compile(r"(!\[[^\]]*\]\()(?!https?:|#)([^)\s]+\))")
LINK = re.compile(r"(?<!!)(\[(?:!\[[^\]]*\]\([^)]*\)|[^\]])*\]\()(?!https?:|#)([^)\s]+\))")


def absolute(readme: str, repository: str) -> str:
    """Return a page of the root of a repository with absolute links."""
    readme = readme.replace("](../../", f"]({repository}/")  # GitHub's own pages, such as badges
    readme = IMAGE.sub(rf"\g<1>{repository}/raw/main/\g<2>", readme)
    return LINK.sub(rf"\g<1>{repository}/blob/main/\g<2>", readme)


if __name__ == "__main__":
    root = Path(__file__).parents[1]
    config = configparser.RawConfigParser()
    config.read(root / "setup.cfg", encoding="utf-8")
    if (url := config["metadata"].get("url")) is None:
        sys.exit("setup.cfg has no `url`, the address of the repository. Set it before a release.")
    path = root / "README.md"
    path.write_text(absolute(path.read_text(encoding="utf-8"), url), encoding="utf-8")
