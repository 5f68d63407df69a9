"""Expressions and statements of chat templates, and what Jinja 2 makes of them in transformers' environment.

    pip install jinja2==3.1.6
    python benches/peers/template_expressions.py > crates/tokenization/tests/fixtures/expressions.json
    python benches/peers/template_expressions.py --count 10000 --seed 1 > all.json
    TEMPLATE_EXPRESSIONS=$PWD/all.json cargo test -p tokenization --lib texts_are

A case is a template and its text, or null where Jinja 2 raises an error. Needs no transformers: the environment is copied
from its `_compile_jinja_template`, and is ten lines.
"""

import argparse
import copy
import json
import random
import resource

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

VALUES = {
    "none": None,
    "yes": True,
    "no": False,
    "zero": 0,
    "one": 1,
    "minus": -3,
    "big": 301,
    "half": 0.5,
    "two": 2.0,
    "tiny": 1e-7,
    "huge": 1e16,
    "empty": "",
    "word": "tides",
    "line": " Low tide\nat 5 \n\nHigh 'n' \"low\" ",
    "accent": "Élan ß",
    "digits": "42",
    "real": "1.5",
    "none_list": [],
    "list": [3, 1, 2],
    "texts": ["b", "a", "B"],
    "mixed": [1, "1", None, 1.0, True, []],
    "nested": [[1, 2], [3, [4]], []],
    "none_map": {},
    "map": {"b": 1, "a": None, "c": "x"},
    "deep": {"type": "object", "items": {"type": "string", "enum": ["u", "v"]}, "get": 7},
    "turns": [
        {"role": "user", "content": "hi", "n": 2},
        {"role": "tool", "content": None, "n": 1},
        {"role": "tool", "content": "", "n": 3},
        {"role": "assistant", "content": ["p", {"type": "text", "text": "q"}]},
    ],
}

