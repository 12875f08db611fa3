# SPDX-License-Identifier: Apache-2.0
"""The notebook of the miniature: what is committed, and a run of all of its cells."""

import io
import re
from base64 import b64decode

import numpy as np
import pytest
from PIL import Image

from launching import ROOT


NOTEBOOK = ROOT / "examples/notebooks/paco_trl_miniature.ipynb"
# Cells that show numbers
FOUND = {
    "labels": r"labels that are true: \{'Yes': ([\d.]+), 'No': ([\d.]+)\}",
    "untrained": r"untrained judge: ([\d.]+)% ranked correctly",
    "trained": r"\ntrained judge: ([\d.]+)% ranked correctly",
    "consistency": r"same figure: ([\d.]+)% before, ([\d.]+)% after \(95% interval ([+-][\d.]+) to ([+-][\d.]+)\)",
    "prompt": r"as the prompt says: ([\d.]+)% before, ([\d.]+)% after",
}


def outputs_of(notebook) -> tuple[dict[str, tuple[float, ...]], list[np.ndarray]]:
    """The numbers and the images that the cells show."""
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    text = "".join("".join(output["text"]) for output in outputs if output.get("name") == "stdout")
    images = [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    matches = {name: re.search(pattern, text) for name, pattern in FOUND.items()}
    assert all(matches.values()), text
    numbers = {name: tuple(map(float, match.groups())) for name, match in matches.items()}
    decoded = [np.asarray(Image.open(io.BytesIO(b64decode("".join(image)))).convert("RGB")) for image in images]
    return numbers, decoded


@pytest.mark.slow
def test_all_cells_run(tmp_path):
    """With so little data that nothing is learned."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(NOTEBOOK, 4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    (parameters,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    parameters.source += f"\nsettings, output_dir = sizes.SHORT, Path({str(tmp_path)!r})"
    folder = {"metadata": {"path": str(NOTEBOOK.parent)}}
    nbclient.NotebookClient(notebook, timeout=300, resources=folder).execute()
    numbers, images = outputs_of(notebook)
    assert all(0 <= value <= 100 for values in numbers.values() for value in values[:2])
    assert numbers["labels"][1] > 0.5  # two sets rarely show the same figure
    assert len(images) == 3 and all(image.std() > 10 for image in images)
    assert {path.name for path in tmp_path.iterdir()} >= {"dataset", "judge", "toy-flux-lora", "before", "after"}
    assert (tmp_path / "toy-flux-lora" / "pytorch_lora_weights.safetensors").is_file()
