# SPDX-License-Identifier: Apache-2.0
"""What `quantize_weights` decides before it rewrites anything. Read in this order:

scheme   what the user asks for: formats for most weights and for the head, and rules by name
reads    who reads which weight: products, embeddings, experts, routers, heads
choose   the format of each weight, or why it stays as it is
budget   formats by measured errors
report   all of that, as text
"""
