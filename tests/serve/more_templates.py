# SPDX-License-Identifier: Apache-2.0
"""Further chat templates in the manner of families of models, each with what is peculiar to it, written for these tests."""

from __future__ import annotations

PYTHONIC = """{{- bos_token }}{%- set keep = keep_past_thinking | default(false) %}
{%- if tools %}{{- '<|sys|>Tools: [' }}{%- for tool in tools %}{%- set tool = tool.function | default(tool) %}{{- tool | tojson(sort_keys=true) }}{%- if not loop.last %}, {% endif %}{%- endfor %}{{- ']\\n' }}{%- endif %}
{%- macro literal(value) -%}{%- if value is string %}{{- '"' ~ value | replace('\\\\', '\\\\\\\\') | replace('"', '\\\\"') | replace('\\n', '\\\\n') ~ '"' }}{%- elif value is boolean or value is none %}{{- value }}{%- else %}{{- value }}{%- endif %}{%- endmacro -%}
{%- for message in messages %}{{- '<|' ~ message.role ~ '|>\\n' }}
{%- if message.tool_calls %}{{- '<|call_start|>[' }}{%- for call in message.tool_calls %}{{- call.function.name ~ '(' }}{%- for key, value in call.function.arguments.items() %}{{- key ~ '=' ~ literal(value) }}{%- if not loop.last %}, {% endif %}{%- endfor %}{{- ')' }}{%- if not loop.last %}, {% endif %}{%- endfor %}{{- ']<|call_end|>' }}
{%- else %}{%- set content = message.content if message.content is string else message.content | tojson %}{%- if '</think>' in content and not keep %}{%- set content = content.split('</think>')[-1] | trim %}{%- endif %}{{- content }}{%- endif %}{{- '<|end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}"""

ARGKEYS = """[gMASK]<sop>
{%- if tools %}
<|system|>
# Tools
{% for tool in tools %}
{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}
{%- endif %}
{%- macro shown(content) -%}{%- if content is string %}{{- content }}{%- elif content is iterable and content is not mapping %}{%- for item in content %}{%- if item is mapping and item.type == 'text' %}{{- item.text }}{%- elif item is string %}{{- item }}{%- endif %}{%- endfor %}{%- else %}{{- content }}{%- endif %}{%- endmacro -%}
{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}{% set ns.last = loop.index0 -%}{%- endif %}{%- endfor %}
{% for m in messages %}
{%- if m.role == 'user' -%}<|user|>
{{ shown(m.content) }}{{ '/nothink' if (enable_thinking is defined and not enable_thinking and not shown(m.content).endswith('/nothink')) else '' }}
{%- elif m.role == 'assistant' -%}<|assistant|>
{%- set content = shown(m.content) %}
{%- if m.reasoning_content is string and loop.index0 > ns.last %}{{ '\\n<think>' + m.reasoning_content.strip() + '</think>' }}{%- else %}{{ '\\n<think></think>' }}{%- endif %}
{%- if content.strip() %}{{ '\\n' + content.strip() }}{%- endif %}
{%- if m.tool_calls %}{%- for tc in m.tool_calls %}{%- if tc.function %}{%- set tc = tc.function %}{%- endif %}
{{ '\\n<tool_call>' + tc.name }}
{% for k, v in tc.arguments.items() %}
<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>
{% endfor %}
</tool_call>{%- endfor %}{%- endif %}
{%- elif m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}{%- endif %}{{- '\\n<tool_response>\\n' }}{{- shown(m.content) }}{{- '\\n</tool_response>' }}
{%- else -%}<|system|>
{{ shown(m.content) }}
{%- endif -%}{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{{ '\\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' }}{%- endif %}"""

