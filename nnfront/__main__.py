# SPDX-License-Identifier: Apache-2.0
"""`python -m nnfront`, which `torchrun -m nnfront` runs as well."""

import sys

from nnfront.cli import main

sys.exit(main())