LITERALS = [
    "none", "true", "false", "None", "True", "0", "1", "2", "-1", "1.5", "''", "'a'", "'ab cd'", '"d"', "[]", "{}", "[1, none]", "(1, 'a')",
    "[[1, 'b'], [2, 'c']]", "{'a': 1, 'b': [none]}", "range(3)", "missing", "turns[0]", "turns[1].content", "deep.items", "turns[9]",
    "namespace(a=1)", "dict(a=1, b='x')", "(1,)", "()",
]
ATTRIBUTES = ["'role'", "'content'", "'n'", "0", "'a'", "'items'", "'content.0'"]
TESTS = [
    "boolean", "callable", "defined", "even", "odd", "false", "true", "float", "integer", "iterable", "lower", "upper", "mapping", "none",
    "number", "sequence", "string", "undefined", "escaped", "divisibleby(2)", "divisibleby 3", "eq(1)", "ne('a')", "sameas(none)",
    "sameas true", "in [1, 'a', none]", "in 'tides'", "gt(1)", "le 1", "lt('b')", "equalto('')", "ge(0)", "greaterthan 0",
]
FILTERS = [
    "abs", "batch(2)|list", "batch(2, 'x')|list", "capitalize", "center(9)", "count", "d('z')", "default('z')", "default('z', true)",
    "default(none)", "default(boolean=true)", "dictsort", "dictsort(by='value')", "dictsort(reverse=true)", "e", "escape", "first", "last", "float", "float(7)",
    "filesizeformat", "format", "format(1)", "forceescape", "indent", "indent(2)", "indent(2, true)", "indent(1, first=true, blank=true)", "indent('>')",
    "int", "int(5)", "int(default=3)", "items|list", "join", "join(',')", "join(', ', attribute='role')", "join('-', 'n')", "length", "list",
    "lower", "map('upper')|list", "map('trim')|list", "map('length')|list", "map(attribute='role')|list", "map(attribute='n', default=0)|list", "map('default', 'q')|list", "map('string')|join", "max",
    "min", "max(attribute='n')", "pprint", "reject('none')|list", "reject|list", "rejectattr('content')|list", "rejectattr('role', 'eq', 'tool')|list", "replace('a', 'b')",
    "replace('t', '', 1)", "reverse|list", "reverse", "round", "round(1)", "round(0, 'floor')", "round(method='ceil')", "safe", "select|list", "select('string')|list",
    "select('in', [1, 'a'])|list", "selectattr('role', 'equalto', 'tool')|list", "selectattr('n', 'defined')|list", "selectattr('content')|map(attribute='role')|join('+')",
    "slice(2)|list", "slice(3, 0)|list", "sort", "sort(reverse=true)", "sort(attribute='n')", "sort(case_sensitive=true)", "sort(attribute='role,content')", "string", "striptags", "sum",
    "sum(attribute='n')", "sum(start=2)", "title", "tojson", "tojson(indent=2)", "tojson(ensure_ascii=true)", "tojson(sort_keys=true)", "tojson(separators=(',', ':'))", "tojson(2)", "trim", "trim('t')", "truncate(5)", "truncate(5, true, '')", "unique|list",
    "unique(attribute='role')|list", "upper", "urlencode", "wordcount", "wordwrap(4)", "xmlattr", "groupby('role')|list", "groupby('role')|map('first')|list", "attr('role')", "attr('upper')",
    "length > 1", "list|length", "string|length", "list|first", "last|default('none')",
]
METHODS = [
    "upper()", "lower()", "strip()", "lstrip()", "rstrip()", "strip('t s')", "lstrip(' ')", "rstrip('\\n')", "split()", "split(' ')", "split('i')", "split('\\n', 1)", "rsplit(' ', 1)", "split(none, 1)", "split('')",
    "splitlines()", "splitlines(true)", "title()", "capitalize()", "replace('i', 'o')", "replace('t', 'x', 1)", "startswith('t')", "endswith(('s', 'x'))", "startswith(('t', ' '))", "startswith(['t'])",
    "find('d')", "rfind('z')", "index('i')", "count('i')", "count(1)", "isdigit()", "isalpha()", "isalnum()", "isnumeric()", "isspace()", "islower()", "isupper()", "isdecimal()", "istitle()", "isidentifier()", "isascii()", "join(['a', 'b'])", "join(texts)", "join([1])",
    "format(1, 2)", "zfill(7)", "center(8)", "ljust(7)", "ljust(7, '.')", "rjust(7, '.')", "partition('d')", "rpartition('i')", "removeprefix('t')", "removesuffix('s')", "swapcase()", "casefold()", "expandtabs()", "encode()",
    "items()", "keys()", "values()", "items()|list", "keys()|list", "values()|list", "get('a')", "get('z')", "get('z', 'q')", "get('role')", "get('content', '')", "get(0)", "copy()", "index(1)", "append(4)", "pop()", "update({'z': 1})",
    "items", "a", "role", "content", "n", "get", "missing.deeper", "bit_length()", "is_integer()", "__class__", "real", "items()|length", "keys()|first", "values()|sum", "keys()|join(',')", "items()|map('first')|join",
]
SUBSCRIPTS = ["[0]", "[-1]", "[5]", "['a']", "['role']", "['items']", "['content'][0]", "[:1]", "[1:]", "[-2:]", "[::-1]", "[::2]", "[1:-1]", "[:0]", "[none]", "[true]", "[0:9]", "[-9:2]", "['n':]", "[2:0:-1]", "[1:][0]", "[:2]|length", "[::-1]|list", "[1.0]", "[missing]"]
OPERATORS = ["+", "-", "*", "/", "//", "%", "**", "~", "==", "!=", "<", "<=", ">", ">=", "in", "not in", "and", "or"]
STATEMENTS = [
    "{{% for x in {a} %}}{{{{ x }}}};{{% else %}}none{{% endfor %}}",
    "{{% for x in {a} %}}{{{{ loop.index }}}}/{{{{ loop.length }}}} {{{{ loop.previtem }}}}<{{{{ x }}}}<{{{{ loop.nextitem }}}};{{% endfor %}}",
    "{{% for x in {a} %}}{{{{ loop.first }}}}{{{{ loop.last }}}}{{{{ loop.revindex }}}}{{{{ loop.revindex0 }}}}{{{{ loop.index0 }}}}{{{{ loop.depth }}}};{{% endfor %}}",
    "{{% for x in {a} %}}{{{{ loop.previtem is defined }}}}{{{{ loop.nextitem is none }}}}{{{{ loop.changed(x) }}}}{{{{ loop.cycle('a', 'b') }}}}{{% endfor %}}",
    "{{% for x in turns %}}{{% if loop.previtem and loop.previtem.role == x.role %}}same{{% endif %}}{{% if loop.nextitem is undefined or loop.nextitem.n > {a} %}}!{{% endif %}}{{% endfor %}}",
    "{{% for k, v in ({a}).items() %}}{{{{ k }}}}={{{{ v }}}};{{% endfor %}}",
    "{{% for k, v in {a} %}}{{{{ k }}}}={{{{ v }}}};{{% endfor %}}",
    "{{% for k, v in {a}|dictsort %}}{{{{ k }}}}={{{{ v }}}};{{% endfor %}}",
    "{{% for k in {a} if k %}}{{{{ loop.index }}}}{{{{ k }}}}{{% endfor %}}",
    "{{% for k in {a} if k is not none %}}{{% if loop.index > 1 %}}{{% break %}}{{% endif %}}{{{{ k }}}}{{% endfor %}}",
    "{{% for k in {a} %}}{{% if k == {b} %}}{{% continue %}}{{% endif %}}{{{{ k }}}}{{% endfor %}}",
    "{{% if {a} %}}yes{{% else %}}no{{% endif %}}",
    "{{% if not {a} %}}yes{{% elif {b} %}}no{{% else %}}other{{% endif %}}",
    "{{% if {a} is defined and {a} %}}yes{{% endif %}}",
    "{{% if {a} is iterable and {a} is not mapping and {a} is not string %}}{{{{ ({a})|length }}}}{{% endif %}}",
    "{{% if {a} is iterable and ({a})|length > 0 %}}some{{% endif %}}",
    "{{% if {a} is string %}}{{{{ {a} }}}}{{% elif {a} is sequence %}}seq{{% elif {a} is mapping %}}map{{% endif %}}",
    "{{% set x = {a} %}}{{{{ x }}}}{{% if {b} %}}{{% set x = {b} %}}{{% endif %}}{{{{ x }}}}",
    "{{% set ns = namespace(x={a}, y=[]) %}}{{% for i in [1, 2] %}}{{% set ns.x = {b} %}}{{% set ns.y = ns.y + [i] %}}{{% endfor %}}{{{{ ns.x }}}}{{{{ ns.y }}}}",
    "{{% for i in [1, 2] %}}{{% set x = {a} %}}{{{{ x }}}}{{% endfor %}}{{{{ x is defined }}}}",
    "{{% macro m(p, q={a}) %}}{{{{ p }}}}:{{{{ q }}}}{{% endmacro %}}{{{{ m({b}) }}}}{{{{ m({b}, q=1) }}}}{{{{ m() }}}}",
    "{{% macro m(p) %}}{{{{ p is undefined }}}}{{{{ varargs }}}}{{{{ kwargs }}}}{{% endmacro %}}{{{{ m({a}, 1, k=2) }}}}",
    "{{% macro m(p) -%}}  {{{{ p }}}}  {{%- endmacro %}}{{{{ m({a})|length }}}}{{{{ m({a}) ~ 'x' }}}}{{{{ m({a}) is string }}}}{{{{ m({a}) + 'x' }}}}",
    "{{% macro w() %}}<{{{{ caller() }}}}>{{% endmacro %}}{{% call w() %}}{{{{ {a} }}}}{{% endcall %}}",
    "{{% set t %}}<{{{{ {a} }}}}>{{% endset %}}{{{{ t }}}}{{{{ t|length }}}}",
    "{{% filter upper %}}a{{{{ {a} }}}}{{% endfilter %}}",
    "{{% with x = {a}, y = {b} %}}{{{{ x }}}}{{{{ y }}}}{{% endwith %}}",
    "{{% set a, b = {a} %}}{{{{ a }}}}{{{{ b }}}}",
    "{{% for x in {a} recursive %}}{{{{ x }}}}{{% if x is iterable and x is not string %}}[{{{{ loop(x) }}}}]{{% endif %}}{{% endfor %}}",
    "a  \n  {{% if {a} %}}  \n b {{%- endif %}} \n {{{{- {b} }}}} \n\n{{% set x = 1 %}}\nc\n",
    "{{{{ raise_exception('no') if {a} else 'ok' }}}}",
    "{{% set m = {a} %}}{{% if m.content is string %}}{{{{ m.content }}}}{{% elif m.content %}}{{% for p in m.content %}}{{{{ p.text or p }}}}{{% endfor %}}{{% else %}}-{{% endif %}}",
    "{{% set _ = [].append({a}) %}}", "{{{{ joiner(',') }}}}", "{{% set c = cycler('a', 'b') %}}{{{{ c.next() }}}}",     "{{{{ self }}}}", "{{{{ '%s-%s' % ({a}, {b}) }}}}", "{{{{ '%d|%5s|%-4s|%r' % (1, {a}, {b}, {a}) }}}}", "{{{{ '{{}}-{{}}'.format({a}, {b}) }}}}",
]
# What the template language here has more than Jinja 2.
UNKNOWN = [
    "{a}|bool", "{a}|chain([1])|list", "{a}|zip([1, 2])|list", "{a}|lines", "{a}|split('a')", "{a} is startingwith('t')", "{a} is endingwith('s')",
    "debug()", "{a} is safe", "{a} is int", "{a}|nothing", "{a} is nothing", "nothing({a})", "{a}|map('nothing')|list", "{a}|select('nothing')|list",
]

