# SPDX-License-Identifier: Apache-2.0
"""Cite TRL and the base model."""

import textwrap

from ..utils.names import public_name


# docstyle-ignore
TRL = textwrap.dedent("""\
    @software{vonwerra2020trl,
        title        = {{TRL: Transformers Reinforcement Learning}},
        author       = {von Werra, Leandro and Belkada, Younes and Tunstall, Lewis and Beeching, Edward and Thrush, Tristan and Lambert, Nathan and Huang, Shengyi and Rasul, Kashif and Gallou{\\'e}dec, Quentin},
        year         = 2020,
        license      = {Apache-2.0},
        url          = {https://github.com/huggingface/trl},
    }""")


def _arxiv(key: str, title: str, year: int, number: str) -> str:
    # docstyle-ignore
    return textwrap.dedent(f"""\
        @article{{{key},
            title        = {{{{{title}}}}},
            year         = {year},
            eprint       = {{arXiv:{number}}},
        }}""")


# By a part of the model name; the first match counts
_OF_BASES = {
    "FLUX.1-Kontext": _arxiv(
        "fluxkontext2025",
        "FLUX.1 Kontext: Flow Matching for In-Context Image Generation and Editing in Latent Space",
        2025,
        "2506.15742",
    ),
    "FLUX.1": textwrap.dedent("""\
        @misc{flux2024,
            title        = {FLUX},
            author       = {{Black Forest Labs}},
            year         = 2024,
            howpublished = {\\url{https://github.com/black-forest-labs/flux}},
        }"""),
    "Qwen-Image": _arxiv("qwenimage2025", "Qwen-Image Technical Report", 2025, "2508.02324"),
    "Qwen2.5-VL": _arxiv("qwen25vl2025", "Qwen2.5-VL Technical Report", 2025, "2502.13923"),
    "stable-diffusion-3": _arxiv(
        "sd32024", "Scaling Rectified Flow Transformers for High-Resolution Image Synthesis", 2024, "2403.03206"
    ),
}


def base_citation(base: str) -> str | None:
    """Return the BibTeX entry of a base model (Hub id or directory), `None` for an unknown one."""
    name = public_name(base).lower()
    return next((citation for part, citation in _OF_BASES.items() if part.lower() in name), None)
