# SPDX-License-Identifier: Apache-2.0
"""How weight computations move to load time, one question a file. Read in this order:

dims        which dims are known once weights are loaded
value_graph  the values that weights alone determine, each once
analyse     which bindings compute such values, and what run-time work reads of them
min_cut     the cheapest way through a graph of values
choose_resident  which values are kept after load: the rule about bytes
split       what remains of methods and private functions
assemble    the transform function; several transforms as one
report      what moved, what stayed and why
"""