# Where Python's rules are easily missed.
EDGES = [
    "(2 ** 126 * -2) // -1", "(2 ** 126 * -2) % -1", "-7 // 2", "-7 % -2", "7 % -2", "1 < 2 < 3", "3 > 2 > 2", "1 in [1] in [[1]]",
    "1.5|round(70000)", "1.25|round(1)", "2|round(400, 'ceil')", "'1_000'|int", "'1__0'|int(7)", "'1_0.5'|float", "'_1'|int(7)", "'-0x1f'|int(0, 16)", "'0X1F'|int(0, 16)",
    "'0x_1f'|int(0, 16)", "'0x0x1f'|int(7, 16)", "'0x-1'|int(7, 16)", "'ff'|int(7, 16)", "'0x1f'|int(7)", "'1e40'|int", "1e300|int", "' 12\\x1c'|int", "'½'|int(7)",
    "'½'.isdecimal()", "'½'.isdigit()", "'½'.isnumeric()", "'²'.isdecimal()", "'²'.isdigit()", "'²'.isnumeric()", "'1²a'.isdigit()", "''.isdigit()", "'日'.isdigit()", "'日'.isnumeric()",
    "'\\x1c\\x1f'.isspace()", "'a\\x1cb \\x1d'.split()", "'a\\x1cb c '.rsplit(none, 1)", "'日a 1a 3rd they\\'re ßx'.title()", "'日a 1a 3rd they\\'re ßx-ßy'|title", "'éÀ'|capitalize",
    "'\\x4'", "'\\x41\\101\\u00e9\\q\\\n'", "'\\N{BULLET}'", "'a'|indent(20000)", "'a\nb'|indent(1500)|length", "'a'.center(12000)|length", "'a'.zfill(9000)|length", "'-7'.zfill(5)",
    "[1]|tojson(indent=20)", "turns|map(attribute='x.y', default='q')|list", "turns|map(attribute='content.role', default=none)|list", "turns|map(attribute='content.0', default={'0': 5})|list",
    "[3, 'a', 1]|sort", "[[2, 'b'], [1, 'a'], [2, 'a']]|sort(reverse=true)", "[3, 1, 2, 1]|sort(reverse=true)", "'abc'[5:0:-2]", "'abc'[1:9:2 ** 126]", "'abc'[-9:-1]", "'abc'[::-9]",
    "1 if no else 2 if no else 3", "'abcab'.rpartition('b')", "'abc'.partition('z')", "'abcab'.rfind('b')", "'abc'.count('')", "('<a>'|e).upper()", "('<a>'|e)|lower|e", "'<'|safe + '<'",
]


