# SPDX-License-Identifier: Apache-2.0
"""The paper, for cards."""

import textwrap


PAPER = {
    "title": "PaCo-RL: Advancing Reinforcement Learning for Consistent Image Generation with Pairwise Reward Modeling",
    "id": "2512.04784",
    # docstyle-ignore
    "citation": textwrap.dedent("""\
        @article{pacorl2025,
            title        = {{PaCo-RL: Advancing Reinforcement Learning for Consistent Image Generation with Pairwise Reward Modeling}},
            year         = 2025,
            eprint       = {arXiv:2512.04784},
        }"""),
}