INVOKES = """{%- set begin, end = '<x:tool_call>', '</x:tool_call>' -%}
{%- macro tool_list(tools) -%}{%- for tool in tools -%}<tool>{{ tool.function | tojson(ensure_ascii=False) }}</tool>
{% endfor -%}{%- endmacro -%}
{%- set system = messages | selectattr('role', 'equalto', 'system') | first | default(none) -%}
{{- ']~b]system' ~ '\\n' }}{{- system.content if system is not none else 'You help.' }}{{- '\\n' ~ tool_list(tools) if tools else '' }}{{- '[e~[\\n' }}
{%- for message in messages | rejectattr('role', 'equalto', 'system') -%}
{%- if message.role == 'assistant' -%}{{- ']~b]ai' ~ '\\n' }}
{%- if message.reasoning_content and loop.last %}{{- '<think>' ~ '\\n' ~ message.reasoning_content ~ '\\n' ~ '</think>' ~ '\\n\\n' }}{%- endif -%}
{{- message.content }}
{%- if message.tool_calls %}{{- '\\n' ~ begin ~ '\\n' }}
{%- for call in message.tool_calls -%}{{- '<invoke name="' ~ call.function.name ~ '">\\n' }}{%- set _args = call.function.arguments -%}
{%- for k, v in _args.items() -%}{{- '<parameter name="' ~ k ~ '">' }}{{- v | tojson(ensure_ascii=False) if v is not string else v }}{{- '</parameter>' }}
{% endfor -%}{{- '</invoke>' ~ '\\n' }}{%- endfor -%}{{- end }}{%- endif -%}{{- '[e~[' ~ '\\n' }}
{%- elif message.role == 'tool' -%}{{- ']~b]tool\\n<response>' ~ message.content ~ '</response>[e~[\\n' }}
{%- else -%}{{- ']~b]user' ~ '\\n' ~ message.content ~ '[e~[' ~ '\\n' }}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{- ']~b]ai' ~ '\\n' ~ '<think>' ~ '\\n' }}{%- endif -%}"""

ACTIONS = """{{ bos_token }}{%- macro document(doc) -%}{% for key, value in doc.items() -%}{{ '\\n' ~ key ~ ': ' ~ value }}{%- endfor %}{%- endmacro -%}
{%- if documents %}<|START|><|SYSTEM|>{% for doc in documents %}Document: {{ loop.index0 }}{{ document(doc) }}{% endfor %}<|END|>{%- endif %}
{%- if tools %}<|START|><|SYSTEM|>[
{%- for tool in tools %}{"name": "{{ tool['function']['name'] }}", "parameters": {{ tool['function']['parameters'] | tojson }}}{{ ',' if not loop.last }}{%- endfor %}]<|END|>{%- endif %}
{%- for message in messages %}{%- if message.role | lower == 'system' %}<|START|><|SYSTEM|>{{ message.content }}<|END|>
{%- elif message.role | lower == 'user' %}<|START|><|USER|>{{ message.content }}<|END|>
{%- elif message.role | lower == 'assistant' %}<|START|><|BOT|>{%- if message.reasoning_content %}<|THINKING|>{{ message.reasoning_content }}<|/THINKING|>{%- endif %}
{%- if message.tool_calls %}<|ACTION|>[
{%- for tc in message.tool_calls %}
    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ tc['function']['name'] }}", "parameters": {{ tc['function']['arguments'] | tojson }}}{% if not loop.last %},{% endif %}
{% endfor %}
]<|/ACTION|><|END|>{%- else %}<|RESPONSE|>{{ message.content }}<|/RESPONSE|><|END|>{%- endif %}
{%- elif message.role | lower == 'tool' %}<|START|><|SYSTEM|>{{ {'results': {'0': message.content}} | tojson }}<|END|>{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}<|START|><|BOT|>{%- endif %}"""

BRACKETS = """{% for message in messages %}
{% if message['role'] == 'system' and tools is not none %}
{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + tools | tojson + '<|/tool|>' + '<|end|>' }}
{% elif message.tool_calls %}
{{ '<|assistant|>' + '<|tool_call|>' + message.tool_calls | map(attribute='function') | list | tojson + '<|/tool_call|>' + '<|end|>' }}
{% else %}
{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"""

ARGS = """{%- set default_system = 'Knowledge ends on ' ~ '2023-10-01' ~ '.' %}{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}{%- else %}{%- set system = default_system %}{%- set loop_messages = messages %}{%- endif %}
{{- '[SYSTEM_PROMPT]' + system + '[/SYSTEM_PROMPT]' }}
{%- if tools is defined and tools is not none and tools | length > 0 %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}{%- if message.role == 'user' or (message.role == 'assistant' and (message.tool_calls is not defined or message.tool_calls is none or message.tool_calls | length == 0)) %}
{%- if (message['role'] == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('After the optional system message, conversation roles must alternate') }}{%- endif %}{%- set ns.index = ns.index + 1 %}{%- endif %}{%- endfor %}
{%- for message in loop_messages %}
{%- if message.role == 'user' %}{{- '[INST]' + message.content + '[/INST]' }}
{%- elif message.role == 'assistant' %}{%- if message.content %}{{- message.content }}{%- endif %}{%- for call in message.tool_calls or [] %}{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + (call.function.arguments if call.function.arguments is string else call.function.arguments | tojson) }}{%- endfor %}{{- eos_token }}
{%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS]' + message.content | string + '[/TOOL_RESULTS]' }}
{%- else %}{{- raise_exception('Only user, assistant and tool roles are supported, not ' + message.role) }}{%- endif %}{%- endfor %}"""

