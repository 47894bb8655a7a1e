# SPDX-License-Identifier: Apache-2.0
"""Chat templates in the manner of families of models, each with what is peculiar to it, written for these tests."""

from __future__ import annotations

from more_templates import MORE

CHATML = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

TAGGED = """{{- bos_token }}{%- if messages[0]['role'] == 'system' %}{%- set system = '<<SYS>>\\n' ~ messages[0]['content'] ~ '\\n<</SYS>>\\n\\n' %}{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}
{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate user/assistant') }}{%- endif %}
{%- if message['role'] == 'user' %}{{- '[INST] ' ~ (system if loop.first else '') ~ message['content'].strip() ~ ' [/INST]' }}
{%- else %}{{- ' ' ~ message['content'].strip() ~ ' ' ~ eos_token }}{%- endif %}{%- endfor %}"""

HEADERS = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = '26 Jul 2024' %}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{- '<|header|>ipython<|/header|>\\n\\n' }}{{- message.content | tojson }}{{- '<|eot|>' }}
{%- elif message.tool_calls is defined and message.tool_calls %}
{%- set call = message.tool_calls[0].function %}{{- '<|header|>assistant<|/header|>\\n\\n' }}{{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}<|eot|>' }}
{%- else %}{{- '<|header|>' + message['role'] + '<|/header|>\\n\\n' + message['content'] | trim + '<|eot|>' }}{%- endif %}
{%- endfor %}
{%- if tools %}{{- 'Tools on ' + date_string + ': ' }}{%- for tool in tools %}{{- tool | tojson(indent=4) }}{%- endfor %}{%- endif %}
{%- if add_generation_prompt %}{{- '<|header|>assistant<|/header|>\\n\\n' }}{%- endif %}"""

HERMES = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}{{- 'You may call:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>assistant' }}{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}{{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}{{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

THINKING = """{%- set ns = namespace(last=messages|length - 1, open=true) %}
{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}
{%- if ns.open and message.role == 'user' %}{%- set ns.open = false %}{%- set ns.last = index %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- set content = message.content %}{%- set reasoning = '' %}
{%- if message.reasoning_content is string %}{%- set reasoning = message.reasoning_content %}
{%- elif '</think>' in content %}{%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{%- if loop.index0 > ns.last and reasoning %}{{- '<|im_start|>assistant\\n<think>\\n' + reasoning + '\\n</think>\\n\\n' + content + '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}{%- endif %}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- else %}{{- '<think>\\n' }}{%- endif %}{%- endif %}"""

LISTED = """{{- bos_token }}{%- for message in messages %}
{%- if message['role'] == 'user' %}{%- if tools and loop.last %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}{{- '[INST]' + message['content'] + '[/INST]' }}
{%- elif message['tool_calls'] is defined and message['tool_calls'] is not none %}{{- '[TOOL_CALLS][' }}{%- for call in message['tool_calls'] %}{{- call['function'] | tojson }}{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ']' + eos_token }}
{%- elif message['role'] == 'assistant' %}{{- message['content'] + eos_token }}
{%- elif message['role'] == 'tool' %}{{- '[TOOL_RESULTS]' + ({'content': message['content']} | tojson) + '[/TOOL_RESULTS]' }}{%- endif %}
{%- endfor %}"""

NAMED = """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '<User>' + message['content'] }}{% elif message['role'] == 'assistant' and message['tool_calls'] %}{{ '<Assistant><calls>' }}{% for call in message['tool_calls'] %}{{ '<call>function<sep>' + call['function']['name'] + '\\n```json\\n' + (call['function']['arguments'] | tojson) + '\\n```</call>' }}{% endfor %}{{ '</calls><end>' }}{% elif message['role'] == 'assistant' %}{{ '<Assistant>' + message['content'] + '<end>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<Assistant>' }}{% endif %}"""

PARAMETERS = """{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{{- '<|im_start|>assistant' }}
{%- for call in message.tool_calls %}{{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for key, value in call.function.arguments | items %}{{- '<parameter=' + key + '>\\n' }}{{- (value | tojson) if value is mapping or (value is sequence and value is not string) else value | string }}{{- '\\n</parameter>\\n' }}{%- endfor %}
{{- '</function>\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

TURNS = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"""

PARTS = """{%- for message in messages %}{{- '<|' + message.role + '|>' }}
{%- if message.content is string %}{{- message.content }}{%- else %}{%- for part in message.content %}{%- if part.type == 'image' %}{{- '<image>' }}{%- elif part.type == 'text' %}{{- part.text }}{%- endif %}{%- endfor %}{%- endif %}{{- '<|end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""

TRAINED = """{%- for message in messages %}
{%- if message.role == 'assistant' %}{{- '<|assistant|>\\n' }}{% generation %}{{- message.content + eos_token }}{% endgeneration %}{{- '\\n' }}
{%- else %}{{- '<|' + message.role + '|>\\n' + message.content + eos_token + '\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}"""

CHANNELS = """{%- macro tool_lines(tools) -%}{%- for tool in tools %}{{- '// ' ~ tool.function.description ~ '\\ntype ' ~ tool.function.name ~ ' = (' }}{%- for key, value in tool.function.parameters.properties.items() %}{{- key ~ ': ' ~ value.type }}{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ') => any;\\n' }}{%- endfor %}{%- endmacro -%}
{{- '<|start|>system<|message|>Reasoning: ' ~ (reasoning_effort if reasoning_effort is defined else 'medium') ~ '<|end|>' }}
{%- if tools %}{{- '<|start|>developer<|message|>' ~ tool_lines(tools) ~ '<|end|>' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}{%- if 'thinking' in message %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{%- endif %}{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{%- endif %}"""

LOOPS = """{%- for message in messages %}
{%- if message.role == 'system' %}{% continue %}{%- endif %}
{%- if loop.index > 6 %}{% break %}{%- endif %}
{{ loop.index }}. {{ message.role | capitalize }}: {{ message.content | replace('<', '&lt;') }}
{% endfor %}
{{- strftime_now('%Y') | length }}{{ dict(a=1)['a'] }}{{ messages | map(attribute='role') | unique | join('/') }}"""

FAMILIES = {
    "chatml": CHATML,
    "tagged": TAGGED,
    "headers": HEADERS,
    "hermes": HERMES,
    "thinking": THINKING,
    "listed": LISTED,
    "named": NAMED,
    "parameters": PARAMETERS,
    "turns": TURNS,
    "parts": PARTS,
    "trained": TRAINED,
    "channels": CHANNELS,
    "loops": LOOPS,
    **MORE,
}

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather <now> & later – in a place",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["place"],
            },
        },
    }
]

TALKS = {
    "one": [{"role": "user", "content": "Hi, who's there? <b>&amp;</b>"}],
    "three": [
        {"role": "user", "content": "  Ünïcode  "},
        {"role": "assistant", "content": "Sure.\n"},
        {"role": "user", "content": "Go on"},
    ],
    "system": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
    ],
    "reasons": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "why b"},
    ],
    "calls": [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": {"place": "Zürich", "days": 2}},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ],
}
