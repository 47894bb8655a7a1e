# SPDX-License-Identifier: Apache-2.0
"""Ways to spoil a file: of its bytes, of the words of a text, of the values of a JSON object. The same seed spoils it the same way."""

from __future__ import annotations

import json
import random
import re
from typing import Any

NUMBERS = [0, 1, -1, 2, 3, 7, 1000, 2**31, 2**40, 2**63, 10**18, 10**30]
VALUES = [*NUMBERS, None, True, "", "x", "../x", [], {}, [[]], 0.5, float("inf"), "\ud800"]


def spoil_bytes(rng: random.Random, data: bytes) -> bytes:
    """Flip a bit, cut the end off, take bytes out, put bytes in, exchange two pieces, or repeat one."""
    spoiled = bytearray(data)
    at, length = rng.randrange(len(data)), rng.randrange(1, 64)
    match rng.randrange(6):
        case 0:
            spoiled[at] ^= 1 << rng.randrange(8)
        case 1:
            del spoiled[at:]
        case 2:
            del spoiled[at : at + rng.randrange(1, 9)]
        case 3:
            spoiled[at:at] = rng.randbytes(rng.randrange(1, 9))
        case 4:
            other = rng.randrange(len(data))
            one, two = spoiled[at : at + length], spoiled[other : other + length]
            spoiled[other : other + length] = one
            spoiled[at : at + length] = two
        case _:
            spoiled[at:at] = spoiled[at : at + length]
    return bytes(spoiled)


def spoil_words(rng: random.Random, data: bytes) -> bytes:
    """Change a number, exchange, repeat or remove a word, or do that with a line: more of what comes of it parses."""
    text = data.decode()
    words = re.findall(r"[A-Za-z_][\w.]*|\d+\.\d+|\d+|\s+|.", text)
    places = [i for i, word in enumerate(words) if not word.isspace()]
    one, two = rng.choice(places), rng.choice(places)
    match rng.randrange(5):
        case 0:
            words[rng.choice([i for i in places if words[i].isdigit()])] = str(rng.choice(NUMBERS))
        case 1:
            words[one], words[two] = words[two], words[one]
        case 2:
            words[one] = words[two]
        case 3:
            del words[one]
        case _:
            lines = text.split("\n")
            first, second = rng.randrange(len(lines)), rng.randrange(len(lines))
            if rng.random() < 0.5:
                lines[first], lines[second] = lines[second], lines[first]
            else:
                lines.insert(first, lines[second])
            return "\n".join(lines).encode()
    return "".join(words).encode()


def spoil_json(rng: random.Random, data: bytes) -> bytes:
    """Replace, remove, rename or add one value somewhere in a JSON object."""
    fields = json.loads(data)
    holders: list[Any] = []
    pending: list[Any] = [fields]
    while pending:
        value = pending.pop()
        if isinstance(value, (dict, list)):
            holders.append(value)
            pending.extend(value.values() if isinstance(value, dict) else value)
    holder = rng.choice([h for h in holders if h])
    keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
    key = rng.choice(keys)
    match rng.randrange(4):
        case 0:
            holder[key] = rng.choice(VALUES)
        case 1:
            del holder[key]
        case 2 if isinstance(holder, dict):
            holder[f"{key}{rng.choice(['', ' ', '_', '/', chr(0)])}x"] = holder.pop(key)
        case _:
            if isinstance(holder, dict):
                holder[str(rng.choice(VALUES))] = rng.choice(VALUES)
            else:
                holder.append(rng.choice(VALUES))
    return json.dumps(fields).encode()