NUMBERED = """{%- for message in messages %}{%- if loop.first and messages[0]['role'] != 'system' %}<|im_system|>system<|im_middle|>You help.<|im_end|>{%- endif %}
{%- set name = message.get('name', message['role']) %}
{%- if message['role'] == 'user' %}<|im_user|>{{ name }}<|im_middle|>{%- elif message['role'] == 'assistant' %}<|im_assistant|>{{ name }}<|im_middle|>{%- else %}<|im_system|>{{ name }}<|im_middle|>{%- endif %}
{%- if message['role'] == 'assistant' and message.get('tool_calls') %}{%- if message['content'] %}{{ message['content'] }}{%- endif %}<|calls_begin|>{%- for call in message['tool_calls'] %}<|call_begin|>{{ call['id'] }}<|call_args|>{% if call['function']['arguments'] is string %}{{ call['function']['arguments'] }}{% else %}{{ call['function']['arguments'] | tojson }}{% endif %}<|call_end|>{%- endfor %}<|calls_end|>
{%- elif message['role'] == 'tool' %}## Return of {{ message.tool_call_id }}
{{ message['content'] }}
{%- elif message['content'] is not none %}{{ message['content'] }}{%- endif %}<|im_end|>{%- endfor %}
{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{%- endif %}"""

STATES = """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{% if not thinking is defined %}{% set thinking = false %}{% endif %}{% set ns = namespace(is_first=false, is_tool=false, system='', is_first_sp=true, is_last_user=false) %}{%- for message in messages %}{%- if message['role'] == 'system' %}{%- if ns.is_first_sp %}{% set ns.system = ns.system + message['content'] %}{% set ns.is_first_sp = false %}{%- else %}{% set ns.system = ns.system + '\\n\\n' + message['content'] %}{%- endif %}{%- endif %}{%- endfor %}{{ bos_token }}{{ ns.system }}
{%- for message in messages %}{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}{%- set ns.is_first = false -%}{%- set ns.is_last_user = true -%}{{ '<User>' + message['content'] }}{%- endif %}
{%- if message['role'] == 'assistant' and message['tool_calls'] is defined and message['tool_calls'] is not none %}{%- if ns.is_last_user %}{{ '<Assistant></think>' }}{%- endif %}{%- set ns.is_last_user = false -%}{%- set ns.is_first = false %}{%- for tool in message['tool_calls'] %}{%- if not ns.is_first %}{%- if message['content'] is none %}{{ '<calls_begin><call_begin>' + tool['function']['name'] + '<sep>' + tool['function']['arguments'] | tojson + '<call_end>' }}{%- else %}{{ message['content'] + '<calls_begin><call_begin>' + tool['function']['name'] + '<sep>' + tool['function']['arguments'] | tojson + '<call_end>' }}{%- endif %}{%- set ns.is_first = true -%}{%- else %}{{ '<call_begin>' + tool['function']['name'] + '<sep>' + tool['function']['arguments'] | tojson + '<call_end>' }}{%- endif %}{%- endfor %}{{ '<calls_end><end>' }}{%- endif %}
{%- if message['role'] == 'assistant' and (message['tool_calls'] is not defined or message['tool_calls'] is none) %}{%- if ns.is_last_user %}{{ '<Assistant>' }}{%- if message['prefix'] is defined and message['prefix'] and thinking %}{{ '<think>' }}{%- else %}{{ '</think>' }}{%- endif %}{%- endif %}{%- set ns.is_last_user = false -%}{%- if ns.is_tool %}{{ message['content'] + '<end>' }}{%- set ns.is_tool = false -%}{%- else %}{%- set content = message['content'] -%}{%- if '</think>' in content %}{%- set content = content.split('</think>', 1)[1] -%}{%- endif %}{{ content + '<end>' }}{%- endif %}{%- endif %}
{%- if message['role'] == 'tool' %}{%- set ns.is_last_user = false -%}{%- set ns.is_tool = true -%}{{ '<output_begin>' + message['content'] + '<output_end>' }}{%- endif %}{%- endfor -%}
{%- if add_generation_prompt and ns.is_last_user and not ns.is_tool %}{{ '<Assistant>' }}{%- if not thinking %}{{ '</think>' }}{%- else %}{{ '<think>' }}{%- endif %}{% endif %}"""

