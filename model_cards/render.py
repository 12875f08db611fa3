# SPDX-License-Identifier: Apache-2.0
"""
Renders the reference cards in this folder from their YAML files:

    python model_cards/render.py
"""

from pathlib import Path

import yaml

from paco_trl.hub import ImageModelCardData, JudgeCardData, render_card
from paco_trl.hub.card_data import card_data_from_dict
from paco_trl.hub.licenses import base_license


FOLDER = Path(__file__).resolve().parent


def load_reference_card(path: Path) -> ImageModelCardData | JudgeCardData:
    """
    Load a card of published weights: the fields of a card, and in `published` the recipe, the command, and the tables,
    results and notes of others. The license is the base model's.
    """
    card = card_data_from_dict(yaml.safe_load(path.read_text(encoding="utf-8")))
    card.license = base_license(card.base_model)
    return card


def main() -> None:
    for source in sorted(FOLDER.glob("*.yaml")):
        render_card(load_reference_card(source)).save(source.with_suffix(".md"))


if __name__ == "__main__":
    main()
