"""Packaging. Ranges live here; the exact versions that the tests run on are in requirements.txt.

NVIDIA's apex is deliberately not listed: it is not on PyPI, where ``apex`` is another project. It is detected at run
time, and everything runs without it.
"""

from pathlib import Path

from setuptools import Extension, find_packages, setup

# Optional: sketches and comparisons are the same without a compiler, and slower. No contraction: the same bits
# everywhere.
NATIVE_FLAGS = ["-O3", "-ffp-contract=off", "-fwrapv", "-Wno-psabi"]
NATIVE = [
    Extension(
        f"mock_scheduler.{folder.replace('/', '.')}.native",
        sorted(map(str, Path("mock_scheduler", folder).glob("native*.c"))),
        include_dirs=["mock_scheduler/support"],
        depends=["mock_scheduler/support/native.h", f"mock_scheduler/{folder}/passes.h"],
        extra_compile_args=NATIVE_FLAGS,
        optional=True,
    )
    for folder in ("trace/sketch", "comparison/measure")
]

setup(
    name="mock-scheduler",
    version="0.1.0",
    description="Record RL rollouts once, replay them under any layout, and prove whether training numerics moved",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["mock_scheduler", "mock_scheduler.*", "pipelines", "pipelines.*"]),
    ext_modules=NATIVE,
    # pipelines/configs is a link to configs: an installation has the files themselves.
    package_data={"mock_scheduler": ["py.typed", "**/templates/*"], "pipelines": ["configs/*.yaml"]},
    install_requires=[
        "torch>=2.6",
        "anyio>=4.4,<5",
        # The release that was tried on each Python.
        'megatron-core>=0.16.1,<0.17; python_version < "3.12"',
        'megatron-core>=0.19.2,<0.20; python_version >= "3.12"',
        "fsspec>=2025.5",
        "gymnasium>=1.0,<2",
        "httpx>=0.27,<1",
        "hydra-core>=1.3,<1.4",
        "isal>=1.7,<2",
        "jinja2>=3.1,<4",
        "numpy>=1.26",
        "omegaconf>=2.3,<2.4",
        "plotly>=6,<8",
        "psutil>=5.9",
        "pydantic>=2.8,<3",
        "pyyaml>=6.0",
        "rich>=13",
        "safetensors>=0.4.5",
        "starlette>=0.40,<2",
        "tensorboard>=2.17",
        "typer>=0.29",
        "uvicorn>=0.30,<1",
    ],
    extras_require={
        "s3": ["s3fs>=2025.5"],
        "zstd": ["zstandard>=0.22"],
        "text": ["transformers>=5.3,<6", "reasoning-gym==0.1.25", "textarena==0.7.4"],
        # With the dashboard, by which an alignment submits its runs as jobs.
        "ray": ["ray[default]==2.60.0"],
        "slurm": ["submitit>=1.5.2,<2"],
        "parquet": ["pyarrow>=17"],
        "te": ["transformer-engine[pytorch]>=2.8"],
        "engines": ["vllm>=0.32"],
        # Other frameworks bring an environment of their own, into which this project goes with --no-deps.
        "trl": ["trl>=1.16,<2"],
        "verl": ["verl==0.9.1"],
        # The site, in an environment of its own: launch/docs.sh --site.
        "docs": ["furo>=2024.8", "myst-parser>=4", "sphinx>=8"],
        "dev": [
            "hypothesis>=6.100",
            "import-linter>=2.1",
            "moto[server,s3]>=5.1",
            "mypy>=1.13",
            "pytest>=8",
            "pytest-cov>=5",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.5",
            "ruff>=0.8",
            "types-PyYAML",
        ],
    },
    entry_points={
        "console_scripts": ["mock-scheduler = mock_scheduler.cli:main"],
        "pytest11": ["mock_scheduler = mock_scheduler.pytest_plugin"],
        # Loaded by verl in each of its processes.
        "verl.plugins": ["mock_scheduler = mock_scheduler.adapters.verl.plugin"],
    },
)