SWITCHED = """{%- if messages[0].role == 'system' %}{%- set text = messages[0].content %}{%- set rest = messages[1:] %}{%- else %}{%- set text = 'detailed thinking on' %}{%- set rest = messages %}{%- endif %}
{{- '<SPECIAL_10>System\\n' ~ text | replace('/think', '') | replace('/no_think', '') | trim }}
{%- if tools %}{{- '\\n<AVAILABLE_TOOLS>[' }}{%- for tool in tools %}{{- (tool.function if tool.function is defined else tool) | tojson }}{{- ', ' if not loop.last else '' }}{%- endfor %}{{- ']</AVAILABLE_TOOLS>' }}{%- endif %}{{- '\\n' }}
{%- for message in rest %}
{%- if message.role == 'user' %}{{- '<SPECIAL_11>User\\n' ~ message.content ~ '\\n' }}
{%- elif message.role == 'tool' %}{{- '<SPECIAL_11>User\\n<TOOL_RESPONSE>[' ~ message.content ~ ']</TOOL_RESPONSE>\\n' }}
{%- elif message.role == 'assistant' %}{{- '<SPECIAL_11>Assistant\\n' }}{%- if message.tool_calls %}{{- '<TOOLCALL>[' }}{%- for call in message.tool_calls %}{{- '{"name": "' ~ call.function.name ~ '", "arguments": ' ~ call.function.arguments | tojson ~ '}' }}{{- ', ' if not loop.last else '' }}{%- endfor %}{{- ']</TOOLCALL>' }}{%- else %}{{- message.content }}{%- endif %}{{- '\\n<SPECIAL_12>\\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<SPECIAL_11>Assistant\\n' }}{{- '<think>\\n' if 'on' in text else '<think></think>' }}{%- endif %}"""

DATED = """{%- set system = 'Knowledge Cutoff Date: April 2024.\\nA year has ' ~ strftime_now('%m') | length ~ ' digits in its month.' %}
{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}{%- else %}{%- if tools and documents %}{%- set system = system + ' Use both.' %}{%- elif tools %}{%- set system = system + ' Use the tools.' %}{%- endif %}{%- set loop_messages = messages %}{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system + '<|end_of_text|>\\n' }}
{%- if tools %}{{- '<|start_of_role|>tools<|end_of_role|>' }}{{- tools | tojson(indent=4) }}{{- '<|end_of_text|>\\n' }}{%- endif %}
{%- for message in loop_messages %}
{%- set role = 'tool_response' if message['role'] == 'tool' else message['role'] %}{{- '<|start_of_role|>' + role + '<|end_of_role|>' }}
{%- if message.tool_calls is defined and message.tool_calls %}{{- '<|tool_call|>' }}{{- message.tool_calls | map(attribute='function') | list | tojson }}{%- else %}{{- message['content'] }}{%- endif %}{{- '<|end_of_text|>\\n' }}
{%- if loop.last and add_generation_prompt %}{{- '<|start_of_role|>assistant' }}{%- if thinking %}{{- ' ' + {'thinking': thinking} | tojson }}{%- endif %}{{- '<|end_of_role|>' }}{%- endif %}{%- endfor %}"""

MODES = """{%- set mode = 'think' if enable_thinking is not defined or enable_thinking else 'no_think' %}
{%- if messages and messages[0].role == 'system' and messages[0].content.endswith('/no_think') %}{%- set mode = 'no_think' %}{%- endif %}
{{- '<|im_start|>system\\n## Metadata\\n\\nMode: /' ~ mode ~ '\\nDate parts: ' ~ strftime_now('%d %B %Y').split(' ') | length ~ '\\n\\n' }}
{%- set custom = messages[0].content.replace('/no_think', '').replace('/think', '').rstrip() if messages and messages[0].role == 'system' else '' %}{{- custom ~ '\\n' if custom }}
{%- set ns = namespace(xml='') %}{%- if tools is defined and tools %}{%- for tool in tools %}{%- set ns.xml = ns.xml ~ (tool | string | length > 0) ~ tool.function.name ~ '\\n' %}{%- endfor %}{{- '<tools>\\n' ~ ns.xml ~ '</tools>' }}{%- endif %}{{- '<|im_end|>\\n' }}
{%- for message in messages if message.role != 'system' %}
{%- set content = message.content if message.content is string else '' %}
{%- if message.role == 'assistant' %}{%- generation -%}{%- if mode == 'think' %}{{- '<|im_start|>assistant\\n' ~ content.lstrip('\\n') }}{%- else %}{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n' ~ content.lstrip('\\n') }}{%- endif %}{%- for call in message.tool_calls or () %}{{- '<tool_call>' ~ {'name': call.function.name, 'arguments': call.function.arguments} | tojson ~ '</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endgeneration -%}
{%- else %}{{- '<|im_start|>' ~ {'tool': 'user'}.get(message.role, message.role) ~ '\\n' ~ content ~ '<|im_end|>\\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' if mode == 'think' else '<|im_start|>assistant\\n<think>\\n\\n</think>\\n' }}{%- endif %}"""

