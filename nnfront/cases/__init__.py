# SPDX-License-Identifier: Apache-2.0
"""When special cases apply: what every room says about them in the same words.

Read the files in this order; each imports only from those above it:

    conditions  what a user writes for a dim or an argument, what that asks of a value, its text, its plain form
    coverage    what cases say about one another
    attributes  the cases in a function's attributes, when its dims and arguments change

`nnfront.passes.special_cases` makes the variants and the choice among them; `nnfront.runtime.cases` counts and explains.
"""