# What templates of published models do besides: one for each of SmolLM3, GLM-4.5, Granite 4, OLMo 3, Ministral 3, Phi-4-mini, Seed-OSS, Mistral Small 3.1 and Kimi K2.
CALLS = "{%- set said = [{'role': 'system', 'content': 'be brief /quiet \\n'}, {'role': 'user', 'content': [{'type': 'text', 'text': 'tide?'}, {'type': 'image'}]}, " \
    "{'role': 'assistant', 'content': '<t>\\n hm \\n</t>\\n\\n 5 <m> ', 'calls': [{'id': 'abcdefghij', 'function': {'name': 'a<b', 'arguments': {'at': 'ü \"x\"', 'n': 1, 'deep': {'k': [1.5, none]}}}}, " \
    "{'function': {'name': 'n', 'arguments': ''}}]}, {'role': 'tool', 'content': {'low': 0.5}}, {'role': 'tool', 'content': '[1]'}, {'role': 'assistant', 'content': none}] %}"
MODELS = [
    """{# ── defaults ── #}
{%- if thinks is not defined -%}{%- set thinks = true -%}{%- endif -%}
{%- if said[0].role == "system" -%}
  {%- set system = said[0].content -%}
  {%- set mode = "/quiet" if "/quiet" in system else "/loud" -%}
  {%- set own = system.replace("/quiet", "").replace("/loud", "").rstrip() -%}
{%- endif -%}
{%- if "/over" in nobody -%}{{- own -}}{%- else -%}
{{- "Mode: " ~ mode ~ "\\n" -}}
  {{- own + "\\n\\n" -}}
{%- endif -%}
{%- set ns = namespace(tools="<tools>\\n") -%}
{%- for turn in said -%}{%- set ns.tools = ns.tools ~ (turn.calls | tojson if turn.calls else "-") ~ "\\n" -%}{%- endfor -%}
{%- set xml = ns.tools + "</tools>" -%}
{%- if xml -%}{{- xml -}}{%- endif -%}
{%- if python_tools -%}{{- python_tools -}}{%- else -%}{{- "None" -}}{%- endif -%}
{%- for turn in said -%}
  {%- set content = turn.content if turn.content is string else "" -%}
  {{ "<" + turn.role + ">\\n" + content.lstrip("\\n") }}
{%- endfor -%}""",
    """[g]<s>
{%- macro shown(content) -%}
    {%- if content is string -%}
        {{- content }}
    {%- elif content is iterable and content is not mapping -%}
        {%- for item in content -%}
            {%- if item is mapping and item.type == 'text' -%}{{- item.text }}{%- elif item is string -%}{{- item }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{- content }}
    {%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(last=-1) %}
{%- for m in said %}
    {%- if m.role == 'user' %}
        {% set ns.last = loop.index0 -%}
    {%- endif %}
{%- endfor %}
{% for m in said %}
{%- if m.role == 'user' -%}<|user|>
{{ shown(m.content) }}
{{- '/no' if (thinks is defined and not thinks and not shown(m.content).endswith("/no")) else '' -}}
{{- '?' if shown(m.content).endswith("tide?") else '' -}}
{%- elif m.role == 'assistant' -%}
{%- set reason = '' %}{%- set content = shown(m.content) %}
{%- if m.reason is string %}{%- set reason = m.reason %}
{%- elif '</t>' in content %}
    {%- set reason = content.split('</t>')[0].rstrip('\\n').split('<t>')[-1].lstrip('\\n') %}
    {%- set content = content.split('</t>')[-1].lstrip('\\n') %}
{%- endif %}
{%- if loop.index0 > ns.last and reason -%}
{{ '\\n<t>' + reason.strip() +  '</t>'}}
{%- else -%}
{{ '\\n<t></t>' }}
{%- endif -%}
{%- if content.strip() -%}
{{ '\\n' + content.strip() }}
{%- endif -%}
{% if m.calls %}
{% for call in m.calls %}
{%- if call.function %}
    {%- set call = call.function %}
{%- endif %}
{{ '\\n<call>' + call.name }}
{% set _args = call.arguments or {} %}
{% for k, v in _args.items() %}
<k>{{ k }}</k>
<v>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</v>
{% endfor %}
</call>{% endfor %}
{% endif %}
{%- elif m.role == 'tool' -%}
{%- if m.content is string -%}
{%- if loop.first or (said[loop.index0 - 1].role != "tool") %}
    {{- '<|seen|>' }}
{%- endif %}
{{- '\\n' ~ m.content }}
{%- else -%}
<|seen|>{% for tr in m.content %}

<r>
{{ tr.output if tr.output is defined else tr }}
</r>{% endfor -%}
{% endif -%}
{%- elif m.role == 'system' -%}
<|system|>
{{ shown(m.content) }}
{%- endif -%}
{%- endfor -%}""",
    """{%- set ns = namespace(tools='T:',
                       system=''
                       ) %}
{%- if others is defined and others %}{%- set tools = others %}{%- endif %}
{%- if said[0].content is string %}{%- set ns.system = said[0].content %}{%- endif %}
{%- set ns.tools = ns.tools + '\\n' + (said[2].calls[0] | tojson) %}
{{- '<system>' + ns.system + '\\n\\n' + ns.tools + '\\n' }}
{%- for turn in said %}
    {%- set content = namespace(val='') %}
    {%- if turn.content is string %}
        {%- set content.val = turn.content %}
    {%- elif turn.content is iterable %}
        {%- for entry in turn.content %}
            {%- if entry.type== 'text' %}
                {%- if content.val != '' %}{%- set content.val = content.val + '\\n' %}{%- endif %}
                {%- set content.val = content.val + entry.text %}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {%- if (turn.role == 'user') or (turn.role == 'system' and not loop.first) %}
        {{- '<u>' + content.val + '\\n' }}
    {%- elif turn.role == 'assistant' %}
        {{- content.val }}
        {%- for call in turn.calls %}
            {%- if (loop.first and content.val) or (not loop.first) %}{{- '\\n' }}{%- endif %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '{"name": "' }}{{- call.name }}{{- '", "arguments": ' }}
            {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
            {{- '}' }}
        {%- endfor %}
    {%- elif turn.role == 'tool' %}
        {%- if loop.first or (said[loop.index0 - 1].role != 'tool') %}{{- '<u>' }}{%- endif %}
        {{- content.val }}
        {%- if loop.last or (said[loop.index0 + 1].role != 'tool') %}{{- '<end>' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{{- ' ' + turns | tojson() }}""",
    """{%- set has_system = said|selectattr('role', 'equalto', 'system')|list|length > 0 -%}{%- if not has_system -%}{{- 'none' -}}{%- elif nobody is none or (nobody | length) == 0 -%}{{- 'no functions
' -}}{%- endif -%}{%- for turn in said -%}{%- if turn.get('functions', none) is not none -%}{{- turn['functions'] -}}{%- elif turn.get('calls', none) is not none %}{%- for call in turn['calls'] + ['plain'] %}{%- if call is mapping and call.get('function', none) is not none and call.function.arguments is mapping %}{%- set args = call['function']['arguments'] -%}{%- set ns = namespace(list=[]) -%}{%- for key, value in args.items() -%}{%- set ns.list = ns.list + [key ~ '=' ~ (value | tojson)] -%}{%- endfor -%}{%- set arguments = ns.list | join(', ') -%}{{- call['function']['name'] + '(' + arguments + ')' -}}{%- if not loop.last -%}{{ '\\n' }}{%- endif -%}{% else %}{{- call -}}{%- endif %}{%- endfor %}{%- endif -%}{%- if not loop.last -%}{{- '<|end|>' + '\\n' -}}{%- else -%}{{- nobody -}}{%- endif -%}{%- if loop.last and has_system -%}{{- '<|assistant|>\\n' -}}{%- endif -%}{%- endfor -%}""",
    """{%- set ns = namespace(index=0) %}
{%- for turn in said[1:] %}
    {%- if turn.role == 'user' or (turn.role == 'assistant' and (turn.calls is not defined or turn.calls is none or turn.calls | length == 0)) %}
        {%- if (turn['role'] == 'user') != (ns.index % 2 == 0) %}
            {{- raise_exception('roles must alternate') }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- '[TOOLS]' + (said[2].calls| tojson) + '[/TOOLS]' }}
{%- for turn in said %}

    {#- Any role. #}
    {%- if turn['content'] is string and turn['content'] != '' %}
        {{- turn['content'] -}}
    {%- elif turn['role'] == 'tool' %}
        {{- '[R]' + turn['content']|string + '[/R]' }}
    {%- elif turn['role'] == 'user' and turn['content'] | length == 2 %}
        {%- set blocks = turn['content'] | sort(attribute='type') %}
        {%- if turn['content'][0]['type'] == 'text' and turn['content'][1]['type'] in ['image', 'image_url'] %}
            {%- set blocks = [turn['content'][1], turn['content'][0]] + blocks %}
        {%- endif %}
        {%- for block in blocks %}
            {%- if block['type'] in ['image', 'image_url'] %}{{- '[IMG]' }}{%- else %}{{- block['text'] }}{%- endif %}
        {%- endfor %}
    {%- endif %}        
    {%- for tool in turn.calls %}
        {%- set name = tool['function']['name'] %}
        {%- set arguments = tool['function']['arguments'] %}
        {%- if arguments is not string %}
            {%- set arguments = arguments|tojson|safe %}
        {%- elif arguments == '' %}
            {%- set arguments = '{}' %}
        {%- endif %}
        {{- '[CALL]' + name + '[ARGS]' + arguments }}
    {%- endfor %}
{%- endfor %}
{{- raise_exception('got ' + said[0]['role'] + '.') if said | length == 9 else '' }}""",
    """{%- if said[1]["role"] == "system" %}
    {%- set system = said[1]["content"] %}
{% elif turns is defined -%}
    {%- set system = "" -%}
{%- endif %}

{%- if system is defined -%}
    {{- '<|s|>' + system -}}
    {%- if said is defined -%}
        {% for call in said[2]['calls'] %}
            {{- '<|tool|>' + (call['function'] | tojson) + '<|/tool|>' -}}
        {% endfor %}
        {%- if '<|call|>' not in system -%}
            {{- 'respond in this format: <|call|>{"name": "f", "arguments": {"a": 1}}<|/call|>\\n' -}}
        {%- endif -%}
    {%- endif -%}
{%- endif -%}
{%- for turn in said -%}
    {%- if turn['role'] == 'tool' -%}
        {{- (turn['content'] | tojson) + '<|end|>' -}}
    {%- elif turn['role'] != 'system' -%}
        {{- '<|' + turn['role'] + '|>' -}}
        {%- if turn.content is string -%}
            {{- turn['content'] -}}
        {%- endif -%}  
        {%- for call in turn.nothing -%}{{- call -}}{%- endfor -%}
    {%- endif -%}
{%- endfor -%}""",
    """{# ‑‑‑ 特 ‑‑‑ #}
{%- set begin     = '<b>'      -%}
{%- if not budget is defined %}
{%- set budget = -1 -%}
{%- endif -%}
{%- set steps = {
     0:      0,
     512:    128,
     16384:  1024
} -%}
{%- set ns = namespace(interval = None) -%}
{%- for k, v in steps | dictsort -%}
    {%- if ns.interval is none and big <= k -%}
        {%- set ns.interval = v -%}
    {%- endif -%}
{%- endfor -%}
{%- if ns.interval is none -%}
    {%- set ns.interval = steps[16384] -%}
{%- endif -%}
{%- macro kind(t) -%}
    {%- if t == "string" -%}str
    {%- elif t in ("number", "integer") -%}int
    {%- else -%}Any{%- endif -%}
{%- endmacro -%}
{{ begin + "系统\\n" }}{{ns.interval}}{{ "." }}
{%- for item in said if item.role == "assistant" %}

def {{ item.role }}(
{%- for name, spec in {'a': {'type': 'integer'}, 'b': deep, 'c': {}}.items() %}
        {{- name }}: {{ kind(spec.type) }}{% if not loop.last %},{% endif %}
{%- endfor %}):
    '''
    {{ item.about | trim }}

    {# -- #}
    {%- if item.calls %}
    Args:
    {%- for call in item.calls %}

    - {{ call.function.name }}
      {%- if 'id' in call %} [必]{% else %} [选]{% endif %}:
      {{- " " ~ (call.nothing or "") }}
    {%- endfor %}
    {%- endif %}
{%- endfor %}
{%- if not budget == -1 %}{{ "budget" }}{%- endif %}
{%- if said is iterable and said | length > 0 or nobody is defined %}
{{ begin }}
{%- endif %}
{%- for arg_name, arg_value in said[2].calls[0].function.arguments | items %}
{%- set arg_value = arg_value if arg_value is string else arg_value | string %}
{{ arg_name + "=" + arg_value+"\\n" }}
{%- endfor %}
{%- if said[2].content is string and said[2].content | trim | length > 0 %}
{{ "\\n" + said[2].content | trim + begin }}
{%- endif %}""",
    """{%- set default = "You are brief.\\
The date is " + "today" + ".\\
\\
(e.g. \\"here?\\" => \\"where?\\")" %}

{{- default }}
{%- set users = said | selectattr("role", "equalto", "user") | list %}
{%- set filtered = [] %}
{%- for turn in said %}
    {%- if turn["role"] not in ["tool", "results"] and not turn.get("calls") %}
        {%- set filtered = filtered + [turn] %}
    {%- endif %}
{%- endfor %}
{{- filtered | length }}
{%- for turn in said %}
    {%- if turn["role"] == "user" and (turn == users[-1]) %}
        {%- for key, val in said[2].calls[0].function.items() if key != "return" %}
            {%- if val is string %}
                {{- '"' + key + '": "' + val + '"' }}
            {%- else %}
                {{- '"' + key + '": ' + val|tojson }}
            {%- endif %}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
        {%- endfor %}
    {%- elif turn.calls is defined %}
        {%- set out = turn.calls[0].function|tojson %}
        {{- out[:-1] }}
        {%- if not turn.calls[0].id is defined or turn.calls[0].id|length < 9 %}
            {{- raise_exception("ids are longer" + turn.calls[0].id) }}
        {%- endif %}
        {{- ', "id": "' + turn.calls[0].id[-9:] + '"}' }}
    {%- elif turn.content is defined and turn.content.content is defined %}
        {{- turn.content.content }}
    {%- else %}
        {{- '{"content": ' + turn.content|string + ", " }}
    {%- endif %}
{%- endfor %}""",
    """{% if said -%}
    {{ '<|tools|>' -}}
    {{- said | tojson -}}
    {{ '<|end|>' -}}
{%- endif -%}

{%- for turn in said -%}
  {%- if loop.first and said[0]['role'] != 'user' -%}
    {{ '<|s|>' }}
  {%- endif -%}
  {%- if turn['content'] is string -%}
    {{- turn['content'] + '<|end|>' -}}
  {%- elif turn['content'] is not none -%}
    {%- for content in turn['content'] -%}
      {%- if content['type'] == 'image' or 'image' in content or 'image_url' in content -%}
        {{ '<|image|>' }}
      {%- else -%}
        {{ content['text'] }}
      {%- endif -%}
    {%- endfor -%}
    {{ '<|end|>' }}
  {%- endif -%}
{%- endfor -%}""",
]