BUDGETS = """{%- set bos, toolb, toole, thinkb, thinke = '<s:bos>', '<s:tool_call>', '</s:tool_call>', '<s:think>', '</s:think>' -%}
{%- macro json_type(t) -%}{{- {'string': 'str', 'integer': 'int'}[t] if t in ['string', 'integer'] else 'Any' -}}{%- endmacro -%}
{%- set budgets = [[0, 0], [512, 128], [1024, 256]] -%}{%- set ns = namespace(interval=none) -%}
{%- if thinking_budget is defined and thinking_budget is not none -%}{%- for limit, interval in budgets if ns.interval is none and thinking_budget <= limit -%}{%- set ns.interval = interval -%}{%- endfor -%}{{ bos ~ 'system\\nbudget ' ~ ns.interval ~ eos_token }}{%- endif -%}
{%- for tool in tools or [] -%}{{ 'def ' ~ tool.function.name ~ '(' }}{%- for name, spec in tool.function.parameters.properties | dictsort -%}{{ name ~ ': ' ~ json_type(spec.type) }}{{ ', ' if not loop.last }}{%- endfor -%}{{ '):\\n' }}{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}{{ bos ~ 'assistant' }}{%- if message.reasoning_content is defined and message.reasoning_content is string and message.reasoning_content | trim | length > 0 -%}{{ '\\n' ~ thinkb ~ message.reasoning_content | trim ~ thinke }}{%- endif -%}{%- if message.content -%}{{ '\\n' ~ message.content | trim }}{%- endif -%}
{%- for call in message.tool_calls | default([], true) -%}{{ '\\n' ~ toolb ~ '\\n<function=' ~ call.function.name ~ '>\\n' }}{%- for name, value in call.function.arguments | items -%}{{ '<parameter=' ~ name ~ '>' ~ (value if value is string else value | string) ~ '</parameter>\\n' }}{%- endfor -%}{{ '</function>\\n' ~ toole }}{%- endfor -%}{{ eos_token }}
{%- else -%}{{ bos ~ message.role ~ '\\n' ~ message.content ~ eos_token }}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{ bos ~ 'assistant\\n' }}{%- if thinking_budget == 0 -%}{{ thinkb ~ thinke }}{%- endif -%}{%- endif -%}"""

GROUPED = """{%- set names = {'user': 'User', 'assistant': 'Falcon', 'system': 'System', 'tool': 'Tool'} -%}
{%- for message in messages -%}{%- if not loop.first %}{{ '\\n' }}{%- endif -%}{{ names[message.role] ~ ': ' ~ message.content | trim | replace('\\r\\n', '\\n') | replace('\\n\\n', '\\n') }}{%- endfor -%}
{%- if tools -%}{{ '\\n' }}{%- for type, group in tools | groupby('type') -%}{{ type ~ ': ' ~ group | map(attribute='function.name') | join(', ') }}{%- endfor -%}{%- endif -%}
{%- filter upper -%}{{ '\\n(' ~ messages | map(attribute='role') | list | length ~ ' turns)' }}{%- endfilter -%}
{%- if add_generation_prompt %}{{ '\\nFalcon:' }}{%- endif -%}"""

MORE = {
    "pythonic": PYTHONIC,
    "argkeys": ARGKEYS,
    "invokes": INVOKES,
    "actions": ACTIONS,
    "brackets": BRACKETS,
    "args": ARGS,
    "numbered": NUMBERED,
    "states": STATES,
    "switched": SWITCHED,
    "dated": DATED,
    "modes": MODES,
    "budgets": BUDGETS,
    "grouped": GROUPED,
}
