# SPDX-License-Identifier: Apache-2.0
"""How long a test waits for what has to come: as long as a machine may take that has much else to do."""

HANGS_SECONDS = 600
"""What has not come after so long will not come. It ends a test that would wait forever, and says nothing about speed."""
