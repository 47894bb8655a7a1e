# SPDX-License-Identifier: Apache-2.0
"""Many requests at once, from one model, over the interface that clients of language models speak.

engine                      the thread in which `nnfront.engine` runs
chat, answers, protocol     prompts from messages; text from tokens; requests and replies as data
app, metrics                the ASGI application
"""
