# SPDX-License-Identifier: Apache-2.0
"""What `pyproject.toml` cannot say: the sources in C, one for each set of instructions, are compiled beside one another, as many at a time as there are cores or NNFRONT_BUILD_JOBS says."""

from pybind11.setup_helpers import ParallelCompile
from setuptools import setup

ParallelCompile("NNFRONT_BUILD_JOBS").install()
setup()
