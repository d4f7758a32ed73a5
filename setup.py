# SPDX-License-Identifier: Apache-2.0
"""Distribution `megatron-longcontext`: packages in the namespace package `megatron`, which megatron-core shares."""

from pathlib import Path
from shutil import copy, copytree, ignore_patterns

from setuptools import find_namespace_packages, setup
from setuptools.command.build_py import build_py

# PyTorch for GPUs contains Triton, which is kept. Tests need Triton without a GPU too: they interpret and compile
# kernels, which need version 3.4.
TRITON = ['triton>=3,<3.10; sys_platform == "linux"']
TEST = ["pytest>=8", "pytest-cov>=5", "pytest-timeout", "pytest-xdist", "hypothesis", *TRITON]
HUGGING_FACE = ["accelerate>=1", "peft>=0.18"]  # transformers.Trainer, LoRA
PARQUET = ["pyarrow>=18,<27"]
S3 = ["s3fs>=2024.6"]
RAY = ["ray>=2.40"]
PEERS = ["accelerate==1.15.0", "datasets==5.2.0", "deepspeed==0.19.8", "trl==1.16.0"]
DOCS = ["mkdocs>=1.6,<2", "mkdocs-material>=9.5,<10", "mkdocstrings[python]>=0.27,<2", "ruff>=0.6"]


class WithPrograms(build_py):
    """Adds tools/ and the training programs to a wheel, as files that longcontext.py runs."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            to = Path(self.build_lib, "longcontext_programs")
            copytree("tools", to / "tools", ignore=ignore_patterns("__pycache__"), dirs_exist_ok=True)
            for program in Path(".").glob("pretrain_*.py"):
                copy(program, to)


setup(
    name="megatron-longcontext",
    version="0.3.0",
    description="4D-parallel long-context training of GPT and Llama models on megatron-core",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    # With an explicit root and the bare namespace in the list, `pip install -e .` adds a path entry, not an import hook
    # of setuptools, so that megatron/ here and megatron-core's megatron/core stay one namespace package.
    package_dir={"": "."},
    packages=find_namespace_packages(
        include=[
            "megatron",
            "megatron.certifying*",
            "megatron.context_parallel*",
            "megatron.training*",
            "megatron.inference*",
            "megatron.platform*",
            "megatron.system*",
            "megatron.decisions*",
            "megatron.simulator*",
            "megatron.formulas*",
        ]
    ),
    package_data={
        "megatron.simulator.machines": ["*.json"],
        "megatron.simulator.planner": ["*.html"],
        "megatron.context_parallel": ["py.typed"],
        "megatron.training": ["py.typed"],
        "megatron.simulator": ["py.typed"],
    },
    py_modules=["longcontext"],
    entry_points={
        "console_scripts": ["longcontext = longcontext:main"],
        "pytest11": ["certify = megatron.certifying.in_tests"],  # a fixture
    },
    cmdclass={"build_py": WithPrograms},
    install_requires=[
        "torch>=2.6",
        "megatron-core>=0.16,<0.20",
        "einops",  # megatron-core's hierarchical groups need it and do not declare it
        "psutil>=5.6.6",  # so do its checkpoints; earlier versions have CVE-2019-18874
        "numpy>=1.22",  # earlier versions have CVE-2021-41496
        # data and tokenizers
        "sentencepiece>=0.2.1",  # in earlier versions, a crafted model writes beyond its memory (CVE-2026-1260)
        "tiktoken>=0.7",
        "tokenizers>=0.20",
        "transformers>=4.53,<6",  # earlier versions hang on some texts (CVE-2025-6921)
        "jinja2>=3.1.6",  # renders chat templates; in earlier versions they can leave its sandbox (CVE-2025-27516)
        "zstandard",
        "fsspec",  # files behind URLs; torch needs it too
        "pyyaml",  # --data-config
        # checkpoints from and to Hugging Face
        "safetensors>=0.4",
        # progress, console, logs and pictures
        "matplotlib",
        "rich>=13",
        "tensorboard",
        "tqdm>=4.66.3",  # earlier versions have CVE-2024-34062
    ],
    extras_require={
        "gpu": ["transformer-engine[pytorch]>=2.1", "flash-attn>=2.7", "fla-core>=0.6,<0.7"],
        "triton": TRITON,
        "parquet": PARQUET,  # data in Parquet and Arrow files
        "s3": S3,  # data in object storage
        "ray": RAY,  # tools/preprocess_data.py --engine ray
        "huggingface": ["accelerate>=1"],  # only transformers.Trainer needs it
        "peers": PEERS,  # benchmarks/certify compares with them
        "test": TEST,
        "docs": DOCS,
        "dev": [*TEST, *HUGGING_FACE, *PARQUET, *DOCS, *S3, "moto[server]>=5", "ruff>=0.6"],
    },
)
