# SPDX-License-Identifier: Apache-2.0
"""Ways to spoil a file: of its bytes, of the words of a text, of the values of a JSON object. The same seed spoils it the same way."""

from __future__ import annotations

import json
import random
import re
from typing import Any

from hostile import NUMBERS, STRINGS, hostile_value

_INTEGERS = [number for number in NUMBERS if type(number) is int]


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
            words[rng.choice([i for i in places if words[i].isdigit()])] = str(rng.choice(_INTEGERS))
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
    """Spoil a value somewhere in a JSON object."""
    fields = json.loads(data)
    spoil_value(rng, fields)
    return json.dumps(fields).encode()


def spoil_value(rng: random.Random, fields: Any) -> str:
    """Replace, remove, rename or add a value somewhere in an object or a list; return where and by what."""
    holders: list[tuple[str, Any]] = []
    pending: list[tuple[str, Any]] = [("", fields)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, dict | list) and value:
            holders.append((path, value))
            items = value.items() if isinstance(value, dict) else enumerate(value)
            pending.extend((f"{path}.{key}", item) for key, item in items)
    if not holders:
        return "nothing is left"
    # Half of the time at the top: most values are deep, and of a table of thousands one is like the other.
    path, holder = holders[0] if rng.random() < 0.5 else rng.choice(holders)
    key = rng.choice([*holder]) if isinstance(holder, dict) else rng.randrange(len(holder))
    new = hostile_value(rng)
    match rng.randrange(6):
        case 0:
            del holder[key]
            return f"{path}.{key} is gone"
        case 1 if isinstance(holder, dict):
            holder[f"{key}{rng.choice(['', ' ', '_', '/', chr(0)])}x"] = holder.pop(key)
            return f"{path}.{key} has another name"
        case 2 if isinstance(holder, list):
            holder.append(new)
        case 2:
            holder[str(rng.choice(STRINGS))] = new
        case _:
            holder[key] = new
    return f"{path}.{key}: {new!r:.80}"
