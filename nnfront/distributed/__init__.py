# SPDX-License-Identifier: Apache-2.0
"""Several processes of one machine that compute one model together: how they are started, how they meet, and how they end.

    ranks     one process among them: its number, what all must agree on, and signs of life
    launch    starts them, by torchrun's own launcher, and says in one error what has ended them

What they compute is the model's affair (`nnfront.nn.ranks`), and how numbers get from one to another torch's.
"""
