# SPDX-License-Identifier: Apache-2.0
"""Distribution `longcontext-certify`: the checks of megatron/certifying alone, which need nothing but torch."""

from pathlib import Path

from setuptools import setup

ROOT = Path("../..")  # pip builds in this folder
PACKAGES = [f"megatron.{name}" for name in ("certifying", "certifying.of_torch", "certifying.scripts", "system")]

setup(
    name="longcontext-certify",
    version="0.3.0",
    description="Checks that a parallel PyTorch program computes what one process computes",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=PACKAGES,
    package_dir={name: str(ROOT / name.replace(".", "/")) for name in PACKAGES},
    install_requires=["torch>=2.6", "numpy"],
    extras_require={"pictures": ["matplotlib"]},
    entry_points={
        "pytest11": ["certify = megatron.certifying.in_tests"],
        "console_scripts": ["certify = megatron.certifying.__main__:main"],
    },
)
