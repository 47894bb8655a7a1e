# SPDX-License-Identifier: Apache-2.0
"""Many requests at once, from one model, over the interface that clients of language models speak.

pages, prefixes, schedule   what to do next: numbers alone, no tensor
pool, params, draw, engine  doing it: sequences in one paged cache, a draw for each row, the thread
chat, answers, protocol     prompts from messages; text from tokens; requests and replies as data
app, metrics                the ASGI application
"""