CHANGING = ("0x", "generator object", "built-in", "dict_keys", "dict_values", "<class", "lorem")


class Generator:
    def __init__(self, seed):
        self.random = random.Random(seed)

    def value(self):
        return self.random.choice(self.random.choice([list(VALUES), list(VALUES), LITERALS]))

    def expression(self, depth):
        choose = self.random.random()
        if depth == 0 or choose < 0.08:
            return self.value()
        inner = self.expression(depth - 1)
        if choose < 0.36:
            return f"{self.operand(inner)}|{self.random.choice(FILTERS)}"
        if choose < 0.50:
            negated = self.random.choice(["is", "is", "is not"])
            return f"{self.operand(inner)} {negated} {self.random.choice(TESTS)}"
        if choose < 0.64:
            return f"{self.operand(inner)}.{self.random.choice(METHODS)}"
        if choose < 0.72:
            return f"{self.operand(inner)}{self.random.choice(SUBSCRIPTS)}"
        if choose < 0.92:
            other = self.expression(self.random.randrange(depth))
            return f"{self.operand(inner)} {self.random.choice(OPERATORS)} {self.operand(other)}"
        if choose < 0.94:
            return f"not {self.operand(inner)}"
        if choose < 0.96:
            return f"{self.operand(inner)} if {self.operand(self.expression(1))}"
        if choose < 0.98:
            return f"{self.operand(inner)} if {self.value()} else {self.value()}"
        return f"[{inner}, {self.value()}]"

    def operand(self, code):
        return code if code.isidentifier() else f"({code})"

    def template(self):
        choose = self.random.random()
        if choose < 0.25:
            statement = self.random.choice(STATEMENTS)
            a, b = (self.operand(self.expression(self.random.choice([0, 0, 1]))) for _ in "ab")
            return statement.format(a=a, b=b)
        if choose < 0.27:
            return "{{ " + self.random.choice(UNKNOWN).format(a=self.value()) + " }}"
        return "{{ " + self.expression(self.random.choice([1, 1, 2, 2, 3])) + " }}"


def environment():
    """As transformers makes it."""

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    return made


def text_of(made, template):
    try:
        # `indent` of a list appends to it.
        return made.from_string(template).render(**copy.deepcopy(VALUES))
    except Exception:
        return None


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    generator, made, cases = Generator(options.seed), environment(), {}
    while len(cases) < options.count:
        template = generator.template()
        text = text_of(made, template)
        # Most random expressions are errors, which say less than texts; addresses of objects change with each run.
        is_telling = generator.random.random() < 0.3 if text is None else len(text) < 1000 and not any(word in text for word in CHANGING)
        if is_telling:
            cases[template] = text
    for edge in EDGES:
        cases["{{ " + edge + " }}"] = text_of(made, "{{ " + edge + " }}")
    for model in MODELS:
        cases[CALLS + model] = text_of(made, CALLS + model)
    rows = ",\n".join(json.dumps([template, text], ensure_ascii=False) for template, text in cases.items())
    print('{"values": ' + json.dumps(VALUES, ensure_ascii=False) + ',\n"cases": [\n' + rows + "\n]}")


if __name__ == "__main__":
    main()
