# SPDX-License-Identifier: Apache-2.0
"""What commands take of serving. It loads heavy packages, not all of which need be installed, so commands import it when they run."""

import uvicorn

from nnfront.engine.params import Params
from nnfront.engine.schedule import Limits
from nnfront.serve.app import app
from nnfront.serve.chat import template_of
from nnfront.serve.connections import protocol
from nnfront.serve.embedding import embedding_app
from nnfront.serve.engine import Engine, compute_of
from nnfront.serve.talk import Talk

__all__ = [
    "Engine",
    "Limits",
    "Params",
    "Talk",
    "app",
    "compute_of",
    "embedding_app",
    "protocol",
    "template_of",
    "uvicorn",
]
