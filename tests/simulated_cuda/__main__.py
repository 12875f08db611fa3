# SPDX-License-Identifier: Apache-2.0
"""
Run a Python program on simulated GPUs: `python tests/simulated_cuda -m pytest tests/test_gpu.py`.

`SIMULATED_CUDA_DEVICES` is their number (1), `SIMULATED_CUDA_MEMORY_MB` the memory of each (80 GiB). Libraries are built
once, into `build/simulated_cuda/`. Where that is impossible the reason is printed, and nothing is run.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path


HERE = Path(__file__).resolve().parent
SOURCES = ("runtime", "operators")


def cuda_headers() -> Path | None:
    """Return a directory with the headers of CUDA's runtime; Triton, which torch's CUDA build requires, has them."""
    triton = find_spec("triton")
    places = [Path(triton.origin).parent / "backends/nvidia/include"] if triton and triton.origin else []
    places.append(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include")
    return next((place for place in places if (place / "cuda_runtime_api.h").exists()), None)


def missing() -> str | None:
    """Return what prevents the simulation, or `None`."""
    torch = find_spec("torch")  # not imported: the runtime must be there first
    if torch is None or not (Path(torch.origin).parent / "lib" / "libtorch_cuda.so").exists():
        return "PyTorch here is not its CUDA build for Linux"
    if shutil.which("g++") is None:
        return "there is no g++, which builds it"
    if cuda_headers() is None:
        return "neither Triton nor CUDA_HOME has the headers of CUDA"
    return None


def build() -> dict[str, str]:
    """Build the libraries unless this version is there, and return the environment of a process with the devices."""
    torch = Path(find_spec("torch").origin).parent
    contents = [(HERE / f"{name}.cpp").read_bytes() for name in SOURCES]
    contents += [Path(__file__).read_bytes(), (torch / "version.py").read_bytes()]
    directory = HERE.parents[1] / "build" / "simulated_cuda" / hashlib.sha256(b"".join(contents)).hexdigest()[:16]
    directory.mkdir(parents=True, exist_ok=True)
    include, lib = torch / "include", torch / "lib"
    options = {
        # It stands for the driver's library too
        "runtime": ["-std=c++17", f"-I{cuda_headers()}", "-Wl,-soname,libcuda.so.1", "-ldl"],
        "operators": ["-std=c++20", f"-I{include}", f"-I{include / 'torch/csrc/api/include'}", f"-L{lib}"]
        + ["-Wl,--no-as-needed", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{lib}"],
    }
    libraries = {name: directory / f"lib{name}.so" for name in SOURCES}
    for name, library in libraries.items():
        if library.exists():
            continue
        draft = library.with_suffix(f".{os.getpid()}")  # two that build at once do not read half a library
        command = ["g++", "-shared", "-fPIC", "-O1", "-w", str(HERE / f"{name}.cpp"), *options[name]]
        subprocess.run([*command, "-o", str(draft)], check=True)
        draft.replace(library)
    paths = [str(HERE / "startup"), os.environ.get("PYTHONPATH", "")]
    return {
        "LD_PRELOAD": str(libraries["runtime"]),
        "SIMULATED_CUDA_OPERATORS": str(libraries["operators"]),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TRITON_INTERPRET": "1",
        "TORCH_COMPILE_DISABLE": "1",  # Triton compiles for a real driver
    }


def main() -> None:
    if len(sys.argv) == 1:
        sys.exit(__doc__)
    if (reason := missing()) is not None:
        print(f"Skipped, no simulated GPU: {reason}.")
        return
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], os.environ | build())


if __name__ == "__main__":
    main()
