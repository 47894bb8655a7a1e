# SPDX-License-Identifier: Apache-2.0
"""`python -m nnfront.cli`."""

import sys

from nnfront.cli import main

sys.exit(main())
