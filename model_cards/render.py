# SPDX-License-Identifier: Apache-2.0
"""
Renders the reference cards in this folder from their YAML files:

    python model_cards/render.py
"""

from pathlib import Path

from paco_trl.hub import load_reference_card, render_card


FOLDER = Path(__file__).resolve().parent


def main() -> None:
    for source in sorted(FOLDER.glob("*.yaml")):
        render_card(load_reference_card(source)).save(source.with_suffix(".md"))


if __name__ == "__main__":
    main()
