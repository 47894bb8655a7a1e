# SPDX-License-Identifier: Apache-2.0
"""How much a text from outside may say, and stand for: what a model needs is far from all of it.

Each limit is kept where it is met: those of a text by the parser, of an attribute by its op, of a type by the verifier, of what functions
stand for together by `untrusted_text`. Those of dims are in `nnfront.dims`, which knows nothing of texts.
"""

MAX_CHARACTERS = 1 << 28
"""Of a text: constants of 200 MB."""
MAX_TOKENS = 5_000_000
"""Of a text, of some 100 bytes each in memory. A 70B Llama without shared layers has 200 thousand; a constant is one."""
MAX_FUNCTIONS = 10_000
"""Of a module. A model whose layers are all different has one for each of them."""
MAX_NESTING = 100
"""Of brackets and blocks inside each other; more would exhaust Python's stack."""
MAX_SIZE_CHARACTERS = 2000
"""Of a size; more takes long to bring to canonical form."""
MAX_DIM_TERMS = 300_000
"""That are looked at while the dims of a text are read, or those of a module compared and compiled: some seconds. Models need a few hundred."""
MAX_TEXT_CHARACTERS = 10_000
"""Of a text that is an attribute: the name of a function, a format."""
MAX_LAYERS = 10_000
"""Of a cache."""
MAX_BUFFERS = 64
"""Of one kind in a layer of a cache."""
MAX_AXES = 64
"""Of a tensor; torch takes no more."""
MAX_FIELDS = 10_000
"""That an op gives, from a number that says how many."""
MAX_BINDINGS = 100_000
"""Of one function, with those of the functions that it calls. A 405B Llama has some ten thousand."""
MAX_DEPTH = 64
"""Of calls and branches inside each other."""
